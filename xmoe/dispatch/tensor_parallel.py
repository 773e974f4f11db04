"""Whole experts under tensor parallelism: ranks that hold the same tokens each send a share of them.

Tensor-parallel ranks route alike, as their inputs are equal. Each then dispatches every n-th token, and a sum over
the ranks gives all of them every token's result, bit by bit the same: were each to send all tokens, the results would
differ by rounding, and with them the replicated parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops.clock import timed_backward
from ..ops.collectives import Exchange, sum_over_ranks
from ..ops.gather import inverse_permutation
from ..ops.overlap import Pausing
from ..types import ExpertPlan, Rows, TokenBuffer, Traffic
from .base import Dispatcher


class SharedTokens:
    """``inner`` for this rank's share of the tokens, token t being rank ``t % n``'s; ``exchange`` of those n ranks."""

    def __init__(self, inner: Dispatcher, exchange: Exchange) -> None:
        self.inner = inner
        self.exchange = exchange
        self.num_ranks = dist.get_world_size(exchange.group)
        self.rank = dist.get_rank(exchange.group)

    @property
    def num_chunks(self) -> int:
        return self.inner.num_chunks

    def plan(self, buffers: Sequence[TokenBuffer]) -> list[ExpertPlan]:
        # A recompute replays the plan: making it must keep nothing for backward.
        return self.inner.plan([self._share(buffer, buffer.combine_weights_S.detach()) for buffer in buffers])

    def dispatch(self, x_TD: Tensor, buffer: TokenBuffer, plan: ExpertPlan) -> Pausing[Rows]:
        exchange = self.exchange.named("sum of gradients")
        x_TD = _SumOfGradients.apply(x_TD, exchange)
        weights_S = _SumOfGradients.apply(buffer.combine_weights_S, exchange)
        return (yield from self.inner.dispatch(x_TD, self._share(buffer, weights_S), plan))

    def combine(self, y_RD: Tensor, buffer: TokenBuffer, plan: ExpertPlan) -> Pausing[Tensor]:
        homeward = self.inner.combine(y_RD, self._share(buffer, buffer.combine_weights_S), plan)
        del y_RD  # not held on the way home
        out_TD = yield from homeward
        return _Sum.apply(out_TD, self.exchange.named("sum of results"))

    def traffic(self, plan: ExpertPlan) -> Traffic:
        return self.inner.traffic(plan)

    def _share(self, buffer: TokenBuffer, weights_S: Tensor) -> TokenBuffer:
        """``buffer`` with the kept slots of this rank's tokens first, in expert order, and all others dropped."""
        slot_ids_S, counts_E = buffer.slot_ids_S, buffer.tokens_per_expert_E
        is_kept_S = torch.arange(slot_ids_S.numel(), device=slot_ids_S.device) < counts_E.sum()
        is_own_S = is_kept_S & (slot_ids_S // buffer.top_k % self.num_ranks == self.rank)
        before = torch.nn.functional.pad(is_own_S.cumsum(0), (1, 0))  # own slots before each place
        ends_E = counts_E.cumsum(0)
        order_S = torch.argsort((~is_own_S).to(torch.int8), stable=True)
        slot_ids_S = slot_ids_S[order_S]
        return TokenBuffer(
            slot_ids_S=slot_ids_S,
            places_S=inverse_permutation(slot_ids_S),
            combine_weights_S=weights_S[order_S],
            tokens_per_expert_E=before[ends_E] - before[ends_E - counts_E],
            num_tokens=buffer.num_tokens,
            top_k=buffer.top_k,
        )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, exchange: Exchange) -> Tensor:
        return sum_over_ranks(share, exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.timed = exchange, timed_backward()
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.timed(grad.device):
            return sum_over_ranks(grad, ctx.exchange), None
