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

from ..kernels.reference import Inbox, MessageStarts, RankMap, Routes
from ..topology import NodeLayout
from ..types import DispatchPlan, Hop, TokenBuffer


class Where(RankMap):
    """A rank's place in its group, and how slots share rows. Index tensors lie on the layer's device."""

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


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A chunk of this rank's tokens before anything of them is known on the host.

    ``kernels``       made the plan so far, and go on
    ``message_WC``    int64 ``[W, 1 + 2P + e]``; what each rank must know of the tokens, and ``starts`` where what it
                      counts begins
    ``slot_ids_S``    int32; the first slot of each row of the first hop, in the rows' order; then all other slots
    ``places_S``      int32; its inverse
    ``passed_on_S``, ``served_S``  int32; the references of the rows of the second hop and of the assignments, both by
                      rank (``xmoe.kernels.reference.row_references``); nothing after the last of them
    """

    kernels: Any
    message_WC: Tensor
    starts: MessageStarts
    slot_ids_S: Tensor
    places_S: Tensor
    passed_on_S: Tensor
    served_S: Tensor


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """The peers' messages of a chunk, ``message_WC`` by source; ``num_places`` is P."""

    message_WC: Tensor
    num_places: int

    @classmethod
    def of(cls, message_WC: Tensor, where: Where) -> Arrivals:
        return cls(message_WC=message_WC, num_places=where.num_places)


@dataclass(frozen=True, kw_only=True)
class References:
    """``references_N`` of all chunks, by source, then chunk; ``others_W1`` how many of other chunks lie before those of
    this one from each source, 0 where there is one chunk."""

    references_N: Tensor
    others_W1: Tensor | int


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


def depart(buffer: TokenBuffer, where: Where, kernels: Any) -> Departure:
    """The route of every slot. ``kernels`` are ``xmoe.kernels``, either form."""
    tokens_per_expert_E, num_ranks = buffer.tokens_per_expert_E, where.num_ranks
    num_local = tokens_per_expert_E.numel() // num_ranks
    rank_KT = kernels.ranks_of_slots(buffer.slot_ids_S, tokens_per_expert_E, num_ranks=num_ranks, top_k=buffer.top_k)
    hop_KT = kernels.choose_pilots(rank_KT, where) if where.num_places else rank_KT
    shared = kernels.share_rows(rank_KT, hop_KT, where)
    slot_ids_S, places_S, first_W = kernels.sort_and_count(shared.first_ids_TK, num_ranks)
    second_places_S, second_L = places_S, first_W[:0]
    if where.num_places:
        _, second_places_S, second_L = kernels.sort_and_count(shared.second_ids_TK, num_ranks * where.num_places)
    message_WC = kernels.route_message(first_W, second_L, tokens_per_expert_E, where)
    starts = kernels.message_starts(message_WC, num_places=where.num_places)
    routes = Routes(
        rank_KT=rank_KT,
        hop_KT=hop_KT,
        shared=shared,
        places_S=buffer.places_S,
        first_places_S=places_S,
        second_places_S=second_places_S,
    )
    passed_on_S, served_S = kernels.row_references(routes, starts, where, num_local=num_local)
    return Departure(
        kernels=kernels,
        message_WC=message_WC,
        starts=starts,
        slot_ids_S=slot_ids_S,
        places_S=places_S,
        passed_on_S=passed_on_S,
        served_S=served_S,
    )


def read_sizes(departures: Sequence[Departure], arrivals: Sequence[Arrivals]) -> list[Sizes]:
    """Reads to the host all it needs of all chunks: the layer's one device-to-host sync."""
    parts = [
        departure.kernels.message_sizes(departure.message_WC, arrival.message_WC, num_places=arrival.num_places)
        for departure, arrival in zip(departures, arrivals, strict=True)
    ]
    numbers = iter(_joined(parts).tolist())
    num_ranks, num_places = len(departures[0].message_WC), arrivals[0].num_places
    num_local = departures[0].message_WC.shape[1] - 1 - 2 * num_places
    lengths = [num_ranks] * 2 + [num_places] * 2 + [num_ranks] * 4 + [num_local]
    names = Sizes.__dataclass_fields__
    return [
        Sizes(**{name: [next(numbers) for _ in range(length)] for name, length in zip(names, lengths, strict=True)})
        for _ in parts
    ]


def references_of(departures: Sequence[Departure], sizes: Sequence[Sizes]) -> Tensor:
    """int32; for each rank and each chunk which rows it passes on, then which rows serve its assignments."""
    num_references = sum(sum(size.references_sent) for size in sizes)
    references_N = departures[0].served_S.new_empty(num_references)
    others = _others_before([departure.message_WC for departure in departures], departures[0].starts.num_places)
    for departure, size, others_W1 in zip(departures, sizes, others, strict=True):
        num_assigned = sum(size.assigned_sent)
        departure.kernels.pack_references(
            references_N,
            departure.passed_on_S[: sum(size.references_sent) - num_assigned],
            departure.served_S[:num_assigned],
            departure.starts,
            _begins(departure.starts, others_W1),
        )
    return references_N


def references_by_chunk(references: Tensor, arrivals: Sequence[Arrivals], sizes: Sequence[Sizes]) -> list[References]:
    """The same, as the peers sent them, of each chunk."""
    others = _others_before([arrival.message_WC for arrival in arrivals], arrivals[0].num_places)
    return [References(references_N=references, others_W1=others_W1) for others_W1 in others]


def _others_before(messages: Sequence[Tensor], num_places: int) -> Sequence[Tensor | int]:
    """Of each chunk, int32 ``[W, 1]``: the references of other chunks that lie before its own, by rank."""
    if len(messages) == 1:
        return [0]
    own = [x[:, 1 : 1 + num_places].sum(dim=1) + x[:, 1 + 2 * num_places :].sum(dim=1) for x in messages]
    counts_WX = torch.stack(own, dim=1)
    together_WX = counts_WX.view(-1).cumsum(0).view_as(counts_WX) - counts_WX
    alone_WX = counts_WX.cumsum(0) - counts_WX
    return (together_WX - alone_WX).to(torch.int32).split(1, dim=1)


def _begins(starts: MessageStarts, others_W1: Tensor | int) -> Tensor:
    return starts.references_W2 if isinstance(others_W1, int) else starts.references_W2 + others_W1


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def arrive(
    departure: Departure, arrivals: Arrivals, references: References, sizes: Sizes, *, where: Where, top_k: int
) -> DispatchPlan:
    """The plan of a chunk, from what the peers sent: their counts and their references."""
    kernels, num_first = departure.kernels, sum(sizes.first_received)
    starts = kernels.message_starts(arrivals.message_WC, num_places=where.num_places)
    inbox = Inbox(
        message_WC=arrivals.message_WC,
        starts=starts,
        references_N=references.references_N,
        begins_W2=_begins(starts, references.others_W1),
    )
    weight_ids_M, row_ids_M, assignments_RK = kernels.take_assignments(
        inbox,
        width=where.serving_width(top_k, len(sizes.tokens_e)),
        num_rows=num_first + sum(sizes.second_received),
        num_assigned=sum(sizes.assigned_received),
    )
    second = None
    if where.num_places:
        slot_ids_N, places_RK = kernels.take_copies(
            inbox, width=where.passing_width(top_k), num_first=num_first, num_copies=sum(sizes.second_sent)
        )
        second = Hop(
            slot_ids_N=slot_ids_N,
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
        counts_e=starts.totals_C[1 + 2 * where.num_places :],
        tokens_per_local_expert=sizes.tokens_e,
        first=first,
        second=second,
        weight_splits_sent=sizes.assigned_sent,
        weight_splits_received=sizes.assigned_received,
        weight_ids_M=weight_ids_M,
    )
