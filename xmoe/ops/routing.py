"""Differentiable steps of the router. Each keeps for backward only what no other step keeps already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.reference import GateRule, Gating, accumulator_dtype
from ._backend import kernels_for


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        dtype = accumulator_dtype(x_TD.dtype)
        with torch.autocast(x_TD.device.type, enabled=False):
            return x_TD.to(dtype) @ weight_ED.to(dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        dtype = grad_TE.dtype
        with torch.autocast(grad_TE.device.type, enabled=False):
            grad_x = (grad_TE @ weight_ED.to(dtype)).to(x_TD.dtype) if ctx.needs_input_grad[0] else None
            grad_w = (grad_TE.t() @ x_TD.to(dtype)).to(weight_ED.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """``x @ weight.T`` in at least float32, ``[T, E]``, whatever the inputs' dtypes and autocast say.

    Keeps x in its own dtype for backward (the layer keeps it anyway), never a float32 copy of it.
    """
    return _RouterLogits.apply(x_TD, weight_ED)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        rule: GateRule,
        bias_E: Tensor | None,
        used_T: Tensor | None,
        ids_TK: Tensor | None,
        num_parts: int,
    ) -> tuple[Tensor, ...]:
        ctx.kernels, ctx.rule = kernels_for(logits_TE), rule
        gating = ctx.kernels.gate_forward(
            logits_TE, rule, bias_E=bias_E, used_T=used_T, ids_TK=ids_TK, num_parts=num_parts
        )
        # Scores are computed again from the logits, so that one [T, E] tensor is kept; ids are small numbers.
        kept_ids_TK = gating.ids_TK.to(torch.int16) if logits_TE.shape[1] < 2**15 else gating.ids_TK
        ctx.save_for_backward(logits_TE, kept_ids_TK, used_T)
        ctx.mark_non_differentiable(gating.ids_TK, gating.counts_BE)
        return gating.ids_TK, gating.weights_TK, gating.counts_BE, gating.share_sums_BE, gating.z_sums_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_TE, ids_TK, used_T = ctx.saved_tensors
        _, grad_weights_TK, _, grad_share_sums_BE, grad_z_sums_B = grads
        grad_TE = ctx.kernels.gate_backward(
            logits_TE,
            ids_TK,
            ctx.rule,
            grad_weights_TK=grad_weights_TK,
            grad_share_sums_BE=grad_share_sums_BE,
            grad_z_sums_B=grad_z_sums_B,
            used_T=used_T,
        )
        return grad_TE, None, None, None, None, None


def gate_tokens(
    logits_TE: Tensor,
    rule: GateRule,
    *,
    bias_E: Tensor | None = None,
    used_T: Tensor | None = None,
    ids_TK: Tensor | None = None,
    num_parts: int = 1,
) -> Gating:
    """Decides which experts each token takes, or weighs the decision ``ids_TK``, and sums for the losses.

    Weights, share sums and z sums are differentiable in the logits. See ``kernels.reference.gate_forward``.
    """
    ids_TK, weights_TK, counts_BE, share_sums_BE, z_sums_B = _Gate.apply(
        logits_TE, rule, bias_E, used_T, ids_TK, num_parts
    )
    return Gating(
        ids_TK=ids_TK,
        weights_TK=weights_TK,
        counts_BE=counts_BE,
        share_sums_BE=share_sums_BE,
        z_sums_B=z_sums_B,
    )
