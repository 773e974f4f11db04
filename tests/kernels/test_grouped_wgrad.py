"""Weight gradients of ragged rows: kernel and twin against a loop over the rows in float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from xmoe.kernels import reference
from xmoe.kernels import triton_kernels as kernels
from xmoe.kernels.launch import Launch, recording
from xmoe.kernels.ragged import TileSchedule
from xmoe.testing import assert_close

SIDES = [kernels, reference]
WIDTHS = [(33, 67), (16, 7), (1, 1), (33, 16), (7, 16)]
COUNTS = [(40, 0, 7, 1), (0, 0, 63, 0), (16, 32, 0, 257), (1,), (0, 0)]


def schedule_of(counts: tuple[int, ...], *, block_m: int = 16) -> TileSchedule:
    return reference.tile_schedule(torch.tensor(counts), block_m=block_m, num_rows=sum(counts))


def loop(d_out: Tensor, x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """One outer product a row."""
    total = torch.zeros(len(counts), d_out.shape[1], x.shape[1], dtype=torch.float64)
    row = 0
    for expert, count in enumerate(counts):
        for _ in range(count):
            total[expert] += torch.outer(d_out[row].double(), x[row].double())
            row += 1
    return total


def problem(
    counts: tuple[int, ...], widths: tuple[int, int], *, gathered: str | None, dtype: torch.dtype
) -> tuple[dict[str, Any], Tensor]:
    """Arguments beside the schedule, and the expected result. Rows that no assignment has are NaN."""
    num_rows = sum(counts)
    sides = {"d_out": torch.randn(num_rows, widths[0]).to(dtype), "x": torch.randn(num_rows, widths[1]).to(dtype)}
    expected = loop(*sides.values(), counts)
    if gathered is None:
        return sides, expected
    row_ids_M = torch.randperm(num_rows + 5)[:num_rows]
    held = torch.full((num_rows + 5, sides[gathered].shape[1]), float("nan"), dtype=dtype)
    held[row_ids_M] = sides[gathered]
    return {**sides, gathered: held, "row_ids_M": row_ids_M.int(), "gathered": gathered}, expected


def call(side: Any, arguments: dict[str, Any], counts: tuple[int, ...], **more: Any) -> Tensor:
    arguments = dict(arguments)
    d_out, x = arguments.pop("d_out"), arguments.pop("x")
    return side.grouped_wgrad(d_out, x, schedule_of(counts), **arguments, **more)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("gathered", [None, "x", "d_out"])
@pytest.mark.parametrize(("counts", "widths"), list(zip(COUNTS, WIDTHS, strict=True)))
def test_equals_the_sum_of_outer_products(
    side: Any, gathered: str | None, counts: tuple[int, ...], widths: tuple[int, int]
) -> None:
    arguments, expected = problem(counts, widths, gathered=gathered, dtype=torch.float32)
    found = call(side, arguments, counts)
    assert_close(found, expected)
    for expert, count in enumerate(counts):
        assert count or torch.equal(found[expert], torch.zeros_like(found[expert]))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("gathered", [None, "d_out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_rows_are_summed_in_float32(side: Any, gathered: str | None, dtype: torch.dtype) -> None:
    counts = (7, 0, 63)
    arguments, expected = problem(counts, (33, 20), gathered=gathered, dtype=dtype)
    found = call(side, arguments, counts)
    assert found.dtype == dtype
    assert_close(found, expected)
    sums = call(side, arguments, counts, out=torch.zeros(3, 33, 20))
    assert_close(sums, expected)
    assert torch.equal(sums.to(dtype), found), "not rounded once, at the end"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("gathered", [None, "x"])
def test_adds_to_an_older_gradient(side: Any, gathered: str | None) -> None:
    counts = (5, 0, 18)
    arguments, expected = problem(counts, (20, 33), gathered=gathered, dtype=torch.bfloat16)
    older = torch.randn(3, 20, 33)
    out = older.clone()
    assert call(side, arguments, counts, out=out) is out
    assert_close(out, older.double() + expected)
    assert torch.equal(out[1], older[1])


def test_the_twin_computes_in_float64() -> None:
    counts = (9, 30)
    arguments, expected = problem(counts, (5, 6), gathered="x", dtype=torch.float64)
    found = call(reference, arguments, counts)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_two_runs_agree_bit_by_bit() -> None:
    counts = (40, 17)
    arguments, _ = problem(counts, (20, 20), gathered="d_out", dtype=torch.bfloat16)
    assert torch.equal(call(kernels, arguments, counts), call(kernels, arguments, counts))


def test_rows_need_not_be_contiguous() -> None:
    counts = (5, 6)
    arguments, expected = problem(counts, (9, 12), gathered=None, dtype=torch.float32)
    turned = {name: rows.t().contiguous().t() for name, rows in arguments.items()}
    assert_close(call(kernels, turned, counts), expected)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(5, 6)}, "x has 5 rows, the schedule 4"),
        ({"d_out": torch.zeros(5, 6)}, "d_out has 5 rows, the schedule 4"),
        ({"row_ids_M": torch.zeros(3, dtype=torch.int32)}, "row_ids_M has 3 rows, the schedule 4"),
        ({"x": torch.zeros(4, 6).half()}, "d_out (torch.float32) and x (torch.float16) must have one dtype"),
        ({"x": torch.zeros(4)}, "d_out ((4, 8)) and x ((4,)) must be matrices"),
        ({"gathered": "y"}, 'gathered (\'y\') must be "x" or "d_out"'),
        ({"out": torch.zeros(2, 8, 5)}, "out ((2, 8, 5)) must be contiguous and of shape (2, 8, 6)"),
        ({"out": torch.zeros(2, 6, 8).transpose(1, 2)}, "out ((2, 8, 6)) must be contiguous and of shape (2, 8, 6)"),
        ({"out": torch.zeros(2, 8, 6).half()}, "out (torch.float16) must be torch.float32 to be added to"),
    ],
)
def test_a_mistake_names_both_sides(side: Any, changes: dict[str, Any], message: str) -> None:
    arguments = {"d_out": torch.zeros(4, 8), "x": torch.zeros(4, 6), **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        call(side, arguments, (1, 3))


def recorded(arch: str, *, rows: int = 512, experts: int = 8, width: int = 1408) -> Launch:
    def integers(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device="meta")

    schedule = TileSchedule(
        offsets_e1=integers(experts + 1),
        tile_expert=integers(experts + 4),
        tile_row=integers(experts + 4),
        num_tiles=integers(1),
        max_tiles=experts + 4,
        num_rows=rows,
        block_m=128,
    )
    sides = [torch.empty(rows, width, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    with recording(arch) as calls:
        kernels.grouped_wgrad(*sides, schedule)
    return calls[0]


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "sm_90"])
def test_the_grid_is_bounded_by_the_chip_and_by_the_tiles(arch: str) -> None:
    units = {"gfx90a": 110, "gfx942": 304, "sm_90": 132}[arch]
    tiles = {"gfx90a": 11 * 11, "gfx942": 11 * 11, "sm_90": 11 * 22}[arch]
    assert recorded(arch, experts=64).grid == (4 * units,)
    assert recorded(arch, experts=1).grid == (tiles,)
    assert recorded(arch, experts=1, rows=0).cost.flops == 0
