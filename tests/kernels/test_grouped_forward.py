"""Grouped GEMMs of the forward: kernels and twins against one row after the other in float64; the order of tiles."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from gemm_oracle import PROBLEMS, act, held, linear, matrices, schedule_of, side_by_side
from torch import Tensor

from xmoe.kernels import reference
from xmoe.kernels import triton_kernels as kernels
from xmoe.kernels.launch import recording
from xmoe.kernels.ragged import Stacked, stack
from xmoe.kernels.reference_gemm import matrix_of
from xmoe.kernels.tiles import tile_at
from xmoe.kernels.tuning import INTERPRETER, config_for, forcing
from xmoe.testing import assert_close

SIDES = [kernels, reference]
ACTIVATIONS = ["swiglu", "gelu", "gelu_tanh", "relu"]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("gathered", "biased", "scaled"), [(False, False, False), (True, True, False), (0, 1, 1)])
@pytest.mark.parametrize(("counts", "widths"), PROBLEMS)
def test_equals_one_row_after_the_other(
    side: Any, counts: tuple[int, ...], widths: tuple[int, int], gathered: bool, biased: bool, scaled: bool
):
    weights = matrices(len(counts), *widths)
    rows = torch.randn(sum(counts), widths[1])
    expected = linear(rows, weights, counts)
    more: dict[str, Any] = {}
    if biased:
        biases = matrices(len(counts), widths[0])
        scale = torch.rand(sum(counts)) if scaled else torch.ones(sum(counts))
        expected += scale[:, None].double() * (linear(rows, weights, counts, biases) - expected)
        more = {"bias": side_by_side(biases), "bias_scale_M": scale if scaled else None}
    if gathered:
        rows, more["row_ids_M"] = held(rows)
    found = side.grouped_forward(rows, side_by_side(weights), schedule_of(counts), **more)
    assert_close(found, expected)


def fused(side: Any, counts: tuple[int, ...], sizes: tuple[int, int], activation: str, *, biased: bool, dtype: Any):
    """What the launcher found, and up, gate and the activation's inputs as they should be."""
    gated = activation == "swiglu"
    up, gate = (matrices(len(counts), *sizes, dtype=dtype) for _ in range(2))
    up_bias, gate_bias = (matrices(len(counts), sizes[0], dtype=dtype) if biased else None for _ in range(2))
    rows = torch.randn(sum(counts), sizes[1]).to(dtype)
    weights_M = torch.rand(sum(counts), dtype=torch.promote_types(dtype, torch.float32))
    x, row_ids = held(rows)
    found = side.grouped_forward_activated(
        x,
        side_by_side(up),
        side_by_side(gate) if gated else None,
        schedule_of(counts),
        row_ids_M=row_ids,
        weights_M=weights_M,
        activation=activation,
        up_bias=side_by_side(up_bias) if up_bias else None,
        gate_bias=side_by_side(gate_bias) if gate_bias and gated else None,
    )
    up_MF = linear(rows, up, counts, up_bias)
    return found, up_MF, linear(rows, gate, counts, gate_bias) if gated else None, weights_M


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("problem", "biased"), [(0, True), (2, False), (1, False), (4, True), (5, True)])
def test_activated_equals_one_row_after_the_other(side: Any, activation: str, problem: int, biased: bool):
    counts, sizes = PROBLEMS[problem]
    found, up, gate, weights = fused(side, counts, sizes, activation, biased=biased, dtype=torch.float32)
    hidden_MF, up_MF, gate_MF = found
    assert_close(up_MF, up, what="up")
    assert_close(gate_MF, gate, what="gate")
    assert_close(hidden_MF, weights[:, None].double() * act(up, gate, activation), what="hidden")


@pytest.mark.parametrize(
    ("side", "dtype"),
    [*((side, dtype) for side in SIDES for dtype in (torch.bfloat16, torch.float16)), (reference, torch.float64)],
)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_activated_in_other_dtypes_takes_the_activation_of_what_it_stored(
    side: Any, activation: str, dtype: torch.dtype
):
    found, up, gate, weights = fused(side, (17, 0, 30), (33, 40), activation, biased=True, dtype=dtype)
    hidden_MF, up_MF, gate_MF = found
    assert {x.dtype for x in found if x is not None} == {dtype}
    assert_close(up_MF, up, what="up")
    assert_close(gate_MF, gate, what="gate")
    stored = act(up_MF.double(), gate_MF.double() if gate_MF is not None else None, activation)
    exact = weights[:, None].double() * stored
    error = (hidden_MF.double() - exact).abs() / exact.abs().clamp(min=1e-3)
    assert error.max() <= {torch.float64: 1e-12}.get(dtype, torch.finfo(dtype).eps / 2 * 1.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_rows_are_summed_in_float32_and_rounded_once(dtype: torch.dtype):
    counts = (40, 0, 9)
    weights, biases = matrices(3, 20, 100, dtype=dtype), matrices(3, 20, dtype=dtype)
    rows, scale = torch.randn(49, 100).to(dtype), torch.rand(49)
    arguments = side_by_side(weights), schedule_of(counts)
    expected = linear(rows, weights, counts, [bias * 0 for bias in biases])
    expected += scale[:, None].double() * torch.stack([biases[e].double() for e in [0] * 40 + [2] * 9])
    found = kernels.grouped_forward(rows, *arguments, bias=side_by_side(biases), bias_scale_M=scale)
    twin = reference.grouped_forward(rows, *arguments, bias=side_by_side(biases), bias_scale_M=scale)
    for one in (found, twin):
        assert one.dtype == dtype
        error = (one.double() - expected).abs() / expected.abs().clamp(min=1e-2)
        assert error.max() <= torch.finfo(dtype).eps / 2 * 1.05


@pytest.mark.parametrize("advance", [0, 1])
@pytest.mark.parametrize("block_m", [16, 32])
def test_a_configuration_and_the_height_of_tiles_change_nothing(advance: int, block_m: int):
    """Heights are the schedule's; pointers advance or not; one group and one die, or several."""
    counts, sizes = (33, 0, 5), (40, 37)
    weights, rows = matrices(3, *sizes), torch.randn(38, 37)
    config = config_for("grouped_forward", arch=INTERPRETER, dtype=torch.float32)
    more = {"ADVANCE": advance, "GROUP_M": 1 + advance * 3, "NUM_XCD": 1 + advance * 2}
    with forcing({"grouped_forward": replace(config, blocks={**config.blocks, **more})}):
        found = kernels.grouped_forward(rows, side_by_side(weights), schedule_of(counts, block_m=block_m))
    assert_close(found, linear(rows, weights, counts))


def test_two_runs_agree_bit_by_bit():
    def run() -> Tensor:
        torch.manual_seed(0)
        return fused(kernels, (40, 17), (20, 20), "swiglu", biased=True, dtype=torch.bfloat16)[0][0]

    assert torch.equal(run(), run())


@pytest.mark.parametrize("side", SIDES)
def test_matrices_may_lie_apart(side: Any):
    """In allocations of their own, two matrices are always equally spaced, in one direction or the other."""
    counts = (9, 8)
    weights, rows = matrices(2, 20, 30), torch.randn(17, 30)
    for pair in (weights, weights[::-1]):
        assert stack(pair).first.data_ptr() == pair[0].data_ptr()
        assert_close(side.grouped_forward(rows, stack(pair), schedule_of(counts)), linear(rows, pair, counts))


def test_a_matrix_out_of_reach_is_refused_where_memory_cannot_be_read():
    apart = Stacked(first=torch.empty(2, 3, device="meta"), stride=100, num_experts=2)
    assert matrix_of(apart, 0).shape == (2, 3)
    with pytest.raises(ValueError, match="expert 1's weights lie outside the first expert's allocation on meta"):
        matrix_of(apart, 1)


@triton.jit
def _list_tiles_kernel(out, row_tiles, column_tiles, GROUP_M: tl.constexpr, NUM_XCD: tl.constexpr):
    index = tl.program_id(0)
    row, column = tile_at(index, row_tiles, column_tiles, GROUP_M, NUM_XCD)
    tl.store(out + index, row * column_tiles + column)


def tiles(row_tiles: int, column_tiles: int, group: int, dies: int) -> list[tuple[int, int]]:
    out = torch.empty(row_tiles * column_tiles, dtype=torch.int32)
    _list_tiles_kernel[(len(out),)](out, row_tiles, column_tiles, GROUP_M=group, NUM_XCD=dies)
    return [divmod(place, column_tiles) for place in out.tolist()]


@pytest.mark.parametrize(("group", "dies"), [(1, 1), (2, 8), (8, 3), (4, 4)])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (13, 5), (8, 7), (1, 20)])
def test_every_tile_is_taken_once_and_a_die_takes_neighbours(sizes: tuple[int, int], group: int, dies: int):
    found = tiles(*sizes, group, dies)
    assert sorted(found) == [(row, column) for row in range(sizes[0]) for column in range(sizes[1])]
    assert [tile for die in range(dies) for tile in found[die::dies]] == tiles(*sizes, group, 1)


def test_rows_of_a_group_share_a_column_before_the_next():
    order = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert tiles(3, 2, 2, 1) == order
    assert tiles(3, 2, 2, 2)[::2] == order[:3]


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_cost_and_grid_follow_the_bound_on_tiles(arch: str):
    """Of a problem larger than the chip the grid is what fills it; of a small one, a program a tile."""

    def record(counts: tuple[int, ...]) -> Any:
        schedule = schedule_of(counts, block_m=128)
        weight = Stacked(first=torch.empty(512, 256, device="meta").bfloat16(), stride=512 * 256, num_experts=2)
        with recording(arch) as calls:
            kernels.grouped_forward(torch.empty(sum(counts), 256, device="meta").bfloat16(), weight, schedule)
        return calls[0]

    small, large = record((100, 200)), record((40000, 40000))
    assert small.grid == (4 * 4,)  # three row tiles, of which the host knows that they are at most four
    assert large.grid == ({"gfx90a": 2 * 110, "gfx942": 2 * 304}[arch],)
    assert small.cost.flops == 2 * 300 * 512 * 256
    assert small.cost.bytes_read == 4 * 4 * ((128 + 128) * 256 * 2 + 12) + 4 * 16
    assert record((0, 0)).grid == (0,)
    assert record((0, 0)).cost.bytes_read == 0


def forward_arguments() -> dict[str, Any]:
    weights = side_by_side(matrices(2, 8, 6))
    return {"a": torch.zeros(4, 6), "weight": weights, "schedule": schedule_of((1, 3))}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": torch.zeros(4, 7)}, "rows are (4, 7), weights (8, 6)"),
        ({"a": torch.zeros(4, 6).half()}, "rows are torch.float16, weights torch.float32"),
        ({"a": torch.zeros(5, 6)}, "rows are 5, the schedule's 4"),
        ({"row_ids_M": torch.zeros(3, dtype=torch.int32)}, "row ids are 3, the schedule's 4"),
        ({"schedule": schedule_of((1, 1, 2))}, "weights are of 2 experts, the schedule of 3"),
        ({"bias": side_by_side(matrices(2, 6))}, "(2, (6,), torch.float32), expected (2, (8,), torch.float32)"),
        ({"bias": side_by_side(matrices(2, 8)), "bias_scale_M": torch.zeros(3)}, "bias_scale_M is (3,), the schedule"),
    ],
)
def test_a_mistake_names_both_sides(side: Any, changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        side.grouped_forward(**{**forward_arguments(), **changes})


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "silu"}, "activation (silu) must be swiglu, gelu, gelu_tanh or relu"),
        ({"activation": "swiglu"}, "swiglu without a gate"),
        ({"gate": side_by_side(matrices(2, 8, 6))}, "relu with a gate"),
        ({"gate": side_by_side(matrices(2, 9, 6)), "activation": "swiglu"}, "gate is (9, 6), up (8, 6)"),
        ({"weights_M": torch.zeros(3)}, "weights_M is (3,), the schedule has 4 rows"),
    ],
)
def test_a_mistake_in_the_activated_form_names_both_sides(side: Any, changes: dict[str, Any], message: str):
    given = forward_arguments()
    more = {"row_ids_M": torch.zeros(4, dtype=torch.int32), "weights_M": torch.zeros(4), "activation": "relu"}
    arguments = {"x_RD": given["a"], "up": given["weight"], "gate": None, "schedule": given["schedule"], **more}
    with pytest.raises(ValueError, match=re.escape(message)):
        side.grouped_forward_activated(**{**arguments, **changes})
