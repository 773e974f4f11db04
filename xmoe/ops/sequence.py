"""Tokens cut into slices, one a rank, and joined again: each is the other's backward.

    own_slice      x_PLD, the same on all ranks -> x_PlD, this rank's slice    backward: slices' gradients, joined
    join_slices    y_PlD, this rank's slice     -> y_PLD, the same on all      backward: this rank's slice
    sum_losses     this rank's part of a loss   -> the loss, the same on all   backward: one gradient for all parts
    sum_gradients  parameters, the same on all  -> the same, unchanged         backward: the sum of their gradients

What is the same on all ranks has the same gradient on all of them: that is what tensor parallelism promises, here it
is taken for granted going in and kept coming out.

Legend, beyond ``xmoe.types``:  P  parts (sequences, or 1)   L  tokens of each part   l  of them on this rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .clock import timed, timed_backward
from .collectives import Exchange, gather_over_ranks, sum_over_ranks


@dataclass(frozen=True)
class Slices:
    """How the L tokens of each part lie on the ranks: consecutive slices, in rank order.

    ``sizes``  tokens of each rank's slice, ``sum == L``
    ``rank``   whose slice is this rank's

    Example: ``Slices.even(5, num_ranks=3, rank=1)`` has sizes (2, 2, 1), start 2 and size 2.
    """

    sizes: tuple[int, ...]
    rank: int

    @staticmethod
    def even(length: int, *, num_ranks: int, rank: int) -> Slices:
        """Slices whose sizes differ by one at most; of fewer tokens than ranks the last ranks get none."""
        base, longer = divmod(length, num_ranks)
        return Slices(tuple(base + (place < longer) for place in range(num_ranks)), rank)

    @property
    def length(self) -> int:
        return sum(self.sizes)

    @property
    def size(self) -> int:
        return self.sizes[self.rank]

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.rank])


def cut(whole_PL: Tensor, slices: Slices) -> Tensor:
    """This rank's slice, in memory of its own: a view would keep all tokens alive. Not differentiable."""
    return whole_PL.narrow(1, slices.start, slices.size).clone(memory_format=torch.contiguous_format)


def gather_slices(own_Pl: Tensor, slices: Slices, exchange: Exchange) -> Tensor:
    """All ranks' slices in one tensor ``[P, L, ...]``. Not differentiable.

    Slices are filled up to the longest, so that one equal all-gather carries them.
    """
    parts, longest = own_Pl.shape[0], max(slices.sizes)
    if parts * longest == 0:  # on every rank alike
        return own_Pl
    if slices.size < longest:
        missing = own_Pl.new_zeros((parts, longest - slices.size, *own_Pl.shape[2:]))
        own_Pl = torch.cat([own_Pl, missing], dim=1)
    found_WPl = gather_over_ranks(own_Pl, exchange)
    if parts == 1 and min(slices.sizes) == longest:
        return found_WPl.view(1, slices.length, *own_Pl.shape[2:])
    return torch.cat([found_Pl[:, :size] for found_Pl, size in zip(found_WPl, slices.sizes, strict=True)], dim=1)


class _OwnSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PLD: Tensor, slices: Slices, exchange: Exchange) -> Tensor:
        ctx.slices, ctx.exchange, ctx.timed = slices, exchange, timed_backward()
        return cut(x_PLD, slices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PlD: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.timed(grad_PlD.device):
            return gather_slices(grad_PlD, ctx.slices, ctx.exchange), None, None


class _JoinSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_PlD: Tensor, slices: Slices, exchange: Exchange) -> Tensor:
        ctx.slices = slices
        joined = gather_slices(y_PlD, slices, exchange)
        return joined.view_as(joined) if joined is y_PlD else joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PLD: Tensor) -> tuple[Tensor | None, ...]:
        return cut(grad_PLD, ctx.slices), None, None


class _SumLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, exchange: Exchange) -> Tensor:
        return sum_over_ranks(loss, exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
        flat = sum_over_ranks(torch.cat([grad.reshape(-1).to(dtype) for grad in grads]), ctx.exchange)
        parts = flat.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad).to(grad.dtype) for part, grad in zip(parts, grads, strict=True))


def own_slice(x_PLD: Tensor, slices: Slices, exchange: Exchange) -> Tensor:
    """This rank's slice of tokens that all ranks hold, in memory of its own; keeps nothing for backward.

    Raises RuntimeError naming ``exchange.label`` when backward's all-gather fails or outlasts its timeout.
    """
    with timed("dispatch", x_PLD.device):
        return _OwnSlice.apply(x_PLD, slices, exchange.named("gather of the input's gradient"))


def join_slices(y_PlD: Tensor, slices: Slices, exchange: Exchange) -> Tensor:
    """All ranks' slices, in token order, bitwise the same on all ranks; keeps nothing for backward."""
    with timed("combine", y_PlD.device):
        return _JoinSlices.apply(y_PlD, slices, exchange.named("gather of results"))


def sum_losses(loss: Tensor, exchange: Exchange) -> Tensor:
    """The sum of the ranks' parts of a loss, which every rank then adds to the same loss of the model."""
    return _SumLosses.apply(loss, exchange.named("sum of losses"))


def sum_gradients(parameters: Sequence[Tensor], exchange: Exchange) -> tuple[Tensor, ...]:
    """The parameters as they are; their gradients are summed over the ranks, in float32 at least and all at once.

    One all-reduce when the last gradient is there, so the ranks cannot come to it in different orders.
    """
    return _SumGradients.apply(exchange.named("sum of gradients"), *parameters) if parameters else ()
