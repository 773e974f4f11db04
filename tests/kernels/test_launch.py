"""The largest grids that devices take, and that tokens and rows are counted along the one long dimension of a grid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from launcher_cases import CASES, Case, Problem

from xmoe.kernels import launch
from xmoe.kernels.launch import Cost, Launch, recording
from xmoe.kernels.triton_kernels import gather_rows
from xmoe.kernels.tuning import ARCHES, Config

SMALL = Problem(tokens=64, width=16, expert_width=16, top_k=2, counts=(64, 64), device="meta")
LARGE = replace(SMALL, tokens=64 * SMALL.tokens, counts=(64 * 64, 64 * 64))


def _toy_kernel() -> None:
    """Never run: its name alone is read."""


def call_of(*grid: int, num_warps: int = 4) -> Launch:
    config = Config(blocks={}, num_warps=num_warps)
    cost = Cost(bytes_read=0, bytes_written=0)
    return Launch(op="", kernel=_toy_kernel, grid=grid, arguments={"x": torch.empty(1)}, config=config, cost=cost)


# Architecture, warps of a program, and the largest grid of these.
LARGEST = [
    pytest.param("gfx90a", 4, (2**24 - 1, 65535, 65535), id="AMD, 256 threads"),
    pytest.param("gfx942", 1, (2**26 - 1, 65535, 65535), id="AMD, 64 threads"),
    pytest.param("sm_80", 4, (2**31 - 1, 65535, 65535), id="NVIDIA, 128 threads"),
    pytest.param("sm_90", 8, (2**31 - 1, 65535, 65535), id="NVIDIA, 256 threads"),
]


@pytest.mark.parametrize(("arch", "num_warps", "grid"), LARGEST)
def test_the_largest_grid_is_taken_and_one_program_more_is_not(arch: str, num_warps: int, grid: tuple[int, ...]):
    for dimensions in (1, 2, 3):
        with recording(arch) as calls:
            launch.launch(call_of(*grid[:dimensions], num_warps=num_warps))
        assert len(calls) == 1
    for place, axis in enumerate("xyz"):
        larger = tuple(size + (place == other) for other, size in enumerate(grid))
        threads = num_warps * (64 if arch.startswith("gfx") else 32)
        message = f"toy: grid {larger} has {larger[place]} programs of {threads} threads along {axis}, more than "
        with (
            recording(arch) as calls,
            pytest.raises(ValueError, match=re.escape(f"{message}the {grid[place]} that an ")),
        ):
            launch.launch(call_of(*larger, num_warps=num_warps))
        assert calls == []


@pytest.mark.parametrize("hip", ["6.4", None])
def test_a_device_is_asked_for_its_own_limit(monkeypatch: pytest.MonkeyPatch, hip: str | None):
    ran: list[Launch] = []
    monkeypatch.setattr(launch, "_run", ran.append)
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(torch.version, "hip", hip)
    call = call_of(2**24)
    if hip is None:
        launch.launch(call)
        assert ran == [call]
    else:
        with pytest.raises(ValueError, match=r"grid \(16777216,\) .* an AMD device takes"):
            launch.launch(call)
        assert ran == []


def test_the_interpreter_has_no_limit(monkeypatch: pytest.MonkeyPatch):
    ran: list[Launch] = []
    monkeypatch.setattr(launch, "_run", ran.append)
    launch.launch(call_of(2**40, 2**40))
    assert len(ran) == 1


def test_a_launcher_of_too_many_rows_names_its_kernel():
    rows = 2**26
    x, slot_ids = torch.empty((rows, 8), device="meta"), torch.empty(rows, dtype=torch.int32, device="meta")
    with recording("sm_90") as calls:
        gather_rows(x, slot_ids, 1)
    assert calls[0].grid == (rows, 1)
    with recording("gfx90a"), pytest.raises(ValueError, match=rf"gather_rows: grid \({rows}, 1\) has {rows} programs"):
        gather_rows(x, slot_ids, 1)


def grids(case: Case, problem: Problem, arch: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    with recording(arch) as calls:
        case.run(problem)
    return ((call.name, call.grid) for call in calls)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_only_x_grows_with_tokens_and_rows(case: Case, arch: str):
    sizes: Any = zip(grids(case, SMALL, arch), grids(case, LARGE, arch), strict=True)
    for (name, small), (other, large) in sizes:
        assert name == other
        assert small[1:] == large[1:], name
