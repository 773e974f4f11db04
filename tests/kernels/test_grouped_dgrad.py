"""Grouped GEMMs of the gradient to inputs: kernels and twins against one row after the other in float64."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from gemm_oracle import PROBLEMS, act, held, linear, matrices, schedule_of, side_by_side
from torch import Tensor

from xmoe.kernels import reference
from xmoe.kernels import triton_kernels as kernels
from xmoe.kernels.tuning import INTERPRETER, config_for, forcing
from xmoe.testing import assert_close

SIDES = [kernels, reference]
ACTIVATIONS = ["swiglu", "gelu", "gelu_tanh", "relu"]
LOW = [*((side, dtype) for side in SIDES for dtype in (torch.bfloat16, torch.float16)), (reference, torch.float64)]


def transposed(parts: list[Tensor]) -> list[Tensor]:
    return [part.t() for part in parts]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize(("counts", "widths"), PROBLEMS)
def test_equals_one_row_after_the_other(side: Any, counts: tuple[int, ...], widths: tuple[int, int], doubled: bool):
    weights, others = (matrices(len(counts), *widths) for _ in range(2))
    d_out, d_other = (torch.randn(sum(counts), widths[0]) for _ in range(2))
    expected = linear(d_out, transposed(weights), counts)
    if doubled:
        expected += linear(d_other, transposed(others), counts)
    second = (d_other, side_by_side(others)) if doubled else None
    found = side.grouped_dgrad(d_out, side_by_side(weights), schedule_of(counts), second=second)
    assert_close(found, expected)


@pytest.mark.parametrize(("side", "dtype"), LOW)
def test_two_products_are_rounded_once(side: Any, dtype: torch.dtype):
    counts = (40, 0, 9)
    weights, others = (matrices(3, 50, 20, dtype=dtype) for _ in range(2))
    d_out = torch.randn(49, 50).to(dtype)
    expected = linear(d_out, transposed(weights), counts) + linear(d_out, transposed(others), counts)
    arguments = d_out, side_by_side(weights), schedule_of(counts)
    found = side.grouped_dgrad(*arguments, second=(d_out, side_by_side(others)))
    assert found.dtype == dtype
    error = (found.double() - expected).abs() / expected.abs().clamp(min=1e-2)
    assert error.max() <= max(torch.finfo(dtype).eps / 2 * 1.05, 1e-12)


def activated(
    side: Any,
    counts: tuple[int, ...],
    sizes: tuple[int, int],
    activation: str,
    *,
    biased: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """hidden, d_up, d_gate and d_weights as found, and by autograd in float64 over one row after the other.

    ``sizes`` are those of the down projection: of the model, of the experts.
    """
    gated, num_rows = activation == "swiglu", sum(counts)
    down = matrices(len(counts), *sizes, dtype=dtype)
    bias = matrices(len(counts), sizes[0], dtype=dtype) if biased else None
    rows = torch.randn(num_rows, sizes[0]).to(dtype)
    up, gate = (torch.randn(num_rows, sizes[1]).to(dtype) for _ in range(2))
    weights = torch.rand(num_rows, dtype=torch.promote_types(dtype, torch.float32))
    dy, row_ids = held(rows)
    found = side.grouped_dgrad_activated(
        dy,
        side_by_side(down),
        schedule_of(counts),
        row_ids_M=row_ids,
        up_MF=up,
        gate_MF=gate if gated else None,
        weights_M=weights,
        activation=activation,
        down_bias=side_by_side(bias) if bias else None,
    )
    up64, gate64, weights64 = (x.double().requires_grad_() for x in (up, gate, weights))
    value = act(up64, gate64 if gated else None, activation)
    hidden = weights64[:, None] * value
    # y is linear in hidden and in weight * bias: dy goes back through both.
    loss = (hidden * linear(rows, transposed(down), counts)).sum()
    if bias is not None:
        dots = linear(rows, [one[None, :] for one in bias], counts)[:, 0]
        loss = loss + (weights64 * dots).sum()
    leaves = (up64, gate64, weights64) if gated else (up64, weights64)
    grads = list(torch.autograd.grad(loss, leaves))
    return list(found), [hidden.detach(), grads[0], grads[1] if gated else None, grads[-1]]


NAMES = ("hidden", "d_up", "d_gate", "d_weights")


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("problem", "biased"), [(0, True), (1, False), (2, True), (3, False), (4, True), (5, True)])
def test_activated_equals_autograd(side: Any, activation: str, problem: int, biased: bool):
    counts, sizes = PROBLEMS[problem]
    found, expected = activated(side, counts, sizes, activation, biased=biased)
    for name, one, other in zip(NAMES, found, expected, strict=True):
        assert_close(one, other, what=name)


@pytest.mark.parametrize(("side", "dtype"), LOW)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_activated_in_other_dtypes(side: Any, dtype: torch.dtype, activation: str):
    found, expected = activated(side, (17, 0, 30), (40, 33), activation, biased=True, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    assert [x.dtype for x in found if x is not None] == [dtype] * (3 if activation == "swiglu" else 2) + [wide]
    for name, one, other in zip(NAMES, found, expected, strict=True):
        assert_close(one, other, what=name)


@pytest.mark.parametrize("advance", [0, 1])
@pytest.mark.parametrize("block_m", [16, 32])
def test_a_configuration_and_the_height_of_tiles_change_nothing(advance: int, block_m: int):
    counts, widths = (33, 0, 5), (37, 40)
    weights, d_out = matrices(3, *widths), torch.randn(38, 37)
    config = config_for("grouped_dgrad", arch=INTERPRETER, dtype=torch.float32)
    more = {"ADVANCE": advance, "GROUP_M": 1 + advance * 3, "NUM_XCD": 1 + advance * 2}
    with forcing({"grouped_dgrad": replace(config, blocks={**config.blocks, **more})}):
        found = kernels.grouped_dgrad(d_out, side_by_side(weights), schedule_of(counts, block_m=block_m))
    assert_close(found, linear(d_out, transposed(weights), counts))


def test_two_runs_agree_bit_by_bit():
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        found, _ = activated(kernels, (40, 17), (20, 50), "swiglu", biased=True, dtype=torch.bfloat16)
        return [one for one in found if one is not None]

    assert all(map(torch.equal, run(), run()))


@pytest.mark.parametrize("side", SIDES)
def test_a_nan_of_one_row_stays_in_its_row(side: Any):
    """Rows of a tile share products only with weights, and a NaN is not taken for a number by an activation."""
    up = torch.tensor([[1.0], [float("nan")], [-1.0]])
    hidden, d_up, _, d_weights = side.grouped_dgrad_activated(
        torch.ones(3, 1),
        side_by_side([torch.ones(1, 1)]),
        schedule_of((3,)),
        row_ids_M=torch.arange(3, dtype=torch.int32),
        up_MF=up,
        gate_MF=None,
        weights_M=torch.ones(3),
        activation="relu",
    )
    assert torch.isnan(hidden).flatten().tolist() == [False, True, False]
    assert torch.isnan(d_weights).tolist() == [False, True, False]
    assert d_up.flatten()[[0, 2]].tolist() == [1, 0]


def dgrad_arguments() -> dict[str, Any]:
    weights = side_by_side(matrices(2, 8, 6))
    return {"d_out": torch.zeros(4, 8), "weight": weights, "schedule": schedule_of((1, 3))}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_out": torch.zeros(4, 6)}, "rows are (4, 6), weights (8, 6): dimension 0"),
        ({"d_out": torch.zeros(5, 8)}, "rows are 5, the schedule's 4"),
        ({"second": (torch.zeros(4, 6), side_by_side(matrices(2, 6, 6)))}, "weights (6, 6), the first"),
        (
            {"second": (torch.zeros(4, 8).half(), side_by_side(matrices(2, 8, 6, dtype=torch.float16)))},
            "the second product is of torch.float16",
        ),
    ],
)
def test_a_mistake_names_both_sides(side: Any, changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        side.grouped_dgrad(**{**dgrad_arguments(), **changes})


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"up_MF": torch.zeros(4, 5)}, "up_MF is (4, 5) of torch.float32, expected (4, 6) of torch.float32"),
        ({"up_MF": torch.zeros(4, 6).half()}, "up_MF is (4, 6) of torch.float16, expected (4, 6) of torch.float32"),
        ({"gate_MF": torch.zeros(4, 6)}, "relu with a gate"),
        ({"activation": "swiglu"}, "swiglu without a gate"),
        ({"weights_M": torch.zeros(4, 1)}, "weights_M is (4, 1), the schedule has 4 rows"),
        ({"down_bias": side_by_side(matrices(2, 6))}, "(2, (6,), torch.float32), expected (2, (8,), torch.float32)"),
    ],
)
def test_a_mistake_in_the_activated_form_names_both_sides(side: Any, changes: dict[str, Any], message: str):
    given = dgrad_arguments()
    arguments = {
        "dy_RD": given["d_out"],
        "down": given["weight"],
        "schedule": given["schedule"],
        "row_ids_M": torch.zeros(4, dtype=torch.int32),
        "up_MF": torch.zeros(4, 6),
        "gate_MF": None,
        "weights_M": torch.zeros(4),
        "activation": "relu",
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        side.grouped_dgrad_activated(**{**arguments, **changes})
