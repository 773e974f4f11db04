"""Differentiable steps of the router. Each keeps for backward only what no other step keeps already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.reference import accumulator_dtype


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


def _raw_and_divisor(scores_TE: Tensor, ids_TK: Tensor, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Scores of the selected experts, 0 where the id is -1, and what they are divided by, ``[T, 1]``."""
    raw_TK = scores_TE.gather(1, ids_TK.clamp(min=0).long()).masked_fill_(ids_TK < 0, 0.0)
    total_T1 = raw_TK.sum(dim=1, keepdim=True)
    return raw_TK, total_T1.clamp(min=torch.finfo(raw_TK.dtype).eps) if normalize else torch.ones_like(total_T1)


class _TopKWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, ids_TK: Tensor, normalize: bool, scale: float) -> Tensor:
        raw_TK, divisor_T1 = _raw_and_divisor(scores_TE, ids_TK, normalize=normalize)
        # The scores are kept by the softmax (or sigmoid) already; ids are small numbers.
        kept_ids_TK = ids_TK.to(torch.int16) if scores_TE.shape[1] < 2**15 else ids_TK
        ctx.save_for_backward(scores_TE, kept_ids_TK)
        ctx.normalize, ctx.scale = normalize, scale
        return raw_TK.div_(divisor_T1).mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor | None, ...]:
        scores_TE, ids_TK = ctx.saved_tensors
        raw_TK, divisor_T1 = _raw_and_divisor(scores_TE, ids_TK, normalize=ctx.normalize)
        grad_raw_TK = grad_TK * (ctx.scale / divisor_T1)
        if ctx.normalize:
            # Where the sum was clamped it is a constant and has no gradient.
            shared_T1 = (grad_raw_TK * raw_TK).sum(dim=1, keepdim=True) / divisor_T1
            grad_raw_TK -= shared_T1.masked_fill_(divisor_T1 <= torch.finfo(divisor_T1.dtype).eps, 0.0)
        grad_raw_TK.masked_fill_(ids_TK < 0, 0.0)
        grad_TE = torch.zeros_like(scores_TE)
        # A token's ids differ, but for -1 (clamped to 0, adding 0): the sum has at most one term, so any order.
        grad_TE.scatter_add_(1, ids_TK.clamp(min=0).long(), grad_raw_TK)
        return grad_TE, None, None, None


def top_k_weights(scores_TE: Tensor, ids_TK: Tensor, *, normalize: bool, scale: float) -> Tensor:
    """Combine weights ``[T, K]`` of the selected experts; 0 where the id is -1.

    ``weights[t, k] = scale * scores[t, ids[t, k]] / (sum over kept k of scores[t, ids[t, k]] if normalize else 1)``
    """
    return _TopKWeights.apply(scores_TE, ids_TK, normalize, scale)


class _SelectSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, slot_ids: Tensor) -> Tensor:
        ctx.save_for_backward(slot_ids)
        ctx.shape = weights_TK.shape
        return weights_TK.reshape(-1).index_select(0, slot_ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slot_ids,) = ctx.saved_tensors
        grad_flat = grad.new_zeros(ctx.shape.numel())
        grad_flat[slot_ids.long()] = grad
        return grad_flat.view(ctx.shape), None


def select_slots(weights_TK: Tensor, slot_ids: Tensor) -> Tensor:
    """``weights.flatten()[slot_ids]`` for distinct slot ids (int32), which alone are kept for backward."""
    return _SelectSlots.apply(weights_TK, slot_ids)
