"""How many waves of a kernel run at once on one SIMD: limits of each architecture, and whole workgroups that fit.

NVIDIA's words for the same: a warp for a wave, a scheduler's quarter of the SM for a SIMD, a block for a workgroup,
shared memory for LDS. Both have four to a compute unit, and registers for 512 times the lanes of a wave in each.
"""

from __future__ import annotations

from dataclasses import dataclass

SIMDS = 4
REGISTERS = 512
REGISTER_GRANULE = 8
_KB = 1024


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one compute unit.

    ``max_waves``        waves on one SIMD
    ``max_workgroups``   workgroups on one compute unit
    ``lds_bytes``        LDS of a compute unit, handed out in multiples of ``lds_granule``
    ``lds_reserved``     bytes of it that the system takes for each workgroup
    """

    max_waves: int
    max_workgroups: int
    lds_bytes: int
    lds_granule: int
    lds_reserved: int = 0

    @property
    def workgroup_lds_bytes(self) -> int:
        """The most that one workgroup may have."""
        return self.lds_bytes - self.lds_reserved


LIMITS = {
    "gfx90a": Limits(max_waves=8, max_workgroups=32, lds_bytes=64 * _KB, lds_granule=512),
    "gfx942": Limits(max_waves=8, max_workgroups=32, lds_bytes=64 * _KB, lds_granule=512),
    "gfx950": Limits(max_waves=8, max_workgroups=32, lds_bytes=160 * _KB, lds_granule=1280),
    "sm_80": Limits(max_waves=16, max_workgroups=32, lds_bytes=164 * _KB, lds_granule=128, lds_reserved=_KB),
    "sm_90": Limits(max_waves=16, max_workgroups=32, lds_bytes=228 * _KB, lds_granule=128, lds_reserved=_KB),
}


def waves_per_simd(arch: str, *, registers: int, lds_bytes: int, num_warps: int) -> float:
    """Waves that a SIMD runs at once, as the mean of a compute unit's four.

    Workgroups start whole: one of W waves puts ``ceil(W / 4)`` on some SIMD, which must have registers for them.
    0 means that not even one workgroup fits.

    Example, gfx90a: 132 registers (3 waves), 32 KB and 8 waves in a workgroup: 1 workgroup by registers, 2 by LDS:
    2 waves on each SIMD.
    """
    limits = LIMITS[arch]
    by_registers = min(limits.max_waves, REGISTERS // _rounded_up(max(registers, 1), REGISTER_GRANULE))
    # A SIMD with room for n waves takes n // m workgroups that put m there, and 4 / W as many of those below 4 waves.
    on_one_simd = -(-num_warps // SIMDS)
    workgroups = by_registers // on_one_simd * (SIMDS // num_warps if num_warps < SIMDS else 1)
    held = _rounded_up(lds_bytes, limits.lds_granule) + limits.lds_reserved
    if held:
        workgroups = min(workgroups, limits.lds_bytes // held)
    return min(workgroups, limits.max_workgroups) * num_warps / SIMDS


def _rounded_up(number: int, granule: int) -> int:
    return -(-number // granule) * granule
