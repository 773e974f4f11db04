"""A token's row once to each GPU, or once to each node, in place of once to each expert.

    level      rows between nodes    rows inside a node
    gpu        one for each GPU      one for each GPU
    node       one for each node     one for each expert
    node+gpu   one for each node     one for each GPU

A row for a remote node goes to one of the GPUs there that the token needs, its pilot, which passes copies on to the
others (``hierarchical_plan``). On the way home each GPU sums its experts' results of a token, and the pilot its
node's, so that the way home is as narrow as the way out; backward likewise (``xmoe.ops.relay``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from ..ops._backend import kernels_for
from ..ops.collectives import exchange_counts, exchange_rows
from ..ops.relay import Route
from ..topology import NodeLayout
from ..types import DispatchPlan, TokenBuffer
from .hierarchical_plan import (
    Arrivals,
    Where,
    arrive,
    depart,
    read_sizes,
    references_by_chunk,
    references_of,
)
from .relayed import RelayedDispatcher

Levels = Literal["gpu", "node", "node+gpu"]


class HierarchicalDispatcher(RelayedDispatcher):
    """``layout`` has the nodes of the group's ranks.

    ``route`` exchanges with the whole group and, unless there is one node or one rank to a node, with the ranks of this
    rank's node, in the group's order. Raises ValueError where these do not fit the layout.
    """

    def __init__(self, route: Route, layout: NodeLayout, *, levels: Levels, num_chunks: int = 1) -> None:
        num_ranks = dist.get_world_size(route.first.group)
        if layout.num_ranks != num_ranks:
            raise ValueError(f"the layout has {layout.num_ranks} ranks, the expert-parallel group {num_ranks}")
        if not self.passes_on(layout, levels):
            route = Route(first=route.first, second=None)
        elif route.second is None or dist.get_world_size(route.second.group) != layout.ranks_per_node:
            raise ValueError(f"levels {levels!r} need a group of the {layout.ranks_per_node} ranks of this rank's node")
        super().__init__(route, nodes=layout.nodes, num_chunks=num_chunks)
        self.layout = layout
        self._per_gpu, self._per_node = "gpu" in levels, "node" in levels
        self._where: dict[torch.device, Where] = {}

    @staticmethod
    def passes_on(layout: NodeLayout, levels: Levels) -> bool:
        """Whether rows take a second hop."""
        return "node" in levels and layout.num_nodes > 1 and layout.ranks_per_node > 1

    def plan(self, buffers: Sequence[TokenBuffer]) -> list[DispatchPlan]:
        """Exchanges counts, reads both sides' to the host at once, then exchanges which row serves what."""
        where = self._where_on(buffers[0].slot_ids_S.device)
        departures = [depart(buffer, where, kernels_for(buffer.combine_weights_S)) for buffer in buffers]
        message_WC = torch.cat([departure.message_WC for departure in departures], dim=1)
        received = exchange_counts(message_WC.view(-1), self.exchange.named("exchange of counts"))
        arrivals = [Arrivals.of(part, where) for part in received.view_as(message_WC).chunk(len(buffers), dim=1)]
        sizes = read_sizes(departures, arrivals)  # the one sync
        references = exchange_rows(
            references_of(departures, sizes),
            _sum_of_lists([size.references_sent for size in sizes]),
            _sum_of_lists([size.references_received for size in sizes]),
            self.exchange.named("exchange of references"),
        )
        chunks = zip(departures, arrivals, references_by_chunk(references, arrivals, sizes), sizes, strict=True)
        return [arrive(*chunk, where=where, top_k=buffers[0].top_k) for chunk in chunks]

    def _where_on(self, device: torch.device) -> Where:
        if device not in self._where:
            self._where[device] = Where.of(
                self.layout, self.rank, per_gpu=self._per_gpu, per_node=self._per_node, device=device
            )
        return self._where[device]


def _sum_of_lists(lists: list[list[int]]) -> list[int]:
    return [sum(numbers) for numbers in zip(*lists, strict=True)]
