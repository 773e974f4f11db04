"""Experts that take a given time and no processor: as a device beside the host would compute them.

On the emulated cluster the ranks' experts, gloo's threads and the kernel's network code share a few cores. Experts that
sleep leave the cores to the exchanges, so that what is seen is the order of events alone.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from xmoe.experts import Prepared
from xmoe.ops.clock import timed_backward
from xmoe.ops.expert_mlp import GradientSums
from xmoe.types import ExpertPlan, Rows

FORWARD_SHARE = 1 / 3  # backward has two matrix products for each of forward


class _Asleep(torch.autograd.Function):
    """Its input, after ``seconds`` of forward and backward together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.timed = seconds, timed_backward()
        time.sleep(seconds * FORWARD_SHARE)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with ctx.timed(grad.device):
            time.sleep(ctx.seconds * (1 - FORWARD_SHARE))
        return grad, None


class EmulatedExperts(nn.Module):
    """In the place of ``xmoe.experts.Experts``: ``y_RD`` is each row times the sum of its assignments' weights."""

    def __init__(self, us_per_row: float) -> None:
        super().__init__()
        self.us_per_row = us_per_row

    def prepare(self, device_type: str, **options: Any) -> Prepared:
        """Of nothing: there are no weights."""
        return Prepared(weights=None, dtype=None, sums=GradientSums(1))

    def forward(self, rows: Rows, plan: ExpertPlan, prepared: Prepared | None = None) -> Tensor:
        factors_R = rows.weights_M.new_zeros(rows.x_RD.shape[0]).index_add(0, plan.row_ids_M, rows.weights_M)
        return _Asleep.apply(rows.x_RD * factors_R[:, None], plan.num_computed * self.us_per_row * 1e-6)


class EmulatedMLP(nn.Module):
    """In the place of the shared experts: returns its input."""

    def __init__(self, us_per_row: float) -> None:
        super().__init__()
        self.us_per_row = us_per_row

    def forward(self, x_TD: Tensor) -> Tensor:
        return _Asleep.apply(x_TD, x_TD.shape[0] * self.us_per_row * 1e-6)
