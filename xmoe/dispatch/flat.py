"""One uneven all-to-all: one row for each (token, expert), straight to the expert's rank.

source rank                                   expert's rank
x_TD -> rows_ND, in expert order      ->      x_RD, by source rank, then by local expert
                                              row_ids_M: the same by local expert, then by source rank
out_TD <- sum over a token's rows     <-      y_RD, weighted, in the order they came
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.collectives import Exchange, exchange_counts
from ..ops.gather import inverse_permutation
from ..ops.relay import Route
from ..types import DispatchPlan, Hop, TokenBuffer
from .blocks import transpose_blocks
from .relayed import RelayedDispatcher


class FlatDispatcher(RelayedDispatcher):
    """``nodes`` are the nodes of the group's ranks, for traffic metrics; by default each rank has one of its own."""

    def __init__(self, exchange: Exchange, *, nodes: Sequence[int] | None = None, num_chunks: int = 1) -> None:
        nodes = nodes if nodes is not None else range(dist.get_world_size(exchange.group))
        super().__init__(Route(first=exchange, second=None), nodes=nodes, num_chunks=num_chunks)

    def plan(self, buffers: Sequence[TokenBuffer]) -> list[DispatchPlan]:
        """Exchanges the counts of all chunks, then reads both sides' to the host at once."""
        sent_CWe = torch.stack([buffer.tokens_per_expert_E.view(self.num_ranks, -1) for buffer in buffers])
        sent_WCe = sent_CWe.transpose(0, 1).contiguous()
        received = exchange_counts(sent_WCe.view(-1), self.exchange.named("exchange of counts"))
        received_CWe = received.view_as(sent_WCe).transpose(0, 1)
        sent, received_ = torch.stack([sent_CWe, received_CWe]).tolist()  # the one sync
        return [_plan(*chunk) for chunk in zip(buffers, sent, received_, received_CWe, strict=True)]


def _plan(buffer: TokenBuffer, sent: list[list[int]], received: list[list[int]], received_We: Tensor) -> DispatchPlan:
    """The plan of one chunk from the counts by rank and expert, ``received`` on the host and on the device."""
    send_splits, recv_splits = [sum(counts) for counts in sent], [sum(counts) for counts in received]
    row_ids_M = transpose_blocks(received_We, num_rows=sum(recv_splits))
    return DispatchPlan(
        row_ids_M=row_ids_M,
        assignments_RK=inverse_permutation(row_ids_M)[:, None],
        counts_e=received_We.sum(dim=0),
        tokens_per_local_expert=[sum(column) for column in zip(*received, strict=True)],
        first=Hop(
            slot_ids_N=buffer.slot_ids_S[: sum(send_splits)],
            places_TK=buffer.places_S.view(buffer.num_tokens, buffer.top_k),
            send_splits=send_splits,
            recv_splits=recv_splits,
        ),
        second=None,
        weight_splits_sent=send_splits,
        weight_splits_received=recv_splits,
        weight_ids_M=row_ids_M,
    )
