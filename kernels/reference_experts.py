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


@dataclass(frozen=True, kw_only=True)
class WantedGradients:
    """What :func:`expert_mlp_backward` computes, beside the gradient of the assignments' weights.

    ``rows``   the gradient of ``x_RD``; without it ``experts.up`` and ``experts.gate`` are not read
    ``kinds``  fields of :class:`ExpertWeights`, each for all experts; without "up" and "gate" ``x_RD`` is not read
    """

    rows: bool
    kinds: frozenset[str]

    LINEAR = frozenset(("up", "gate"))  # of x

    @classmethod
    def all_of(cls, experts: ExpertWeights) -> WantedGradients:
        return cls(rows=True, kinds=frozenset(field for field in experts.FIELDS if getattr(experts, field)))

    @property
    def reads_rows(self) -> bool:
        return bool(self.kinds & self.LINEAR)


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

    y_RD = _over_experts(run, counts, x_RD, width, products=2 if gate_MF is None else 3, sums_rows=True)
    return y_RD.to(x_RD.dtype), up_MF, gate_MF


def expert_mlp_backward(
    grad_y_RD: Tensor,
    x_RD: Tensor | None,
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
    wanted: WantedGradients | None = None,
) -> tuple[Tensor | None, Tensor, ExpertWeights]:
    """Gradients of :func:`expert_mlp_forward`: of ``x_RD``, of ``weights_M`` and of every expert's weights.

    Of those only what is ``wanted``, by default all: None for x, and empty lists for the experts, where it is not.
    The activation is computed again from the pre-activations. An expert without rows gets exact zeros.
    """
    wanted = wanted if wanted is not None else WantedGradients.all_of(experts)
    accumulator = accumulator_dtype(grad_y_RD.dtype)
    grad_weights_M = torch.empty_like(weights_M)
    grads = _empty_gradients(wanted, counts, grad_y_RD, width=up_MF.shape[1])

    def run(part: list[Segment], grad_x_RD: Tensor, scratch: _Scratch) -> None:
        for expert, rows in part:
            ids, weight_N1 = row_ids_M[rows], weights_M[rows, None]
            dy = torch.index_select(grad_y_RD, 0, ids, out=scratch("y", rows))
            up, gate = up_MF[rows], gate_MF[rows] if gate_MF is not None else None
            d_hidden = torch.mm(dy, experts.down[expert], out=scratch("d_hidden", rows))
            hidden, d_up, d_gate, d_weight = activate_backward(
                d_hidden.to(accumulator), up, gate, weight_N1, activation, scratch=partial(scratch, rows=rows)
            )
            if "down" in grads:
                torch.mm(dy.t(), hidden.to(dy.dtype), out=grads["down"][expert])
            if "down_bias" in grads:
                torch.sum(dy * weight_N1.to(dy.dtype), 0, out=grads["down_bias"][expert])
            if experts.down_bias:
                d_weight += torch.mv(dy.to(accumulator), experts.down_bias[expert].to(accumulator))
            grad_weights_M[rows] = d_weight
            d_up, d_gate = d_up.to(dy.dtype), d_gate.to(dy.dtype) if d_gate is not None else None
            x = torch.index_select(x_RD, 0, ids, out=scratch("x", rows)) if wanted.reads_rows else None
            _linear_grads(d_up, x, expert, grads.get("up"), grads.get("up_bias"))
            _linear_grads(d_gate, x, expert, grads.get("gate"), grads.get("gate_bias"))
            if wanted.rows:
                dx = torch.mm(d_up, experts.up[expert], out=scratch("dx", rows))
                if d_gate is not None:
                    dx.addmm_(d_gate, experts.gate[expert])
                grad_x_RD.index_add_(0, ids, dx.to(grad_x_RD.dtype))

    num_linear = 1 if gate_MF is None else 2
    products = 1 + len(wanted.kinds & {"up", "gate", "down"}) + (num_linear if wanted.rows else 0)
    grad_x_RD = _over_experts(run, counts, grad_y_RD, up_MF.shape[1], products=products, sums_rows=wanted.rows)
    per_expert = ExpertWeights(**{field: grads.get(field, []) for field in ExpertWeights.FIELDS})
    return grad_x_RD.to(grad_y_RD.dtype) if wanted.rows else None, grad_weights_M, per_expert


def _empty_gradients(
    wanted: WantedGradients, counts: Sequence[int], grad_y_RD: Tensor, *, width: int
) -> dict[str, list[Tensor]]:
    """For each kind that is wanted one tensor an expert, zeros where the expert has no rows."""
    hidden = grad_y_RD.shape[1]
    shapes = {"up": (width, hidden), "gate": (width, hidden), "down": (hidden, width)}
    shapes |= {"up_bias": (width,), "gate_bias": (width,), "down_bias": (hidden,)}
    grads = {kind: [grad_y_RD.new_empty(shapes[kind]) for _ in counts] for kind in sorted(wanted.kinds)}
    for found in grads.values():
        for gradient, count in zip(found, counts, strict=True):
            if not count:
                gradient.zero_()
    return grads


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
    sums_rows: bool,
) -> Tensor:
    """Calls ``run(experts and their rows, sum_RD, scratch)`` on one or more threads; returns the sum of their sums.

    ``products`` is the number of matrix products of each row. Without ``sums_rows`` there is no sum, of no rows.
    """
    ends = itertools.accumulate(counts)
    busy = [(i, slice(end - count, end)) for i, (count, end) in enumerate(zip(counts, ends, strict=True)) if count]
    parts = worker_parts(busy, like=x_RD, flops_per_row=2.0 * products * width * x_RD.shape[1])
    summed = x_RD if sums_rows else x_RD[:0]
    sums = [torch.zeros_like(summed, dtype=accumulator_dtype(x_RD.dtype)) for _ in parts]
    scratches = [_Scratch(x_RD, width, max(counts, default=0)) for _ in parts]
    run_workers([partial(run, *job) for job in zip(parts, sums, scratches, strict=True)])
    for other in sums[1:]:
        sums[0] += other
    return sums[0]


def _linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], expert: int, *, out: Tensor) -> Tensor:
    if biases:
        return torch.addmm(biases[expert], x, weights[expert].t(), out=out)
    return torch.mm(x, weights[expert].t(), out=out)


def _linear_grads(
    d_out: Tensor | None, x: Tensor | None, expert: int, grads: list[Tensor] | None, bias_grads: list[Tensor] | None
) -> None:
    """Writes one linear layer's weight and bias gradient, each where there is a place for it."""
    if grads is not None:
        torch.mm(d_out.t(), x, out=grads[expert])
    if bias_grads is not None:
        torch.sum(d_out, 0, out=bias_grads[expert])
