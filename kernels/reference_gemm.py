"""PyTorch twins of the grouped GEMMs, an expert at a time, and the checks that twins and launchers share.

Products and sums are in at least float32, and in float64 for float64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from .dtypes import accumulator_dtype
from .ragged import Stacked, TileSchedule
from .reference_activation import Activation, activation_backward, activation_forward


def grouped_forward(
    a: Tensor,
    weight: Stacked,
    schedule: TileSchedule,
    *,
    row_ids_M: Tensor | None = None,
    bias: Stacked | None = None,
    bias_scale_M: Tensor | None = None,
) -> Tensor:
    """``out[m] = a[row_ids[m]] @ W_e.T + bias_scale[m] * bias_e``, ``[M, out]`` in a's dtype; e is the expert of m.

    Without ``row_ids_M`` rows are those of ``a`` in order; without ``bias_scale_M`` (float32) the bias is added as it
    is. Raises ValueError where shapes or dtypes do not fit.

    Example: one expert, W = [[3]], bias (1), a = [[2]], scale 0.5 gives [[6.5]].
    """
    check_forward(a, weight, schedule, row_ids_M=row_ids_M, bias=bias, bias_scale_M=bias_scale_M)
    out = a.new_empty((schedule.num_rows, weight.first.shape[0]))
    for expert, rows in _segments(schedule):
        product = _product(_take(a, row_ids_M, rows), matrix_of(weight, expert).t())
        if bias is not None:
            added = matrix_of(bias, expert).to(product.dtype)
            product += added if bias_scale_M is None else added * bias_scale_M[rows, None]
        out[rows] = product.to(a.dtype)
    return out


def grouped_forward_activated(
    x_RD: Tensor,
    up: Stacked,
    gate: Stacked | None,
    schedule: TileSchedule,
    *,
    row_ids_M: Tensor,
    weights_M: Tensor,
    activation: Activation,
    up_bias: Stacked | None = None,
    gate_bias: Stacked | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The first half of the experts' MLP: ``hidden[m] = weights[m] * act(x[row_ids[m]] @ W_up.T + bias_up)``.

    For swiglu, which takes ``gate``, the activation is ``silu(x @ W_gate.T + bias_gate) * (x @ W_up.T + bias_up)``.

    Returns hidden, and the pre-activations up and gate (None without) that backward needs, ``[M, F]`` in x's dtype.
    The activation is of the pre-activations as they are returned. Raises ValueError where shapes or dtypes do not fit.

    Example: relu, W_up = [[2]], x = [[3]], weight 0.5 gives hidden 3, up 6.
    """
    check_activated(x_RD, up, gate, schedule, row_ids_M, weights_M, activation, up_bias=up_bias, gate_bias=gate_bias)
    up_MF = grouped_forward(x_RD, up, schedule, row_ids_M=row_ids_M, bias=up_bias)
    gate_MF = None
    if gate is not None:
        gate_MF = grouped_forward(x_RD, gate, schedule, row_ids_M=row_ids_M, bias=gate_bias)
    return activation_forward(up_MF, gate_MF, weights_M, activation), up_MF, gate_MF


def grouped_dgrad(
    d_out: Tensor, weight: Stacked, schedule: TileSchedule, *, second: tuple[Tensor, Stacked] | None = None
) -> Tensor:
    """``out[m] = d_out[m] @ W_e (+ second_d_out[m] @ second_W_e)``, ``[M, in]`` in d_out's dtype, rounded once.

    Raises ValueError where shapes or dtypes do not fit.

    Example: one expert, W = [[3, 4]], d_out [[2]]; second [[1]] with [[10, 20]] gives [[16, 28]].
    """
    check_dgrad(d_out, weight, schedule, second=second)
    out = d_out.new_empty((schedule.num_rows, weight.first.shape[1]))
    for expert, rows in _segments(schedule):
        product = _product(d_out[rows], matrix_of(weight, expert))
        if second is not None:
            product += _product(second[0][rows], matrix_of(second[1], expert))
        out[rows] = product.to(d_out.dtype)
    return out


def grouped_dgrad_activated(
    dy_RD: Tensor,
    down: Stacked,
    schedule: TileSchedule,
    *,
    row_ids_M: Tensor,
    up_MF: Tensor,
    gate_MF: Tensor | None,
    weights_M: Tensor,
    activation: Activation,
    down_bias: Stacked | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """From the gradient of the experts' output through the down projection and the activation, computed again.

    With ``d_hidden[m] = dy[row_ids[m]] @ W_down``, which is not kept, and act of the pre-activations up and gate:

        hidden     = weights * act                      what the down projection's weight gradient takes
        d_up       = weights * d_hidden * d act / d up
        d_gate     = weights * d_hidden * d act / d gate, None without gate
        d_weights  = sum over f of d_hidden * act (+ dy[row_ids] . bias_down), at least float32, in a fixed order

    Raises ValueError where shapes or dtypes do not fit.

    Example: relu, dy = [[3]], W_down = [[2]], up 4, weight 0.5: hidden 2, d_up 3, d_weights 24.
    """
    check_dgrad_activated(dy_RD, down, schedule, row_ids_M, up_MF, gate_MF, weights_M, activation, down_bias=down_bias)
    d_hidden_MF = torch.empty_like(up_MF, dtype=accumulator_dtype(up_MF.dtype))
    bias_dot_M = torch.zeros_like(d_hidden_MF[:, 0])
    for expert, rows in _segments(schedule):
        dy = _take(dy_RD, row_ids_M, rows)
        d_hidden_MF[rows] = _product(dy, matrix_of(down, expert))
        if down_bias is not None:
            bias_dot_M[rows] = _product(dy, matrix_of(down_bias, expert))
    hidden, d_up, d_gate, d_weights_M = activation_backward(d_hidden_MF, up_MF, gate_MF, weights_M, activation)
    return hidden, d_up, d_gate, d_weights_M + bias_dot_M


def matrix_of(stacked: Stacked, expert: int) -> Tensor:
    """The expert's matrix or bias, in place. On a device other than the CPU all must lie in one allocation."""
    first, offset = stacked.first, expert * stacked.stride
    start = first.storage_offset() + offset
    if start >= 0 and (start + first.numel()) * first.element_size() <= first.untyped_storage().nbytes():
        return first.as_strided(first.shape, first.stride(), start)
    if first.device.type != "cpu":
        raise ValueError(f"expert {expert}'s weights lie outside the first expert's allocation on {first.device}")
    size = first.element_size()
    memory = (ctypes.c_char * (first.numel() * size)).from_address(first.data_ptr() + offset * size)
    return torch.frombuffer(memory, dtype=first.dtype).view(first.shape)


def _segments(schedule: TileSchedule) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, and their rows."""
    ends = schedule.offsets_e1.tolist()
    for expert in range(schedule.num_experts):
        if ends[expert] < ends[expert + 1]:
            yield expert, slice(ends[expert], ends[expert + 1])


def _take(a: Tensor, row_ids_M: Tensor | None, rows: slice) -> Tensor:
    return a[rows] if row_ids_M is None else a.index_select(0, row_ids_M[rows])


def _product(a: Tensor, b: Tensor) -> Tensor:
    dtype = accumulator_dtype(a.dtype)
    return a.to(dtype) @ b.to(dtype)


def check_forward(
    a: Tensor,
    weight: Stacked,
    schedule: TileSchedule,
    *,
    row_ids_M: Tensor | None,
    bias: Stacked | None,
    bias_scale_M: Tensor | None,
) -> None:
    """Raises ValueError where the arguments of :func:`grouped_forward` do not fit."""
    _check_rows(a, weight, schedule, row_ids_M, dim=1)
    _check_bias(bias, weight, width=weight.first.shape[0])
    if bias_scale_M is not None:
        _check_per_row("bias_scale_M", bias_scale_M, schedule)


def check_activated(
    x_RD: Tensor,
    up: Stacked,
    gate: Stacked | None,
    schedule: TileSchedule,
    row_ids_M: Tensor,
    weights_M: Tensor,
    activation: Activation,
    *,
    up_bias: Stacked | None,
    gate_bias: Stacked | None,
) -> None:
    """Raises ValueError where the arguments of :func:`grouped_forward_activated` do not fit."""
    _check_activation(activation, has_gate=gate is not None)
    _check_per_row("weights_M", weights_M, schedule)
    for weight, bias in ((up, up_bias), (gate, gate_bias)):
        if weight is not None:
            if weight.first.shape != up.first.shape:
                raise ValueError(f"gate is {tuple(weight.first.shape)}, up {tuple(up.first.shape)}")
            check_forward(x_RD, weight, schedule, row_ids_M=row_ids_M, bias=bias, bias_scale_M=None)


def check_dgrad(
    d_out: Tensor, weight: Stacked, schedule: TileSchedule, *, second: tuple[Tensor, Stacked] | None
) -> None:
    """Raises ValueError where the arguments of :func:`grouped_dgrad` do not fit."""
    _check_rows(d_out, weight, schedule, None, dim=0)
    if second is not None:
        _check_rows(*second, schedule, None, dim=0)
        if second[1].first.shape != weight.first.shape or second[0].dtype != d_out.dtype:
            raise ValueError(
                f"the second product is of {second[0].dtype} and weights {tuple(second[1].first.shape)}, "
                f"the first of {d_out.dtype} and {tuple(weight.first.shape)}"
            )


def check_dgrad_activated(
    dy_RD: Tensor,
    down: Stacked,
    schedule: TileSchedule,
    row_ids_M: Tensor,
    up_MF: Tensor,
    gate_MF: Tensor | None,
    weights_M: Tensor,
    activation: Activation,
    *,
    down_bias: Stacked | None,
) -> None:
    """Raises ValueError where the arguments of :func:`grouped_dgrad_activated` do not fit."""
    _check_activation(activation, has_gate=gate_MF is not None)
    _check_rows(dy_RD, down, schedule, row_ids_M, dim=0)
    _check_bias(down_bias, down, width=down.first.shape[0])
    _check_per_row("weights_M", weights_M, schedule)
    expected = (schedule.num_rows, down.first.shape[1])
    for name, values in (("up_MF", up_MF), ("gate_MF", gate_MF)):
        if values is not None and (values.shape != expected or values.dtype != dy_RD.dtype):
            raise ValueError(f"{name} is {tuple(values.shape)} of {values.dtype}, expected {expected} of {dy_RD.dtype}")


def _check_activation(activation: Activation, *, has_gate: bool) -> None:
    if activation not in ("swiglu", "gelu", "gelu_tanh", "relu"):
        raise ValueError(f"activation ({activation}) must be swiglu, gelu, gelu_tanh or relu")
    if has_gate != (activation == "swiglu"):
        raise ValueError(f"{activation} with{'' if has_gate else 'out'} a gate: swiglu takes one, others do not")


def _check_rows(rows: Tensor, weight: Stacked, schedule: TileSchedule, row_ids_M: Tensor | None, *, dim: int) -> None:
    """``dim`` is the weights' dimension that rows are multiplied along."""
    shape = tuple(weight.first.shape)
    if rows.dim() != 2 or len(shape) != 2 or rows.shape[1] != shape[dim]:
        raise ValueError(f"rows are {tuple(rows.shape)}, weights {shape}: dimension {dim} must be the rows' width")
    if rows.dtype != weight.first.dtype:
        raise ValueError(f"rows are {rows.dtype}, weights {weight.first.dtype}")
    if weight.num_experts != schedule.num_experts:
        raise ValueError(f"weights are of {weight.num_experts} experts, the schedule of {schedule.num_experts}")
    found = rows.shape[0] if row_ids_M is None else row_ids_M.numel()
    if found != schedule.num_rows:
        raise ValueError(
            f"{'rows' if row_ids_M is None else 'row ids'} are {found}, the schedule's {schedule.num_rows}"
        )


def _check_bias(bias: Stacked | None, weight: Stacked, *, width: int) -> None:
    if bias is None:
        return
    found = (bias.num_experts, tuple(bias.first.shape), bias.first.dtype)
    expected = (weight.num_experts, (width,), weight.first.dtype)
    if found != expected:
        raise ValueError(f"biases (experts, shape, dtype) are {found}, expected {expected}")


def _check_per_row(name: str, values: Tensor, schedule: TileSchedule) -> None:
    if values.shape != (schedule.num_rows,):
        raise ValueError(f"{name} is {tuple(values.shape)}, the schedule has {schedule.num_rows} rows")
