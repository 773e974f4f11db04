"""What dispatchers that send rows have in common: rows and weights moved by a plan, and counted by its numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ..ops.overlap import Pausing, together
from ..ops.relay import Route, bring_home, send_outward, send_straight
from ..types import DispatchPlan, Rows, TokenBuffer, Traffic


class RelayedDispatcher:
    """Dispatch over one expert-parallel group; rank w owns experts ``w*e .. w*e + e - 1``.

    ``nodes``       the node of each rank of the group
    ``num_chunks``  chunks of tokens whose exchanges overlap with other chunks' experts

    A subclass makes the plans. Weights travel beside the rows and are applied before the experts' down projection, so
    nothing of the experts' results is kept for backward.
    """

    def __init__(self, route: Route, *, nodes: Sequence[int], num_chunks: int = 1) -> None:
        self.route = route
        self.exchange = route.first
        self.num_ranks = dist.get_world_size(self.exchange.group)
        self.rank = dist.get_rank(self.exchange.group)
        self.nodes = tuple(nodes)
        self.num_chunks = num_chunks

    def dispatch(self, x_TD: Tensor, buffer: TokenBuffer, plan: DispatchPlan) -> Pausing[Rows]:
        x_RD, weights_M = yield from together(
            send_outward(x_TD, plan, self.route.named("dispatch of rows")),
            send_straight(
                buffer.combine_weights_S[: plan.num_assigned],
                plan.weight_splits_sent,
                plan.weight_splits_received,
                self.exchange.named("dispatch of weights"),
            ),
        )
        return Rows(x_RD=x_RD, weights_M=weights_M.index_select(0, plan.weight_ids_M))

    def combine(self, y_RD: Tensor, buffer: TokenBuffer, plan: DispatchPlan) -> Pausing[Tensor]:
        return bring_home(y_RD, plan, self.route.named("combine of rows"))

    def traffic(self, plan: DispatchPlan) -> Traffic:
        return traffic_of(plan, self.nodes, self.rank)


def traffic_of(plan: DispatchPlan, nodes: Sequence[int], rank: int) -> Traffic:
    """What ``rank`` moves by ``plan``; ``nodes`` are those of the group's ranks."""
    first, second = plan.first, plan.second
    neighbours = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    to_self = first.send_splits[rank]  # none of a second hop, which leads on to others
    inside, inside_received = (
        sum(part[other] for other in neighbours) for part in (first.send_splits, first.recv_splits)
    )
    return Traffic(
        to_self=to_self,
        inside_node=inside - to_self + (sum(second.send_splits) if second is not None else 0),
        between_nodes=sum(first.send_splits) - inside,
        received_inside_node=inside_received - to_self + (sum(second.recv_splits) if second is not None else 0),
        received_between_nodes=sum(first.recv_splits) - inside_received,
        assigned=plan.num_assigned,
        assigned_remote=plan.num_assigned - sum(plan.weight_splits_sent[other] for other in neighbours),
    )
