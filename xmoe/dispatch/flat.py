"""One uneven all-to-all: one row for each (token, expert), straight to the expert's rank.

    source rank                                   expert's rank
    x_TD -> rows_ND, in expert order      ->      rows_RD, by source rank, then by local expert
                                                  row_ids_M: the same by local expert, then by source rank
    out_TD <- sum over a token's rows     <-      y_RD, weighted, in the order they came

Weights travel with the rows and are applied before the experts' down projection, so nothing of the experts'
results is kept for backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.collectives import Exchange, all_to_all, exchange_counts
from ..ops.gather import combine_rows, gather_rows, inverse_permutation
from ..types import DispatchPlan, Rows, TokenBuffer, Traffic
from .blocks import transpose_blocks


class FlatDispatcher:
    """Dispatch over one expert-parallel group; rank w owns experts ``w*e .. w*e + e - 1``.

    ``nodes`` are the nodes of the group's ranks, for traffic metrics; by default each rank has one of its own.
    """

    def __init__(self, exchange: Exchange, *, nodes: Sequence[int] | None = None) -> None:
        self.exchange = exchange
        self.num_ranks = dist.get_world_size(exchange.group)
        self.rank = dist.get_rank(exchange.group)
        self.nodes = tuple(nodes) if nodes is not None else tuple(range(self.num_ranks))

    def plan(self, buffer: TokenBuffer) -> DispatchPlan:
        """Exchanges the counts, then reads both sides' to the host at once."""
        sent_WE = buffer.tokens_per_expert_E
        received_WE = exchange_counts(sent_WE, self.exchange.named("exchange of counts"))
        num_local = sent_WE.numel() // self.num_ranks
        both = torch.stack([sent_WE, received_WE]).view(2, self.num_ranks, num_local).tolist()  # the one sync
        sent, received = both
        recv_splits = [sum(counts) for counts in received]
        received_We = received_WE.view(self.num_ranks, num_local)
        row_ids_M = transpose_blocks(received_We, num_rows=sum(recv_splits))
        return DispatchPlan(
            num_rows=sum(map(sum, sent)),
            send_splits=[sum(counts) for counts in sent],
            recv_splits=recv_splits,
            row_ids_M=row_ids_M,
            assignments_RK=inverse_permutation(row_ids_M)[:, None],
            counts_e=received_We.sum(dim=0),
            tokens_per_local_expert=[sum(column) for column in zip(*received, strict=True)],
        )

    def dispatch(self, x_TD: Tensor, buffer: TokenBuffer, plan: DispatchPlan) -> Rows:
        weights_R = all_to_all(
            buffer.combine_weights_S[: plan.num_rows],
            plan.send_splits,
            plan.recv_splits,
            self.exchange.named("dispatch of weights"),
        )
        rows_ND = gather_rows(x_TD, buffer.slot_ids_S[: plan.num_rows], _places_TK(buffer))
        x_RD = all_to_all(rows_ND, plan.send_splits, plan.recv_splits, self.exchange.named("dispatch of rows"))
        return Rows(x_RD=x_RD, weights_M=weights_R.index_select(0, plan.row_ids_M))

    def combine(self, y_RD: Tensor, buffer: TokenBuffer, plan: DispatchPlan) -> Tensor:
        rows_ND = all_to_all(y_RD, plan.recv_splits, plan.send_splits, self.exchange.named("combine of rows"))
        return combine_rows(rows_ND, buffer.slot_ids_S[: plan.num_rows], _places_TK(buffer))

    def rows_sent_away(self, plan: DispatchPlan) -> int:
        return plan.num_rows - plan.send_splits[self.rank]

    def traffic(self, plan: DispatchPlan) -> Traffic:
        node = self.nodes[self.rank]
        inside = sum(rows for rows, other in zip(plan.send_splits, self.nodes, strict=True) if other == node)
        return Traffic(
            to_self=plan.send_splits[self.rank],
            inside_node=inside - plan.send_splits[self.rank],
            between_nodes=plan.num_rows - inside,
            received=sum(plan.recv_splits) - plan.recv_splits[self.rank],
            assigned=plan.num_rows,
            assigned_remote=plan.num_rows - inside,
        )


def _places_TK(buffer: TokenBuffer) -> Tensor:
    return buffer.places_S.view(buffer.num_tokens, buffer.top_k)
