"""Rows by slot and their sum by token: each is the other's backward, and only the slot ids are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels import reference


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slot_ids_N: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(slot_ids_N)
        ctx.num_tokens, ctx.top_k = x_TD.shape[0], top_k
        return reference.gather_rows(x_TD, slot_ids_N, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        (slot_ids_N,) = ctx.saved_tensors
        return reference.combine_rows(grad_ND, slot_ids_N, ctx.num_tokens, top_k=ctx.top_k), None, None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, slot_ids_N: Tensor, num_tokens: int, top_k: int) -> Tensor:
        ctx.save_for_backward(slot_ids_N)
        ctx.top_k = top_k
        return reference.combine_rows(rows_ND, slot_ids_N, num_tokens, top_k=top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        (slot_ids_N,) = ctx.saved_tensors
        return reference.gather_rows(grad_TD, slot_ids_N, ctx.top_k), None, None, None


def gather_rows(x_TD: Tensor, slot_ids_N: Tensor, top_k: int) -> Tensor:
    """One row of x for each slot, ``[N, D]``: ``out[n] = x[slot_ids[n] // top_k]``. Slot ids are distinct."""
    return _GatherRows.apply(x_TD, slot_ids_N, top_k)


def combine_rows(rows_ND: Tensor, slot_ids_N: Tensor, num_tokens: int, *, top_k: int) -> Tensor:
    """The sum of each token's rows in slot order, ``[T, D]``; a token without a row gets zeros."""
    return _CombineRows.apply(rows_ND, slot_ids_N, num_tokens, top_k)
