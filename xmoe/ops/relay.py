"""Rows that reach their destination in one or two hops, and come home summed: each way is the other's backward.

    outward   a copy of each row for every rank that needs it; what the first hop brings is copied on by the second
    homeward  results back along the second hop, summed where they were copied, then along the first, summed again

Sums are taken in at least float32 in a fixed order, and rows travel in their own dtype. Only integers are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._backend import kernels_for
from .collectives import Exchange, exchange_rows


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One exchange of copies of the rows that lie here.

    ``slot_ids_N``   int32; row n sent is a copy of row ``slot_ids[n] // width``, the rows being in order of ranks
    ``places_TK``    int32 ``[rows here, width]``; what sums to each row on the way home, by place among what lies
                     here then: of a first hop the N rows that came back, of a second the R1 results computed here, then
                     the N that came back. Entries outside are none
    ``send_splits``, ``recv_splits``  rows to and from each rank of the hop's group
    """

    slot_ids_N: Tensor
    places_TK: Tensor
    send_splits: list[int]
    recv_splits: list[int]


@dataclass(frozen=True, kw_only=True)
class Relay:
    """The hops of one plan. ``second`` leads on from the rows the first hop brought; None where they have arrived."""

    first: Hop
    second: Hop | None

    @property
    def num_arrived(self) -> int:
        """R, rows on this rank at the end: those of the first hop, then those of the second."""
        return sum(self.first.recv_splits) + (sum(self.second.recv_splits) if self.second is not None else 0)


@dataclass(frozen=True, kw_only=True)
class Route:
    """The exchanges of both hops; ``second`` is among ranks of a node, None where no rank passes rows on."""

    first: Exchange
    second: Exchange | None

    def named(self, part: str) -> Route:
        second = self.second.named(f"{part}, second hop") if self.second is not None else None
        return Route(first=self.first.named(part), second=second)


def _outward(x_TD: Tensor, relay: Relay, route: Route, kernels: Any) -> Tensor:
    first, second = relay.first, relay.second
    copies = kernels.gather_rows(x_TD, first.slot_ids_N, first.places_TK.shape[1])
    if second is None:
        return exchange_rows(copies, first.send_splits, first.recv_splits, route.first)
    assert route.second is not None
    x_RD = x_TD.new_empty((relay.num_arrived, x_TD.shape[1]))
    num_first = sum(first.recv_splits)
    exchange_rows(copies, first.send_splits, first.recv_splits, route.first, out=x_RD[:num_first])
    copies = kernels.gather_rows(x_RD[:num_first], second.slot_ids_N, second.places_TK.shape[1])
    exchange_rows(copies, second.send_splits, second.recv_splits, route.second, out=x_RD[num_first:])
    return x_RD


def _homeward(y_RD: Tensor, relay: Relay, route: Route, kernels: Any) -> Tensor:
    first, second = relay.first, relay.second
    if second is not None:
        assert route.second is not None
        num_first, num_passed_on = sum(first.recv_splits), sum(second.send_splits)
        results = y_RD.new_empty((num_first + num_passed_on, y_RD.shape[1]))
        results[:num_first] = y_RD[:num_first]
        exchange_rows(y_RD[num_first:], second.recv_splits, second.send_splits, route.second, out=results[num_first:])
        y_RD = kernels.combine_rows(results, second.places_TK)
    rows_ND = exchange_rows(y_RD, first.recv_splits, first.send_splits, route.first)
    home_TD: Tensor = kernels.combine_rows(rows_ND, first.places_TK)
    return home_TD


class _Outward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, relay: Relay, route: Route) -> Tensor:
        ctx.relay, ctx.route, ctx.kernels = relay, route, kernels_for(x_TD)
        return _outward(x_TD, relay, route, ctx.kernels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        return _homeward(grad_RD, ctx.relay, ctx.route.named("backward"), ctx.kernels), None, None


class _Homeward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, relay: Relay, route: Route) -> Tensor:
        ctx.relay, ctx.route, ctx.kernels = relay, route, kernels_for(y_RD)
        return _homeward(y_RD, relay, route, ctx.kernels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        return _outward(grad_TD, ctx.relay, ctx.route.named("backward"), ctx.kernels), None, None


def send_outward(x_TD: Tensor, relay: Relay, route: Route) -> Tensor:
    """``[R, D]``: the rows that reach this rank, those of the first hop before those of the second.

    Every rank of the group must call it, with rows or without. Differentiable in x.
    """
    return _Outward.apply(x_TD, relay, route)


def bring_home(y_RD: Tensor, relay: Relay, route: Route) -> Tensor:
    """``[T, D]``: the sum of what became of each row's copies, in rows' dtype. Differentiable in y."""
    return _Homeward.apply(y_RD, relay, route)
