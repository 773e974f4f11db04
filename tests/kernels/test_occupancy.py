"""How many waves run at once, against examples worked by hand (each in its id)."""

from __future__ import annotations

import pytest

from xmoe.kernels.occupancy import LIMITS, waves_per_simd


@pytest.mark.parametrize(
    ("arch", "registers", "lds_bytes", "num_warps", "waves"),
    [
        pytest.param("gfx90a", 64, 0, 4, 8, id="512 / 64 = 8"),
        pytest.param("gfx90a", 65, 0, 4, 7, id="65 rounds up to 72, 512 / 72 = 7.1"),
        pytest.param("gfx90a", 8, 0, 4, 8, id="never more than 8"),
        pytest.param("gfx90a", 132, 0, 4, 3, id="136: 3.8"),
        pytest.param("gfx90a", 132, 0, 8, 2, id="two waves of a workgroup on each SIMD: 3 hold one workgroup"),
        pytest.param("gfx90a", 104, 16 * 1024, 4, 4, id="4 by registers, 4 by LDS"),
        pytest.param("gfx90a", 104, 16 * 1024 + 1, 4, 3, id="one byte more: 16896, 3 by LDS"),
        pytest.param("gfx90a", 32, 24 * 1024, 8, 4, id="2 workgroups of 8 waves by LDS"),
        pytest.param("gfx942", 32, 64 * 1024, 4, 1, id="one workgroup has all of the LDS"),
        pytest.param("gfx942", 32, 64 * 1024 + 1, 4, 0, id="more LDS than there is"),
        pytest.param("gfx942", 264, 0, 8, 0, id="272: 1 wave, but a workgroup needs 2"),
        pytest.param("gfx942", 64, 0, 1, 8, id="workgroups of one wave fill all four SIMDs"),
        pytest.param("gfx942", 64, 24 * 1024, 1, 0.5, id="two workgroups of one wave on four SIMDs"),
        pytest.param("gfx942", 64, 4096, 2, 8, id="16 workgroups by LDS, 2 waves each, on 4 SIMDs"),
        pytest.param("gfx950", 178, 65 * 1024, 4, 2, id="184: 2 by registers; 66560 of 163840: 2 by LDS"),
        pytest.param("gfx950", 32, 16 * 1024 + 1, 4, 9 - 1, id="17920 with granule 1280: 9 by LDS, 8 by hardware"),
        pytest.param("gfx950", 32, 32 * 1024, 4, 4, id="33280 with granule 1280: 4 by LDS, not 5"),
        pytest.param("sm_80", 32, 0, 4, 16, id="64 warps on four schedulers"),
        pytest.param("sm_80", 168, 0, 4, 3, id="16384 / (168 * 32) = 3.05"),
        pytest.param("sm_80", 169, 0, 4, 2, id="176: 2.9"),
        pytest.param("sm_80", 255, 81 * 1024, 8, 2, id="81 + 1 KB twice is all of 164 KB; 2 warps by registers"),
        pytest.param("sm_80", 128, 81 * 1024, 8, 4, id="2 blocks of 8 warps by shared memory"),
        pytest.param("sm_80", 128, 82 * 1024, 8, 2, id="83 KB twice is too much"),
        pytest.param("sm_90", 84, 73728, 8, 4, id="88: 5 warps, 2 blocks; 73 KB: 3 blocks"),
        pytest.param("sm_90", 16, 0, 1, 8, id="at most 32 blocks, of one warp each"),
    ],
)
def test_waves_per_simd(arch: str, registers: int, lds_bytes: int, num_warps: int, waves: float):
    assert waves_per_simd(arch, registers=registers, lds_bytes=lds_bytes, num_warps=num_warps) == waves


def test_what_a_workgroup_may_have_of_the_lds():
    found = {arch: limits.workgroup_lds_bytes // 1024 for arch, limits in LIMITS.items()}
    assert found == {"gfx90a": 64, "gfx942": 64, "gfx950": 160, "sm_80": 163, "sm_90": 227}
