"""The routed expert MLP as one autograd operator that gathers its own rows.

Kept for backward: the rows it was given, the pre-activations, and for each assignment one weight, one row id and its
inverse (X-MoE, arXiv 2508.13337, section 4.1, with weights applied before the down projection so that expert outputs
need not be kept for the routing weights' gradient). Rows are kept for the gradients of up and gate only, the weights of
up and gate for that of the rows only: frozen experts keep no rows, and experts of frozen rows no cast weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.reference import Activation, ExpertWeights, WantedGradients, accumulator_dtype
from ._backend import kernels_for
from .clock import timed_backward


class GradientSums:
    """Gradients of the experts' weights, added up over the calls of one forward in at least float32.

    Autograd would add them in the weights' own dtype, rounding once for each call. The call whose backward comes last
    gives autograd the sums, the others nothing; then all begins anew.
    """

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls
        self._num_added = 0
        self._sums: list[Tensor | None] = []

    def add(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """What the call whose gradients these are gives autograd."""
        if self.num_calls == 1:
            return gradients
        if self._num_added == 0:
            self._sums = [None if g is None else g.to(accumulator_dtype(g.dtype)) for g in gradients]
        else:
            for total, gradient in zip(self._sums, gradients, strict=True):
                if total is not None and gradient is not None:
                    total += gradient
        self._num_added += 1
        if self._num_added < self.num_calls:
            return [None] * len(gradients)
        sums, self._sums, self._num_added = self._sums, [], 0
        return [
            None if gradient is None or total is None else total.to(gradient.dtype)
            for total, gradient in zip(sums, gradients, strict=True)
        ]


_NUM_OTHERS = 8  # inputs of the operator before the experts' weights


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        row_ids_M: Tensor,
        assignments_RK: Tensor,
        weights_M: Tensor,
        counts: Sequence[int],
        counts_e: Tensor,
        activation: Activation,
        sums: GradientSums,
        *flat: Tensor,
    ) -> Tensor:
        ctx.kernels, ctx.timed, ctx.sums = kernels_for(x_RD), timed_backward(), sums
        with torch.autocast(x_RD.device.type, enabled=False):
            y_RD, up_MF, gate_MF = ctx.kernels.expert_mlp_forward(
                x_RD,
                row_ids_M,
                assignments_RK,
                weights_M,
                counts,
                counts_e,
                experts=_unflatten(flat, len(counts)),
                activation=activation,
            )
        ctx.counts, ctx.activation, ctx.wanted = counts, activation, _wanted(ctx, len(counts))
        x_kept = x_RD if ctx.wanted.reads_rows else None
        kept = _kept(flat, len(counts), ctx.wanted)
        ctx.save_for_backward(x_kept, row_ids_M, assignments_RK, weights_M, counts_e, up_MF, gate_MF, *kept)
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, row_ids_M, assignments_RK, weights_M, counts_e, up_MF, gate_MF, *flat = ctx.saved_tensors
        with ctx.timed(grad_y_RD.device), torch.autocast(grad_y_RD.device.type, enabled=False):
            grad_x_RD, grad_weights_M, grads = ctx.kernels.expert_mlp_backward(
                grad_y_RD,
                x_RD,
                row_ids_M,
                assignments_RK,
                weights_M,
                ctx.counts,
                counts_e,
                experts=_unflatten(flat, len(ctx.counts)),
                activation=ctx.activation,
                up_MF=up_MF,
                gate_MF=gate_MF,
                wanted=ctx.wanted,
            )
            needed = ctx.needs_input_grad[_NUM_OTHERS:]  # of a kind that is wanted, some experts may be frozen
            flat_grads = _flatten(grads, len(ctx.counts))
            flat_grads = ctx.sums.add([g if n else None for g, n in zip(flat_grads, needed, strict=True)])
        return grad_x_RD, None, None, grad_weights_M, None, None, None, None, *flat_grads


def _wanted(ctx: Any, num_experts: int) -> WantedGradients:
    needed = ctx.needs_input_grad[_NUM_OTHERS:]
    kinds = [
        field
        for index, field in enumerate(ExpertWeights.FIELDS)
        if any(needed[index * num_experts : (index + 1) * num_experts])
    ]
    return WantedGradients(rows=ctx.needs_input_grad[0], kinds=frozenset(kinds))


def _kept(flat: Sequence[Tensor | None], num_experts: int, wanted: WantedGradients) -> list[Tensor | None]:
    """The weights that backward reads, None in the place of the others."""
    experts = _unflatten(flat, num_experts)
    read = ExpertWeights(
        up=experts.up if wanted.rows else [],
        gate=experts.gate if wanted.rows else [],
        down=experts.down,
        down_bias=experts.down_bias,
    )
    return _flatten(read, num_experts)


def _flatten(experts: ExpertWeights, num_experts: int) -> list[Tensor | None]:
    """The weights in one list of a fixed length, None where the experts have none."""
    flat: list[Tensor | None] = []
    for field in ExpertWeights.FIELDS:
        flat += getattr(experts, field) or [None] * num_experts
    return flat


def _unflatten(flat: Sequence[Tensor | None], num_experts: int) -> ExpertWeights:
    parts = [list(flat[i * num_experts : (i + 1) * num_experts]) for i in range(len(ExpertWeights.FIELDS))]
    named = zip(ExpertWeights.FIELDS, parts, strict=True)
    return ExpertWeights(**{field: part if part[0] is not None else [] for field, part in named})


def expert_mlp(
    x_RD: Tensor,
    row_ids_M: Tensor,
    assignments_RK: Tensor,
    weights_M: Tensor,
    counts: Sequence[int],
    counts_e: Tensor,
    *,
    experts: ExpertWeights,
    activation: Activation,
    sums: GradientSums | None = None,
) -> Tensor:
    """``y[r] = sum over m with row_ids[m] == r of down_e(weights[m] * act(up_e(x[r])))``, ``[R, D]`` in x's dtype.

    ``counts`` is on the host, ``counts_e`` the same on the device; ``assignments_RK`` lists the assignments of each
    row (see ``ExpertPlan``). Calls of one forward, with the same weights, share ``sums``.

    Differentiable in x, in the weights of the assignments and in every expert's weights; a gradient that nothing needs
    is not computed, of x or of one kind of weights (up, gate, down, each one's bias) that is frozen in all experts.
    Under autocast everything runs in the inputs' own dtypes.
    """
    flat = _flatten(experts, len(counts))
    sums = sums if sums is not None else GradientSums(1)
    return _ExpertMLP.apply(x_RD, row_ids_M, assignments_RK, weights_M, counts, counts_e, activation, sums, *flat)
