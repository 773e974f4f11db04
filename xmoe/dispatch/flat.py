"""One uneven all-to-all: one row for each (token, expert), straight to the expert's rank.

    source rank                                   expert's rank
    x_TD -> rows_ND, in expert order      ->      rows_RD, by source rank, then by local expert
                                                  row_ids_M: the same by local expert, then by source rank
    out_TD <- sum over a token's rows     <-      y_RD, weighted, in the order they came

Weights travel with the rows and are applied before the experts' down projection, so nothing of the experts'
results is kept for backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.collectives import Exchange, all_to_all, exchange_counts
from ..ops.gather import combine_rows, gather_rows, inverse_permutation
from ..types import DispatchPlan, Rows, TokenBuffer


class FlatDispatcher:
    """Dispatch over one expert-parallel group; rank w owns experts ``w*e .. w*e + e - 1``."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.num_ranks = dist.get_world_size(exchange.group)
        self.rank = dist.get_rank(exchange.group)

    def plan(self, buffer: TokenBuffer) -> DispatchPlan:
        """Exchanges the counts, then reads both sides' to the host at once."""
        sent_WE = buffer.tokens_per_expert_E
        received_WE = exchange_counts(sent_WE, self.exchange.named("exchange of counts"))
        num_local = sent_WE.numel() // self.num_ranks
        both = torch.stack([sent_WE, received_WE]).view(2, self.num_ranks, num_local).tolist()  # the one sync
        sent, received = both
        recv_splits = [sum(counts) for counts in received]
        received_We = received_WE.view(self.num_ranks, num_local)
        row_ids_M = _expert_major(received_We, num_rows=sum(recv_splits))
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


def _places_TK(buffer: TokenBuffer) -> Tensor:
    return buffer.places_S.view(buffer.num_tokens, buffer.top_k)


def _expert_major(counts_We: Tensor, *, num_rows: int) -> Tensor:
    """int32 ``[R]``: rows that lie by rank, then expert, listed by expert, then rank.

    Example: 2 ranks, 2 experts, counts [[1, 2], [3, 0]] gives [0, 3, 4, 5, 1, 2].
    """
    counts = counts_We.reshape(-1)
    starts_eW = (counts.cumsum(0) - counts).view_as(counts_We).t().reshape(-1)
    counts_eW = counts_We.t().reshape(-1)
    shift_eW = starts_eW - (counts_eW.cumsum(0) - counts_eW)
    places = torch.arange(num_rows, device=counts.device)
    return (places + torch.repeat_interleave(shift_eW, counts_eW, output_size=num_rows)).to(torch.int32)
