"""A result that backward passes through, whatever it was computed from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, *inputs: Tensor) -> Tensor:
        ctx.num_inputs = len(inputs)
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *([None] * ctx.num_inputs)


def attach(result: Tensor, *inputs: Tensor) -> Tensor:
    """``result``, whose backward reaches the nodes of ``inputs`` also where they had no part in it.

    An exchange in backward is begun by every rank of a group, or the others wait for one another: a rank whose experts
    made nothing of their rows, having got none, must come by it as well. Adds nothing to the gradients.
    """
    return _Attach.apply(result, *inputs)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(anchor)
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Reading what was kept is how a checkpoint begins to recompute, as it does on the ranks that need gradients:
        # the recompute has exchanges of its own.
        _ = ctx.saved_tensors
        return None, None


def join_backward(result: Tensor) -> Tensor:
    """``result``, as a part of the graph whatever it was computed from: its gradient is asked for, and ends here."""
    if result.requires_grad or not torch.is_grad_enabled():
        return result
    return _Join.apply(result, torch.empty(0, requires_grad=True))
