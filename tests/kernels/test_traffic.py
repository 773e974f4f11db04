"""What kernels load and store, counted element by element in the interpreter, against what they must and declare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from address_rules import jit_functions, kernel_sources, pointer_arguments
from harness import LaunchTraffic, race_check, traffic
from launcher_cases import CASES, Case, Problem

from xmoe.kernels import triton_kernels as kernels
from xmoe.kernels.tuning import INTERPRETER, config_for

# Every expert's last tile is cut short by less than a tile in all, so that the host's bound on their number is exact.
PROBLEMS = {
    "ragged": Problem(tokens=20, width=40, expert_width=24, top_k=2, counts=(17, 1, 18)),
    "ones": Problem(tokens=1, width=1, expert_width=1, top_k=1, counts=(1,)),
    "bfloat16": Problem(tokens=17, width=48, expert_width=33, top_k=1, counts=(17,), dtype=torch.bfloat16),
}
RAGGED = PROBLEMS["ragged"]

FUNCTIONS = jit_functions(kernel_sources(Path(__file__).parents[2] / "kernels"))
POINTERS = pointer_arguments(FUNCTIONS)


def counted(run: Callable[[], Any]) -> LaunchTraffic:
    with traffic() as launches:
        run()
    (only,) = launches
    return only


def elements(launch: LaunchTraffic, *names: str) -> dict[str, tuple[int, int]]:
    """(loaded, stored) of the arguments."""
    return {name: (launch.loaded[name], launch.stored[name]) for name in names}


@pytest.mark.parametrize("problem", list(PROBLEMS))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_launchers_declare_what_is_counted_and_programs_do_not_race(case: Case, problem: str):
    with traffic() as launches, race_check():
        case.run(PROBLEMS[problem])
    assert tuple(dict.fromkeys(launch.kernel for launch in launches)) == case.kernels
    for launch in launches:
        assert launch.declared is not None, f"{launch.kernel} was not started by launch()"
        assert (launch.bytes_read, launch.bytes_written) == (
            launch.declared.bytes_read,
            launch.declared.bytes_written,
        ), f"{launch.kernel} loaded {dict(launch.loaded)} and stored {dict(launch.stored)}"
        # What the check of addresses takes for pointers, and so for 64 bits wide.
        assert not POINTERS[launch.kernel] & launch.numbers


def test_every_kernel_has_a_case():
    entries = {name for name in FUNCTIONS if name.endswith("_kernel")}
    assert entries == {kernel for case in CASES for kernel in case.kernels}


def test_gather_reads_and_writes_each_row_once():
    p = RAGGED
    slots = torch.randperm(p.tokens, dtype=torch.int32) * p.top_k
    x = p.floats(p.tokens, p.width)
    found = counted(lambda: kernels.gather_rows(x, slots, p.top_k))
    size = p.tokens * p.width
    assert elements(found, "x", "out") == {"x": (size, 0), "out": (0, size)}
    assert max(found.loads["x"].values()) == max(found.stores["out"].values()) == 1


@pytest.mark.parametrize("weighted", [False, True])
def test_combine_reads_each_row_once_and_writes_each_token_once(weighted: bool):
    p = RAGGED
    rows, weights = p.floats(p.assignments, p.width), p.floats(p.tokens, p.top_k)
    found = counted(lambda: kernels.combine_rows(rows, p.places_TK, weights if weighted else None))
    read, written = p.assignments * p.width, p.tokens * p.width
    assert elements(found, "rows", "out") == {"rows": (read, 0), "out": (0, written)}
    assert max(found.loads["rows"].values()) == max(found.stores["out"].values()) == 1


@pytest.mark.parametrize("counts", [(17, 1, 18), (0, 33, 3), (0, 0, 16)])
@pytest.mark.parametrize(
    ("name", "rows", "weights", "inner", "width"),
    [
        pytest.param("forward", ["a"], ["weight"], "width", "expert_width", id="forward"),
        pytest.param("forward-gathered-bias", ["a"], ["weight"], "width", "expert_width", id="forward-gathered"),
        pytest.param("forward_activated-swiglu", ["x"], ["up", "gate"], "width", "expert_width", id="swiglu"),
        pytest.param("forward_activated-gelu-bias", ["x"], ["up"], "width", "expert_width", id="gelu"),
        pytest.param("dgrad", ["d_out"], ["weight"], "expert_width", "width", id="dgrad"),
        pytest.param(
            "dgrad-second",
            ["d_out", "second_d_out"],
            ["weight", "second_weight"],
            "expert_width",
            "width",
            id="dgrad-second",
        ),
        pytest.param("dgrad_activated-swiglu", ["dy"], ["down"], "width", "expert_width", id="dgrad-swiglu"),
    ],
)
def test_grouped_gemms_load_tiles_times_blocks_of_operands(
    name: str, rows: list[str], weights: list[str], inner: str, width: str, counts: tuple[int, ...]
):
    """Rows past an expert's last and columns past the width are loaded as copies, and count; inner tails are not."""
    p = Problem(**{**vars_of(RAGGED), "counts": counts})
    found = counted(lambda: case_named(name).run(p))
    blocks = config_for(f"grouped_{name.split('-')[0]}", arch=INTERPRETER, dtype=p.dtype).blocks
    block_n = blocks["BLOCK_N"]
    row_tiles = sum(-(-count // p.block_m) for count in counts)
    tiles, depth = row_tiles * -(-getattr(p, width) // block_n), getattr(p, inner)
    expected = dict.fromkeys(rows, tiles * p.block_m * depth) | dict.fromkeys(weights, tiles * block_n * depth)
    assert {key: found.loaded[key] for key in expected} == expected
    assert not any(found.stored[key] for key in expected)


@pytest.mark.parametrize("counts", [(17, 1, 18), (0, 33, 3), (0, 0, 0)])
@pytest.mark.parametrize("gathered", [None, "x", "d_out"])
def test_weight_gradients_load_every_row_once_for_each_tile(gathered: str | None, counts: tuple[int, ...]):
    """A tile of an expert's matrix reads its block of columns of the expert's rows: no row of another expert."""
    p = Problem(**{**vars_of(RAGGED), "counts": counts})
    rows = {side: p.tokens if side == gathered else p.assignments for side in ("x", "d_out")}
    more = {"row_ids_M": p.row_ids_M, "gathered": gathered} if gathered else {}
    found = counted(
        lambda: kernels.grouped_wgrad(
            p.floats(rows["d_out"], p.expert_width), p.floats(rows["x"], p.width), p.schedule, **more
        )
    )
    blocks = config_for("grouped_wgrad", arch=INTERPRETER, dtype=p.dtype).blocks
    tiles = -(-p.expert_width // blocks["BLOCK_OUT"]) * -(-p.width // blocks["BLOCK_IN"])
    assert found.loaded["d_out"] == p.assignments * tiles * blocks["BLOCK_OUT"]
    assert found.loaded["x"] == p.assignments * tiles * blocks["BLOCK_IN"]
    assert found.stored == Counter({"out": p.experts * p.expert_width * p.width})
    assert set(found.stores["out"].values()) == {1}


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def vars_of(problem: Problem) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in problem.__dataclass_fields__}
