"""Flat's rows in phases that keep traffic inside a node where they can, as Piper's HALO all-to-all does.

    I    rows for ranks of this node, straight to them, while II and III run
    II   rows for another node, all in one message to the rank of the same place there
    III  what arrived, from there to its rank

Every row crosses as often as in one all-to-all of the backend; what may change is how well the link is used. An
experiment of bench_dispatch.py, kept to show whether that pays.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from xmoe.dispatch.flat import FlatDispatcher
from xmoe.groups import part_of_group
from xmoe.ops.collectives import Exchange, exchange_counts, exchange_rows
from xmoe.ops.gather import combine_rows, gather_rows
from xmoe.ops.overlap import Pausing
from xmoe.ops.relay import send_straight
from xmoe.topology import NodeLayout
from xmoe.types import DispatchPlan, Rows, TokenBuffer


def reordered(rows: Tensor, counts: list[list[int]]) -> Tensor:
    """Blocks of rows that lie by the first index of ``counts``, then the second, listed by the second, then the first.

    Example: counts [[1, 2], [3, 0]] list rows 0, 3, 4, 5, 1, 2.
    """
    sizes = [count for line in counts for count in line]
    blocks = rows.split(sizes)
    width = len(counts[0])
    return torch.cat([blocks[row * width + column] for column in range(width) for row in range(len(counts))])


class Phases:
    """The exchange. Consecutive ranks share a node; rank ``g * P + p`` has place p on node g."""

    def __init__(self, layout: NodeLayout, timeout_s: float) -> None:
        world, own = dist.group.WORLD, dist.get_rank()
        cpu = torch.device("cpu")
        self.num_nodes, self.num_places = layout.num_nodes, layout.ranks_per_node
        if layout.nodes != tuple(rank // self.num_places for rank in range(layout.num_ranks)):
            raise ValueError(f"consecutive ranks must share a node, these lie on {layout.nodes}")
        self.node = own // self.num_places
        peers = [members[own % self.num_places] for members in layout.members]
        inside = part_of_group(world, layout.members[self.node], cpu)
        self.inside = Exchange(group=inside, label="phases: inside", timeout_s=timeout_s)
        self.across = Exchange(group=part_of_group(world, peers, cpu), label="phases: across", timeout_s=timeout_s)

    def by_node(self, counts_W: list[int]) -> list[list[int]]:
        return [counts_W[node * self.num_places :][: self.num_places] for node in range(self.num_nodes)]

    def exchange(self, rows: Tensor, send: list[int], recv: list[int]) -> Tensor:
        """As one all-to-all: ``send[w]`` rows to rank w, ``recv[w]`` from it, in the order of the ranks."""
        send_GP, recv_GP = self.by_node(send), self.by_node(recv)
        at = [0, *accumulate(map(sum, send_GP))]
        own, others = rows[at[self.node] : at[self.node + 1]], [rows[: at[self.node]], rows[at[self.node + 1] :]]
        stayed = rows.new_empty((sum(recv_GP[self.node]), *rows.shape[1:]))
        first = dist.all_to_all_single(
            stayed, own.contiguous(), recv_GP[self.node], send_GP[self.node], group=self.inside.group, async_op=True
        )
        arrived = self.pass_on(torch.cat(others), send_GP, recv_GP)
        first.wait()
        before = sum(map(sum, recv_GP[: self.node]))
        return torch.cat([arrived[:before], stayed, arrived[before:]])

    def pass_on(self, leaving: Tensor, send_GP: list[list[int]], recv_GP: list[list[int]]) -> Tensor:
        """Phases II and III: rows from other nodes, in the order of the ranks."""
        nothing = [0] * self.num_places
        leaving_GP = [line if node != self.node else nothing for node, line in enumerate(send_GP)]
        coming_GP = [line if node != self.node else nothing for node, line in enumerate(recv_GP)]
        told = exchange_counts(torch.tensor(leaving_GP).view(-1), self.across.named("counts"))
        passing_GP = told.view(self.num_nodes, self.num_places).tolist()
        met = exchange_rows(leaving, [*map(sum, leaving_GP)], [*map(sum, passing_GP)], self.across.named("rows"))
        to_places, from_places = ([*map(sum, zip(*lines, strict=True))] for lines in (passing_GP, coming_GP))
        got = exchange_rows(reordered(met, passing_GP), to_places, from_places, self.inside.named("rows"))
        return reordered(got, [list(column) for column in zip(*coming_GP, strict=True)])


class _InPhases(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], recv: list[int], phases: Phases) -> Tensor:
        ctx.send, ctx.recv, ctx.phases = send, recv, phases
        return phases.exchange(rows, send, recv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.phases.exchange(grad, ctx.recv, ctx.send), None, None, None


class PhasedDispatcher(FlatDispatcher):
    """Flat's plan and rows, exchanged in phases; weights, a number for each row, take one all-to-all."""

    def __init__(self, exchange: Exchange, layout: NodeLayout) -> None:
        super().__init__(exchange, nodes=layout.nodes)
        self.phases = Phases(layout, exchange.timeout_s)

    def dispatch(self, x_TD: Tensor, buffer: TokenBuffer, plan: DispatchPlan) -> Pausing[Rows]:
        hop = plan.first
        weights_R = yield from send_straight(
            buffer.combine_weights_S[: plan.num_assigned],
            hop.send_splits,
            hop.recv_splits,
            self.exchange.named("weights"),
        )
        rows_ND = gather_rows(x_TD, hop.slot_ids_N, hop.places_TK)
        x_RD = _InPhases.apply(rows_ND, hop.send_splits, hop.recv_splits, self.phases)
        return Rows(x_RD=x_RD, weights_M=weights_R.index_select(0, plan.row_ids_M))

    def combine(self, y_RD: Tensor, buffer: TokenBuffer, plan: DispatchPlan) -> Pausing[Tensor]:
        hop = plan.first
        rows_ND = _InPhases.apply(y_RD, hop.recv_splits, hop.send_splits, self.phases)
        yield from ()
        return combine_rows(rows_ND, hop.slot_ids_N, hop.places_TK)
