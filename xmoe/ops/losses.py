"""A loss carried by a tensor: its gradient is added when backward reaches the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _CarryLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, scale: Callable[[], float]) -> Tensor:
        ctx.scale, ctx.like_loss = scale, (loss.shape, loss.dtype, loss.device)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shape, dtype, device = ctx.like_loss
        return grad, torch.full(shape, ctx.scale(), dtype=dtype, device=device), None


def carry_loss(output: Tensor, loss: Tensor, scale: Callable[[], float]) -> Tensor:
    """``output``, unchanged, whose backward also adds the gradient of ``scale() * loss``.

    For a loss that cannot be returned to where the model's loss is made. ``scale`` is asked in backward: what the
    model's loss is multiplied by there. With ``output`` of ones and ``scale`` 1, ``output.sum().backward()`` gives
    ``loss`` the gradient 1, and ``output`` the gradient it has without.
    """
    return _CarryLoss.apply(output, loss, scale)
