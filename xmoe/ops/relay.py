"""Rows that reach their destination in one or two hops, and come home summed: each way is the other's backward.

    outward   a copy of each row for every rank that needs it; what the first hop brings is copied on by the second
    homeward  results back along the second hop, summed where they were copied, then along the first, summed again

A way is run in stages. Each ends the exchange that the stage before began, copies or sums, and begins the next, so
that between two stages an exchange is under way and something else can be computed:

    outward   leave ~~ (pass on ~~) arrive              ~~ an exchange under way
    homeward  turn  ~~ (sum by node ~~) sum by token

Backward of a stage is the stage of the other way across the same exchanges. Autograd runs backward in the reverse
order of forward, so what overlaps an exchange in forward has its backward overlap that exchange in backward.

Sums are taken in at least float32 in a fixed order, and rows travel in their own dtype. Only integers are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..types import DispatchPlan
from ._backend import kernels_for
from .clock import timed_backward
from .collectives import Exchange, Pending
from .overlap import Pause, Pausing

Stages = Sequence[Callable[[Tensor], Tensor]]


@dataclass(frozen=True, kw_only=True)
class Route:
    """The exchanges of both hops; ``second`` is among ranks of a node, None where no rank passes rows on."""

    first: Exchange
    second: Exchange | None

    def named(self, part: str) -> Route:
        second = self.second.named(f"{part}, second hop") if self.second is not None else None
        return Route(first=self.first.named(part), second=second)

    def backward(self) -> Route:
        second = self.second.named("backward") if self.second is not None else None
        return Route(first=self.first.named("backward"), second=second)


class Way(Protocol):
    """Rows on their way, in the way's own hands between two stages.

    The first of ``stages`` takes the rows and the last one gives them; what passes between stages is of no meaning.
    A way can be gone again once it has been gone to its end.
    """

    @property
    def stages(self) -> Stages: ...

    @property
    def pauses(self) -> list[Pause]:
        """What is under way between two stages: one less than those."""
        ...


class _TwoHops:
    """What both ways over a plan's hops have in common."""

    def __init__(self, plan: DispatchPlan, route: Route, kernels: Any) -> None:
        assert plan.second is None or route.second is not None
        # No more of the plan than backward needs: the graph holds the way.
        self.first, self.second, self.num_arrived = plan.first, plan.second, plan.num_arrived
        self.route, self.kernels = route, kernels
        self.num_first = sum(plan.first.recv_splits)
        self.pending: Pending | None = None
        self.rows: Tensor | None = None

    def end_exchange(self) -> Tensor:
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending.finish()


class Outward(_TwoHops):
    """``[T, D]`` to ``[R, D]``: the rows that reach this rank, those of the first hop before those of the second."""

    @property
    def stages(self) -> Stages:
        return [self.leave, *([self.pass_on] if self.second is not None else []), self.arrive]

    @property
    def pauses(self) -> list[Pause]:
        return [Pause.FAR, *([Pause.NEAR] if self.second is not None else [])]

    def leave(self, x_TD: Tensor) -> Tensor:
        hop = self.first
        copies = self.kernels.gather_rows(x_TD, hop.slot_ids_N, hop.places_TK.shape[1])
        self.rows = x_TD.new_empty((self.num_arrived, x_TD.shape[1]))
        self.pending = Pending(
            copies, hop.send_splits, hop.recv_splits, exchange=self.route.first, out=self.rows[: self.num_first]
        )
        return x_TD

    def pass_on(self, between: Tensor) -> Tensor:
        hop, rows = self.second, self.rows
        assert hop is not None
        assert rows is not None
        assert self.route.second is not None
        arrived = self.end_exchange()
        copies = self.kernels.gather_rows(arrived, hop.slot_ids_N, hop.places_TK.shape[1])
        self.pending = Pending(
            copies, hop.send_splits, hop.recv_splits, exchange=self.route.second, out=rows[self.num_first :]
        )
        return between

    def arrive(self, between: Tensor) -> Tensor:
        self.end_exchange()
        rows, self.rows = self.rows, None
        assert rows is not None
        return rows


class Homeward(_TwoHops):
    """``[R, D]`` to ``[T, D]``: the sum of what became of each row's copies."""

    @property
    def stages(self) -> Stages:
        return [self.turn, *([self.sum_by_node] if self.second is not None else []), self.sum_by_token]

    @property
    def pauses(self) -> list[Pause]:
        return [*([Pause.NEAR] if self.second is not None else []), Pause.FAR]

    def turn(self, y_RD: Tensor) -> Tensor:
        hop = self.second
        if hop is None:
            self._back_to_source(y_RD)
            return y_RD
        assert self.route.second is not None
        self.rows = y_RD.new_empty((self.num_first + sum(hop.send_splits), y_RD.shape[1]))
        self.rows[: self.num_first] = y_RD[: self.num_first]
        self.pending = Pending(
            y_RD[self.num_first :],
            hop.recv_splits,
            hop.send_splits,
            exchange=self.route.second,
            out=self.rows[self.num_first :],
        )
        return y_RD

    def sum_by_node(self, between: Tensor) -> Tensor:
        self.end_exchange()
        results, self.rows = self.rows, None
        assert results is not None
        assert self.second is not None
        self._back_to_source(self.kernels.combine_rows(results, self.second.places_TK))
        return between

    def sum_by_token(self, between: Tensor) -> Tensor:
        home_TD: Tensor = self.kernels.combine_rows(self.end_exchange(), self.first.places_TK)
        return home_TD

    def _back_to_source(self, rows: Tensor) -> None:
        hop = self.first
        self.pending = Pending(rows, hop.recv_splits, hop.send_splits, exchange=self.route.first)


class Straight:
    """One uneven all-to-all along dimension 0: ``send[w]`` rows to rank w, ``recv[w]`` from it, in ranks' order."""

    def __init__(self, send: list[int], recv: list[int], exchange: Exchange) -> None:
        self.send, self.recv, self.exchange = send, recv, exchange
        self.pending: Pending | None = None

    @property
    def stages(self) -> Stages:
        return [self.leave, self.arrive]

    @property
    def pauses(self) -> list[Pause]:
        return [Pause.FAR]

    def leave(self, rows: Tensor) -> Tensor:
        self.pending = Pending(rows, self.send, self.recv, exchange=self.exchange)
        return rows

    def arrive(self, between: Tensor) -> Tensor:
        pending, self.pending = self.pending, None
        assert pending is not None
        return pending.finish()


class _Stage(torch.autograd.Function):
    """Stage ``index`` of ``there``; backward is the stage of ``back`` across the same exchanges.

    Between stages the graph's edges carry an empty tensor: the rows are in the way's hands, some still under way.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Way, back: Way, index: int) -> Tensor:
        ctx.back, ctx.index, ctx.timed = back, index, timed_backward()
        return _run(there, index, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.timed(grad.device):
            return _run(ctx.back, len(ctx.back.stages) - 1 - ctx.index, grad), None, None, None


def _run(way: Way, index: int, rows: Tensor) -> Tensor:
    found = way.stages[index](rows)
    return found if index == len(way.stages) - 1 else found.new_empty(0)


def _travel(rows: Tensor, there: Way, back: Way) -> Pausing[Tensor]:
    rows = _Stage.apply(rows, there, back, 0)
    for index, pause in enumerate(there.pauses, start=1):
        yield pause
        rows = _Stage.apply(rows, there, back, index)
    return rows


def send_outward(x_TD: Tensor, plan: DispatchPlan, route: Route) -> Pausing[Tensor]:
    """``[R, D]``: the rows that reach this rank (:class:`Outward`). Differentiable in x.

    Every rank of the group must go this way, with rows or without, and pause alike.
    """
    kernels = kernels_for(x_TD)
    return _travel(x_TD, Outward(plan, route, kernels), Homeward(plan, route.backward(), kernels))


def bring_home(y_RD: Tensor, plan: DispatchPlan, route: Route) -> Pausing[Tensor]:
    """``[T, D]``: the sum of what became of each row's copies, in rows' dtype. Differentiable in y."""
    kernels = kernels_for(y_RD)
    return _travel(y_RD, Homeward(plan, route, kernels), Outward(plan, route.backward(), kernels))


def send_straight(rows: Tensor, send: list[int], recv: list[int], exchange: Exchange) -> Pausing[Tensor]:
    """``[sum(recv), ...]`` of ``[sum(send), ...]``: one all-to-all (:class:`Straight`). Differentiable in rows."""
    return _travel(rows, Straight(send, recv, exchange), Straight(recv, send, exchange.named("backward")))
