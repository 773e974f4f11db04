"""PyTorch twin of the routed expert MLP: an expert at a time, so that its rows and weights stay in cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .dtypes import accumulator_dtype
from .host_threads import Segment, run_workers, worker_parts
from .reference_activation import Activation, activate, activate_backward


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Weights of the local experts, one list entry for each, as ``nn.Linear`` keeps them: ``[out, in]``.

    ``up``    of ``[F, D]``, ``down`` of ``[D, F]``, ``gate`` of ``[F, D]`` for swiglu and empty otherwise;
    biases ``[F]``, ``[D]``, ``[F]`` in lists of the same length, or empty lists where the experts have none.
    """

    up: Sequence[Tensor]
    down: Sequence[Tensor]
    gate: Sequence[Tensor] = ()
    up_bias: Sequence[Tensor] = ()
    down_bias: Sequence[Tensor] = ()
    gate_bias: Sequence[Tensor] = ()

    FIELDS = ("up", "down", "gate", "up_bias", "down_bias", "gate_bias")


def expert_mlp_forward(
    x_RD: Tensor,
    row_ids_M: Tensor,
    assignments_RK: Tensor,
    weights_M: Tensor,
    counts: Sequence[int],
    counts_e: Tensor,
    *,
    experts: ExpertWeights,
    activation: Activation,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The routed MLP of ragged rows:

        y[r] = sum over m with row_ids[m] == r of down_e(weights[m] * act(up_e(x[r])))      e the expert of m

    ``row_ids_M``       int32; the row of each assignment, assignments sorted by expert; of one expert rows differ
    ``assignments_RK``  int32; the assignments of each row, entries outside ``[0, M)`` being none
    ``weights_M``       float32, in a float64 model float64; the weight of each assignment
    ``counts``          assignments of each expert, on the host; ``counts_e`` (int64) the same on the device

    Returns ``y_RD`` and what backward needs: the pre-activations ``up_MF`` and, for swiglu, ``gate_MF``.

    Rows are gathered inside, and weights are applied before the down projection, so that neither permuted copies
    nor post-activations outlive the expert that uses them. The loop over experts adds to the rows itself: it reads
    neither ``assignments_RK`` nor ``counts_e``.

    Example: one expert with up = down = [[2]] and relu, x = [[3]], row_ids [0], weights [.5]: up 6, y 6.
    """
    num_assignments, width = row_ids_M.numel(), experts.up[0].shape[0]
    up_MF = x_RD.new_empty((num_assignments, width))
    gate_MF = x_RD.new_empty((num_assignments, width)) if activation == "swiglu" else None

    def run(part: list[Segment], y_RD: Tensor, scratch: _Scratch) -> None:
        for expert, rows in part:
            ids, weight_N1 = row_ids_M[rows], weights_M[rows, None]
            x = torch.index_select(x_RD, 0, ids, out=scratch("x", rows))
            up = _linear(x, experts.up, experts.up_bias, expert, out=up_MF[rows])
            gate = None
            if gate_MF is not None:
                gate = _linear(x, experts.gate, experts.gate_bias, expert, out=gate_MF[rows])
            hidden = activate(up, gate, activation, out=scratch("hidden", rows)).mul_(weight_N1).to(x.dtype)
            y = torch.mm(hidden, experts.down[expert].t(), out=scratch("y", rows))
            if experts.down_bias:
                y.add_(experts.down_bias[expert] * weight_N1.to(y.dtype))
            y_RD.index_add_(0, ids, y.to(y_RD.dtype))

    y_RD = _over_experts(run, counts, x_RD, width, products=2 if gate_MF is None else 3)
    return y_RD.to(x_RD.dtype), up_MF, gate_MF


def expert_mlp_backward(
    grad_y_RD: Tensor,
    x_RD: Tensor,
    row_ids_M: Tensor,
    assignments_RK: Tensor,
    weights_M: Tensor,
    counts: Sequence[int],
    counts_e: Tensor,
    *,
    experts: ExpertWeights,
    activation: Activation,
    up_MF: Tensor,
    gate_MF: Tensor | None,
) -> tuple[Tensor, Tensor, ExpertWeights]:
    """Gradients of :func:`expert_mlp_forward`: of ``x_RD``, of ``weights_M`` and of every expert's weights.

    The activation is computed again from the pre-activations. An expert without rows gets exact zeros.
    """
    accumulator = accumulator_dtype(x_RD.dtype)
    grad_weights_M = torch.empty_like(weights_M)
    grads = {field: [torch.empty_like(w) for w in getattr(experts, field)] for field in ExpertWeights.FIELDS}
    for expert, count in enumerate(counts):
        if not count:
            for found in filter(None, grads.values()):
                found[expert].zero_()

    def run(part: list[Segment], grad_x_RD: Tensor, scratch: _Scratch) -> None:
        for expert, rows in part:
            ids, weight_N1 = row_ids_M[rows], weights_M[rows, None]
            x = torch.index_select(x_RD, 0, ids, out=scratch("x", rows))
            dy = torch.index_select(grad_y_RD, 0, ids, out=scratch("y", rows))
            up, gate = up_MF[rows], gate_MF[rows] if gate_MF is not None else None
            d_hidden = torch.mm(dy, experts.down[expert], out=scratch("d_hidden", rows))
            hidden, d_up, d_gate, d_weight = activate_backward(
                d_hidden.to(accumulator), up, gate, weight_N1, activation, scratch=partial(scratch, rows=rows)
            )
            torch.mm(dy.t(), hidden.to(dy.dtype), out=grads["down"][expert])
            if experts.down_bias:
                torch.sum(dy * weight_N1.to(dy.dtype), 0, out=grads["down_bias"][expert])
                d_weight += torch.mv(dy.to(accumulator), experts.down_bias[expert].to(accumulator))
            grad_weights_M[rows] = d_weight
            d_up = _linear_grads(d_up.to(x.dtype), x, expert, grads["up"], grads["up_bias"])
            dx = torch.mm(d_up, experts.up[expert], out=scratch("dx", rows))
            if d_gate is not None:
                d_gate = _linear_grads(d_gate.to(x.dtype), x, expert, grads["gate"], grads["gate_bias"])
                dx.addmm_(d_gate, experts.gate[expert])
            grad_x_RD.index_add_(0, ids, dx.to(grad_x_RD.dtype))

    grad_x_RD = _over_experts(run, counts, x_RD, up_MF.shape[1], products=4 if gate_MF is None else 6)
    return grad_x_RD.to(x_RD.dtype), grad_weights_M, ExpertWeights(**grads)


class _Scratch:
    """Buffers that a worker's experts use one after the other: allocated once, in cache while in use.

    ``x``, ``y`` and ``dx`` are rows of the model's width and dtype, ``d_hidden`` of the experts' width, all others of
    the experts' width in the accumulator's dtype.
    """

    def __init__(self, x_RD: Tensor, width: int, max_rows: int) -> None:
        self._x_RD, self._width, self._max_rows = x_RD, width, max_rows
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, rows: slice) -> Tensor:
        """The first rows of the buffer ``name``, as many as the slice has."""
        buffer = self._buffers.get(name)
        if buffer is None:
            width = self._x_RD.shape[1] if name in ("x", "y", "dx") else self._width
            dtype = self._x_RD.dtype
            dtype = dtype if name in ("x", "y", "dx", "d_hidden") else accumulator_dtype(dtype)
            buffer = self._buffers[name] = self._x_RD.new_empty((self._max_rows, width), dtype=dtype)
        return buffer[: rows.stop - rows.start]


def _over_experts(
    run: Callable[[list[Segment], Tensor, _Scratch], None],
    counts: Sequence[int],
    x_RD: Tensor,
    width: int,
    *,
    products: int,
) -> Tensor:
    """Calls ``run(experts and their rows, sum_RD, scratch)`` on one or more threads; returns the sum of their sums.

    ``products`` is the number of matrix products of each row.
    """
    ends = itertools.accumulate(counts)
    busy = [(i, slice(end - count, end)) for i, (count, end) in enumerate(zip(counts, ends, strict=True)) if count]
    parts = worker_parts(busy, like=x_RD, flops_per_row=2.0 * products * width * x_RD.shape[1])
    sums = [torch.zeros_like(x_RD, dtype=accumulator_dtype(x_RD.dtype)) for _ in parts]
    scratches = [_Scratch(x_RD, width, max(counts, default=0)) for _ in parts]
    run_workers([partial(run, *job) for job in zip(parts, sums, scratches, strict=True)])
    for other in sums[1:]:
        sums[0] += other
    return sums[0]


def _linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], expert: int, *, out: Tensor) -> Tensor:
    if biases:
        return torch.addmm(biases[expert], x, weights[expert].t(), out=out)
    return torch.mm(x, weights[expert].t(), out=out)


def _linear_grads(d_out: Tensor, x: Tensor, expert: int, grads: list[Tensor], bias_grads: list[Tensor]) -> Tensor:
    """Writes one linear layer's weight and bias gradient; returns ``d_out``."""
    torch.mm(d_out.t(), x, out=grads[expert])
    if bias_grads:
        torch.sum(d_out, 0, out=bias_grads[expert])
    return d_out
