"""The plan of a hierarchical dispatch, in two steps around its exchange of counts. No rank waits here for another.

    depart   where each slot of this rank's tokens goes, and what its peers must know of that
    arrive   from what the peers sent: this rank's rows and assignments, and the rows it passes on

Each chunk of tokens has a plan of its own; what all of them exchange and read goes in one piece.

Slots of one token share *rows*. A first hop leads from the token's rank to one GPU of each remote node it needs (its
pilot there) and straight to the GPUs of its own node; a second one from the pilots to their nodes' other GPUs. A
source knows the whole route of its tokens and numbers the rows of both hops for everybody, so two exchanges do: of
counts, then of one int32 for each row passed on (which row) and one for each assignment (which row serves it).

Rows of a first hop come by source, then token; those of a second by pilot, then source, then token. On a rank rows of
the first hop lie before those of the second. Assignments are sorted by local expert, then source, then slot, as with
every dispatcher. All is integers and reads nothing back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..topology import NodeLayout
from ..types import DispatchPlan, Hop, TokenBuffer
from .blocks import transpose_blocks
from .pilots import choose_pilots, earlier_slots


@dataclass(frozen=True, kw_only=True)
class Where:
    """A rank's place in its group, and how slots share rows. Index tensors lie on the layer's device.

    ``per_gpu``            slots of a token whose experts share a GPU share a row
    ``per_node``           slots of a token whose experts share a remote node share a row as far as that node
    ``num_ranks``          W
    ``num_places``         P, the ranks of a node among whom rows are passed on; 0 where there is no second hop
    ``own_node``           this rank's node
    ``node_of_rank_W1``    node of each rank, and G for rank W, which is none
    ``place_of_rank_W1``   place of each rank among those of its node, 0 for rank W
    ``neighbours_WP``      the ranks of each rank's node, by place
    """

    per_gpu: bool
    per_node: bool
    num_ranks: int
    num_places: int
    own_node: int
    node_of_rank_W1: Tensor
    place_of_rank_W1: Tensor
    neighbours_WP: Tensor

    @classmethod
    def of(cls, layout: NodeLayout, rank: int, *, per_gpu: bool, per_node: bool, device: torch.device) -> Where:
        def tensor(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        per_node = per_node and layout.num_nodes > 1
        num_places = layout.ranks_per_node if per_node and layout.ranks_per_node > 1 else 0
        neighbours = [layout.members[node][:num_places] for node in layout.nodes]
        return cls(
            per_gpu=per_gpu,
            per_node=per_node,
            num_ranks=layout.num_ranks,
            num_places=num_places,
            own_node=layout.nodes[rank],
            node_of_rank_W1=tensor([*layout.nodes, layout.num_nodes]),
            place_of_rank_W1=tensor([*layout.places, 0]),
            neighbours_WP=tensor(neighbours).view(layout.num_ranks, num_places),
        )

    def serving_width(self, top_k: int, num_local: int) -> int:
        """The most assignments a row can have on its last rank."""
        return min(top_k, num_local) if self.per_gpu or self.per_node else 1

    def passing_width(self, top_k: int) -> int:
        """The most ranks' or experts' results that can sum to one row on its pilot, the pilot's own counted as one."""
        return min(top_k, self.num_places) if self.per_gpu else top_k


@dataclass(frozen=True, kw_only=True)
class Departure:
    """This rank's tokens before anything of them is known on the host.

    ``slot_ids_S``    int32; the first slot of each row of the first hop, in the rows' order; then all other slots
    ``places_S``      int32; its inverse
    ``passed_on_S``   int32; for each row of the second hop, by pilot, then rank: ``row * width + n``, ``row`` being
                      its place among the rows this rank sends that pilot, n >= 1 its place among that row's copies
    ``served_S``      int32; for each assignment, by expert, then slot: ``row * width + n``, ``row`` being its row's
                      place among those of this rank's tokens that reach its rank, n >= 0 its place in that row
    ``first_W``       int64; rows of the first hop to each rank
    ``second_WP``     int64; rows of the second hop from each rank to each place of its node
    ``assigned_We``   int64; assignments of each expert
    """

    slot_ids_S: Tensor
    places_S: Tensor
    passed_on_S: Tensor
    served_S: Tensor
    first_W: Tensor
    second_WP: Tensor
    assigned_We: Tensor


@dataclass(frozen=True, kw_only=True)
class References:
    """int64, by source, of the rows and assignments of :class:`Arrivals`: ``passed_on_S`` and ``served_S`` there."""

    passed_on_N: Tensor
    served_M: Tensor


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the host must know, read in one piece: all W, P or e integers, in the order of ranks, places, experts.

    ``first_*``, ``second_*``  rows of the hops; ``assigned_*`` assignments; ``reference_*`` int32s of the second
    exchange; ``tokens_e`` assignments of each local expert
    """

    first_sent: list[int]
    first_received: list[int]
    second_sent: list[int]
    second_received: list[int]
    assigned_sent: list[int]
    assigned_received: list[int]
    references_sent: list[int]
    references_received: list[int]
    tokens_e: list[int]


def experts_of_slots(buffer: TokenBuffer) -> Tensor:
    """int64 ``[T, K]``: the expert of each slot, E where it has none."""
    ends_E = buffer.tokens_per_expert_E.cumsum(0)
    order_S = torch.arange(buffer.places_S.numel(), device=ends_E.device)
    expert_S = torch.searchsorted(ends_E, order_S, right=True)
    return expert_S[buffer.places_S].view(buffer.num_tokens, buffer.top_k)


def depart(buffer: TokenBuffer, where: Where, kernels: Any) -> Departure:
    """The route of every slot. ``kernels`` (``xmoe.kernels``, either form) counts and sorts."""
    top_k, assigned_We = buffer.top_k, buffer.tokens_per_expert_E.view(where.num_ranks, -1)
    # Tokens last: a token's slots are compared with each other along memory.
    rank_KT = (experts_of_slots(buffer) // assigned_We.shape[1]).t().contiguous()
    hop_KT = rank_KT
    if where.per_node:
        hop_KT = choose_pilots(rank_KT, where.node_of_rank_W1, own_node=where.own_node, kernels=kernels)
    kept_KT = rank_KT < where.num_ranks
    remote_KT = kept_KT & (where.node_of_rank_W1[rank_KT] != where.own_node)
    second_KT = rank_KT != hop_KT
    earlier_KK1 = earlier_slots(top_k, rank_KT.device)

    # Whether slot k shares its first row, its second row, its last row with slot j of its token: [k, j, T].
    same_hop_KKT = hop_KT[:, None] == hop_KT
    first_KKT = (kept_KT if where.per_gpu else remote_KT & where.per_node)[:, None] & same_hop_KKT
    second_KKT = second_KT[:, None] & second_KT & (rank_KT[:, None] == rank_KT) & where.per_gpu
    last_KKT = torch.where(second_KT[:, None], second_KKT, first_KKT & ~second_KT)

    first = _Rows.of(first_KKT & earlier_KK1, kept_KT, hop_KT, where.num_ranks, kernels)
    way_KT = hop_KT * where.num_places + where.place_of_rank_W1[rank_KT]
    second = _Rows.of(second_KKT & earlier_KK1, second_KT, way_KT, where.num_ranks * where.num_places, kernels)
    second_WP = second.counts.view(where.num_ranks, where.num_places)
    row_KT = first.ref_KT
    if where.num_places:
        # A rank numbers the rows of one source: those of the first hop, then those each neighbour passes on.
        blocks_WQ = torch.cat([first.counts[:, None], _received(second_WP, where)], dim=1)
        before_WQ = pad(blocks_WQ.cumsum(1), (0, 0, 0, 1))
        before_KT = before_WQ[rank_KT, where.place_of_rank_W1[hop_KT]]
        row_KT = torch.where(second_KT, before_KT + second.ref_KT, row_KT)
    served_KT = row_KT * where.serving_width(top_k, assigned_We.shape[1]) + (last_KKT & earlier_KK1).sum(dim=1)
    copy_KT = 1 + (second.leads_KT & same_hop_KKT & earlier_KK1).sum(dim=1)
    passed_on_KT = first.ref_KT * where.passing_width(top_k) + copy_KT
    return Departure(
        slot_ids_S=first.slot_ids_S,
        places_S=first.places_S,
        passed_on_S=passed_on_KT.t().reshape(-1)[second.slot_ids_S].to(torch.int32),
        served_S=served_KT.t().reshape(-1)[buffer.slot_ids_S].to(torch.int32),
        first_W=first.counts,
        second_WP=second_WP,
        assigned_We=assigned_We,
    )


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows of one hop: one for each set of slots that share one, led by the first of them.

    ``slot_ids_S``, ``places_S``  leaders by way, then slot, then all other slots; and the inverse
    ``counts``    rows of each way; ``ref_KT`` place of a slot's row among those of its way
    """

    leads_KT: Tensor
    slot_ids_S: Tensor
    places_S: Tensor
    counts: Tensor
    ref_KT: Tensor

    @classmethod
    def of(cls, follows_KKT: Tensor, has_row_KT: Tensor, way_KT: Tensor, num_ways: int, kernels: Any) -> _Rows:
        """``follows_KKT``: whether slot k shares its row with slot j before it."""
        slots_K1 = torch.arange(way_KT.shape[0], device=way_KT.device)[:, None]
        # Sums, as torch reduces sums along this dimension ten times faster on a CPU than minima.
        is_first_KT = follows_KKT.sum(dim=1) == 0
        leader_KT = torch.where(is_first_KT, slots_K1, ((follows_KKT & is_first_KT) * slots_K1).sum(dim=1))
        leads_KT = has_row_KT & is_first_KT
        if not num_ways:
            zeros_KT = torch.zeros_like(way_KT)
            order_S = torch.arange(way_KT.numel(), dtype=torch.int32, device=way_KT.device)
            return cls(
                leads_KT=leads_KT, slot_ids_S=order_S, places_S=order_S, counts=zeros_KT.new_empty(0), ref_KT=zeros_KT
            )
        ids_TK = torch.where(leads_KT, way_KT, -1).t().to(torch.int32).contiguous()
        slot_ids_S, places_S = kernels.sort_slots(ids_TK, num_ways)
        counts = kernels.count_ids(ids_TK, num_ways)
        starts = counts.cumsum(0) - counts
        # A slot without a row may have any way: its entry means nothing.
        start_KT = starts[torch.where(has_row_KT, way_KT, 0)]
        ref_KT = places_S.view_as(ids_TK).t().long().gather(0, leader_KT) - start_KT
        return cls(leads_KT=leads_KT, slot_ids_S=slot_ids_S, places_S=places_S, counts=counts, ref_KT=ref_KT)


def _received(second_WP: Tensor, where: Where) -> Tensor:
    """int64 ``[W, P]``: rows that each rank gets from each place of its node, of those that pilots pass on."""
    return second_WP[where.neighbours_WP, where.place_of_rank_W1[:-1, None]]


def message_of(departure: Departure, where: Where) -> Tensor:
    """int64 ``[W, 1 + 2P + e]``: what each rank must know of this rank's tokens; see :class:`Arrivals`."""
    received_WP = _received(departure.second_WP, where)
    return torch.cat([departure.first_W[:, None], departure.second_WP, received_WP, departure.assigned_We], dim=1)


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """The peers' messages, by source.

    ``first_W``        rows that the first hop brings
    ``passed_on_WP``   rows of the source's tokens that this rank passes on to each place
    ``second_WP``      rows of the source's tokens that each place passes on to this rank
    ``assigned_We``    assignments of each local expert
    """

    first_W: Tensor
    passed_on_WP: Tensor
    second_WP: Tensor
    assigned_We: Tensor

    @classmethod
    def of(cls, messages_WC: Tensor, where: Where) -> Arrivals:
        places = where.num_places
        first_W1, passed_on_WP, second_WP, assigned_We = messages_WC.split(
            [1, places, places, messages_WC.shape[1] - 1 - 2 * places], dim=1
        )
        return cls(first_W=first_W1[:, 0], passed_on_WP=passed_on_WP, second_WP=second_WP, assigned_We=assigned_We)


def read_sizes(departures: Sequence[Departure], arrivals: Sequence[Arrivals]) -> list[Sizes]:
    """Reads to the host all it needs of all chunks: the layer's one device-to-host sync."""
    parts = [_sizes_on_device(*chunk) for chunk in zip(departures, arrivals, strict=True)]
    numbers = iter(torch.cat([values for part in parts for values in part.values()]).tolist())
    return [
        Sizes(**{name: [next(numbers) for _ in range(values.numel())] for name, values in part.items()})
        for part in parts
    ]


def _sizes_on_device(departure: Departure, arrivals: Arrivals) -> dict[str, Tensor]:
    sent_W, received_W = departure.assigned_We.sum(dim=1), arrivals.assigned_We.sum(dim=1)
    return {
        "first_sent": departure.first_W,
        "first_received": arrivals.first_W,
        "second_sent": arrivals.passed_on_WP.sum(dim=0),
        "second_received": arrivals.second_WP.sum(dim=0),
        "assigned_sent": sent_W,
        "assigned_received": received_W,
        "references_sent": departure.second_WP.sum(dim=1) + sent_W,
        "references_received": arrivals.passed_on_WP.sum(dim=1) + received_W,
        "tokens_e": arrivals.assigned_We.sum(dim=0),
    }


def references_of(departures: Sequence[Departure], sizes: Sequence[Sizes]) -> Tensor:
    """int32; for each rank and each chunk which rows it passes on, then which rows serve its assignments."""
    parts, counts = [], []
    for departure, size in zip(departures, sizes, strict=True):
        num_assigned = sum(size.assigned_sent)
        num_passed_on = sum(size.references_sent) - num_assigned
        parts += [departure.passed_on_S[:num_passed_on], departure.served_S[:num_assigned]]
        counts += [departure.second_WP.sum(dim=1), departure.assigned_We.sum(dim=1)]
    by_part = torch.cat(parts)
    return by_part[transpose_blocks(torch.stack(counts), num_rows=by_part.numel())]


def references_by_chunk(references: Tensor, arrivals: Sequence[Arrivals], sizes: Sequence[Sizes]) -> list[References]:
    """The same, as the peers sent them, of each chunk."""
    counts, splits = [], []
    for arrival, size in zip(arrivals, sizes, strict=True):
        num_assigned = sum(size.assigned_received)
        counts += [arrival.passed_on_WP.sum(dim=1), arrival.assigned_We.sum(dim=1)]
        splits += [sum(size.references_received) - num_assigned, num_assigned]
    by_part = references[transpose_blocks(torch.stack(counts, dim=1), num_rows=references.numel())].long()
    parts = by_part.split(splits)
    return [
        References(passed_on_N=passed_on, served_M=served)
        for passed_on, served in zip(parts[::2], parts[1::2], strict=True)
    ]


def arrive(
    departure: Departure, arrivals: Arrivals, references: References, sizes: Sizes, *, where: Where, top_k: int
) -> DispatchPlan:
    """The plan of a chunk, from what the peers sent: their counts and their references."""
    num_first, num_passed_on = sum(sizes.first_received), sum(sizes.second_sent)
    num_rows, num_assigned = num_first + sum(sizes.second_received), sum(sizes.assigned_received)
    # Assignments: from rows numbered by source to rows as they lie, by hop and neighbour, then source.
    weight_ids_M = transpose_blocks(arrivals.assigned_We, num_rows=num_assigned)
    width = where.serving_width(top_k, arrivals.assigned_We.shape[1])
    blocks_WQ = torch.cat([arrivals.first_W[:, None], arrivals.second_WP], dim=1)
    row_ids_R = transpose_blocks(blocks_WQ.t(), num_rows=num_rows)
    start_M = _repeat(_starts(blocks_WQ.sum(dim=1)), arrivals.assigned_We.sum(dim=1), num_assigned)
    served_M = references.served_M
    row_ids_M = row_ids_R[start_M + served_M // width][weight_ids_M]
    places_M = row_ids_M.long() * width + (served_M % width)[weight_ids_M]
    assignments_RK = _inverse(places_M, num_rows * width, first=0, none=num_assigned).view(num_rows, width)

    second = None
    if where.num_places:
        start_N = _repeat(_starts(arrivals.first_W), arrivals.passed_on_WP.sum(dim=1), num_passed_on)
        width = where.passing_width(top_k)
        slot_ids_N = start_N * width + references.passed_on_N
        slot_ids_N = slot_ids_N[transpose_blocks(arrivals.passed_on_WP, num_rows=num_passed_on)]
        places = _inverse(slot_ids_N, num_first * width, first=num_first, none=num_first + num_passed_on)
        places_RK = places.view(num_first, width)
        places_RK[:, 0] = torch.arange(num_first, dtype=torch.int32, device=places.device)
        second = Hop(
            slot_ids_N=slot_ids_N.to(torch.int32),
            places_TK=places_RK,
            send_splits=sizes.second_sent,
            recv_splits=sizes.second_received,
        )
    first = Hop(
        slot_ids_N=departure.slot_ids_S[: sum(sizes.first_sent)],
        places_TK=departure.places_S.view(-1, top_k),
        send_splits=sizes.first_sent,
        recv_splits=sizes.first_received,
    )
    return DispatchPlan(
        row_ids_M=row_ids_M,
        assignments_RK=assignments_RK,
        counts_e=arrivals.assigned_We.sum(dim=0),
        tokens_per_local_expert=sizes.tokens_e,
        first=first,
        second=second,
        weight_splits_sent=sizes.assigned_sent,
        weight_splits_received=sizes.assigned_received,
        weight_ids_M=weight_ids_M,
    )


def _starts(counts: Tensor) -> Tensor:
    return counts.cumsum(0) - counts


def _repeat(values: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    return torch.repeat_interleave(values, counts, output_size=num_rows)


def _inverse(places_N: Tensor, size: int, *, first: int, none: int) -> Tensor:
    """int32 ``[size]``: ``first + n`` at ``places[n]``, which are distinct, and ``none`` elsewhere."""
    numbers_N = torch.arange(first, first + places_N.numel(), dtype=torch.int32, device=places_N.device)
    filled = torch.full((size,), none, dtype=torch.int32, device=places_N.device)
    return filled.scatter_(0, places_N, numbers_N)
