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

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._backend import kernels_for
from ..ops.collectives import all_to_all, exchange_counts, exchange_rows
from ..ops.relay import Route, bring_home, send_outward
from ..topology import NodeLayout
from ..types import Rows, TokenBuffer, Traffic
from .hierarchical_plan import Arrivals, HierarchicalPlan, Where, arrive, depart, message_of, read_sizes, references_of

Levels = Literal["gpu", "node", "node+gpu"]


class HierarchicalDispatcher:
    """Dispatch over one expert-parallel group; rank w owns experts ``w*e .. w*e + e - 1``.

    ``layout``  the nodes of the group's ranks
    ``route``   exchanges of the whole group and, unless there is one node or one rank to a node, of the ranks of this
                rank's node, in the group's order. Raises ValueError where these do not fit the layout.
    """

    def __init__(self, route: Route, layout: NodeLayout, *, levels: Levels) -> None:
        self.exchange = route.first
        self.rank = dist.get_rank(route.first.group)
        self.layout = layout
        self._per_gpu, self._per_node = "gpu" in levels, "node" in levels
        self._where: dict[torch.device, Where] = {}
        num_ranks = dist.get_world_size(route.first.group)
        if layout.num_ranks != num_ranks:
            raise ValueError(f"the layout has {layout.num_ranks} ranks, the expert-parallel group {num_ranks}")
        if not self.passes_on(layout, levels):
            route = Route(first=route.first, second=None)
        elif route.second is None or dist.get_world_size(route.second.group) != layout.ranks_per_node:
            raise ValueError(f"levels {levels!r} need a group of the {layout.ranks_per_node} ranks of this rank's node")
        self.route = route

    @staticmethod
    def passes_on(layout: NodeLayout, levels: Levels) -> bool:
        """Whether rows take a second hop."""
        return "node" in levels and layout.num_nodes > 1 and layout.ranks_per_node > 1

    def plan(self, buffer: TokenBuffer) -> HierarchicalPlan:
        """Exchanges counts, reads both sides' to the host at once, then exchanges which row serves what."""
        where = self._where_on(buffer.slot_ids_S.device)
        departure = depart(buffer, where, kernels_for(buffer.combine_weights_S))
        message_WC = message_of(departure, where)
        received = exchange_counts(message_WC.view(-1), self.exchange.named("exchange of counts"))
        arrivals = Arrivals.of(received.view_as(message_WC), where)
        sizes = read_sizes(departure, arrivals)  # the one sync
        references = exchange_rows(
            references_of(departure, sizes),
            sizes.references_sent,
            sizes.references_received,
            self.exchange.named("exchange of references"),
        )
        return arrive(departure, arrivals, references, sizes, where=where, top_k=buffer.top_k)

    def dispatch(self, x_TD: Tensor, buffer: TokenBuffer, plan: HierarchicalPlan) -> Rows:
        x_RD = send_outward(x_TD, plan.relay, self.route.named("dispatch of rows"))
        weights_M = all_to_all(
            buffer.combine_weights_S[: plan.num_assigned],
            plan.weight_splits_sent,
            plan.weight_splits_received,
            self.exchange.named("dispatch of weights"),
        )
        return Rows(x_RD=x_RD, weights_M=weights_M.index_select(0, plan.weight_ids_M))

    def combine(self, y_RD: Tensor, buffer: TokenBuffer, plan: HierarchicalPlan) -> Tensor:
        return bring_home(y_RD, plan.relay, self.route.named("combine of rows"))

    def rows_sent_away(self, plan: HierarchicalPlan) -> int:
        traffic = self.traffic(plan)
        return traffic.inside_node + traffic.between_nodes

    def traffic(self, plan: HierarchicalPlan) -> Traffic:
        return traffic_of(plan, self.layout, self.rank)

    def _where_on(self, device: torch.device) -> Where:
        if device not in self._where:
            self._where[device] = Where.of(
                self.layout, self.rank, per_gpu=self._per_gpu, per_node=self._per_node, device=device
            )
        return self._where[device]


def traffic_of(plan: HierarchicalPlan, layout: NodeLayout, rank: int) -> Traffic:
    """What ``rank`` moves by ``plan``."""
    first, second = plan.relay.first, plan.relay.second
    neighbours = layout.members[layout.nodes[rank]]
    inside, to_self = sum(first.send_splits[other] for other in neighbours), first.send_splits[rank]
    return Traffic(
        to_self=to_self,
        inside_node=inside - to_self + (sum(second.send_splits) if second is not None else 0),
        between_nodes=sum(first.send_splits) - inside,
        received=plan.relay.num_arrived - first.recv_splits[rank],
        assigned=plan.num_assigned,
        assigned_remote=plan.num_assigned - sum(plan.weight_splits_sent[other] for other in neighbours),
    )
