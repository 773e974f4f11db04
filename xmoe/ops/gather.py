"""Rows by slot and their sum by token: each is the other's backward, and only integers are kept.

Slots and places are each other's inverse (see ``TokenBuffer``): row n is of slot ``slot_ids_N[n]``, and the row of
slot ``t*K + k`` is ``places_TK[t, k]``, none where that is not below N. One of the two leads from rows to tokens,
the other back, so that in both directions every row is read once and written once, and nothing is added atomically.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.reference_plan import inverse_permutation as inverse_permutation
from ._backend import kernels_for


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slot_ids_N: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(places_TK)
        ctx.kernels = kernels_for(x_TD)
        return ctx.kernels.gather_rows(x_TD, slot_ids_N, places_TK.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        (places_TK,) = ctx.saved_tensors
        return ctx.kernels.combine_rows(grad_ND, places_TK), None, None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, slot_ids_N: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_ids_N)
        ctx.top_k = places_TK.shape[1]
        ctx.kernels = kernels_for(rows_ND)
        return ctx.kernels.combine_rows(rows_ND, places_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        (slot_ids_N,) = ctx.saved_tensors
        return ctx.kernels.gather_rows(grad_TD, slot_ids_N, ctx.top_k), None, None


class _CombineWeightedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, slot_ids_N: Tensor, places_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_ND, slot_ids_N, places_TK, weights_TK)
        ctx.kernels = kernels_for(rows_ND)
        return ctx.kernels.combine_rows(rows_ND, places_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, slot_ids_N, places_TK, weights_TK = ctx.saved_tensors
        top_k = places_TK.shape[1]
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            weights_N = weights_TK.reshape(-1).index_select(0, slot_ids_N)
            grad_rows = ctx.kernels.gather_rows(grad_TD, slot_ids_N, top_k, weights_N)
        if ctx.needs_input_grad[3]:
            # Slots of rows are distinct: no two values meet. A slot without a row gets zero.
            grad_weights = torch.zeros_like(weights_TK).view(-1)
            found_N = ctx.kernels.row_dot(rows_ND, grad_TD, slot_ids_N, top_k)
            grad_weights[slot_ids_N.long()] = found_N.to(grad_weights.dtype)
            grad_weights = grad_weights.view_as(weights_TK)
        return grad_rows, None, None, grad_weights


class _SelectSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, slot_ids_S: Tensor, places_S: Tensor) -> Tensor:
        ctx.save_for_backward(places_S)
        ctx.shape = weights_TK.shape
        return weights_TK.reshape(-1).index_select(0, slot_ids_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor | None, ...]:
        (places_S,) = ctx.saved_tensors
        return grad_S.index_select(0, places_S).view(ctx.shape), None, None


def gather_rows(x_TD: Tensor, slot_ids_N: Tensor, places_TK: Tensor) -> Tensor:
    """One row of x for each slot, ``[N, D]``: ``out[n] = x[slot_ids[n] // K]``. Keeps the places for backward."""
    return _GatherRows.apply(x_TD, slot_ids_N, places_TK)


def combine_rows(rows_ND: Tensor, slot_ids_N: Tensor, places_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """The sum of each token's rows, each times its slot's weight where weights are given; ``[T, D]`` in rows' dtype.

    Summed in slot order in at least float32; a token without a row gets zeros. Differentiable in rows and weights.
    Keeps the slot ids for backward, with weights the rows too.
    """
    if weights_TK is None:
        return _CombineRows.apply(rows_ND, slot_ids_N, places_TK)
    return _CombineWeightedRows.apply(rows_ND, slot_ids_N, places_TK, weights_TK)


def select_slots(weights_TK: Tensor, slot_ids_S: Tensor, places_S: Tensor) -> Tensor:
    """``weights.flatten()[slot_ids]`` of all slots in another order. Keeps the places for backward."""
    return _SelectSlots.apply(weights_TK, slot_ids_S, places_S)
