"""PyTorch twins of the kernels around the two exchanges that make a hierarchical plan: counts, then references.

A *message* is what a rank tells another of its tokens: one row of ``message_WC``, int64, of 1 + P + P + e counts,

    first      rows of the first hop to that rank
    passed on  rows that it passes on, to each place of its node
    second     rows that each place of its node passes on to it
    assigned   assignments of each of its experts

and what has arrived is a matrix of the same columns, a row for each source. Rows and references lie by rank; readers
want them by place or by expert: :class:`MessageStarts` has where each count's items begin in either order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .reference_route import RankMap


@dataclass(frozen=True, kw_only=True)
class MessageStarts:
    """Where the items that a message counts begin: int32, shaped like the message. ``num_places`` is P.

    ``by_rank_WC``     passed on: among those passed on, by rank, then place; assigned: among the assigned, by rank,
                       then expert; first and second: among the rows of this rank alone, the first hop's before all
    ``by_column_WC``   passed on: by place, then rank; assigned: by expert, then rank; first and second: by hop and
                       place, then rank, which is how the rows lie that a rank received
    ``references_W2``  where the references of the rows passed on and those of the assignments begin, by rank
    ``totals_C``       int64; what the columns sum to

    Example: W=2, P=1, e=1, messages [[1, 2, 0, 3], [4, 0, 5, 6]] (passed on 2 and 0, assigned 3 and 6) gives by rank
    [[0, 0, 1, 0], [0, 2, 4, 3]], by column [[0, 0, 5, 0], [1, 2, 5, 3]], references [[0, 2], [5, 5]] and totals
    [5, 2, 5, 9].
    """

    num_places: int
    by_rank_WC: Tensor
    by_column_WC: Tensor
    references_W2: Tensor
    totals_C: Tensor


def route_message(first_W: Tensor, second_L: Tensor, tokens_per_expert_E: Tensor, ranks: RankMap) -> Tensor:
    """The message to each rank, int64 ``[W, 1 + 2P + e]``.

    ``first_W``   rows of the first hop to each rank
    ``second_L``  rows of the second hop from each rank to each place of its node, ``[W * P]``
    """
    second_WP = second_L.view(ranks.num_ranks, ranks.num_places)
    received_WP = second_WP[ranks.neighbours_WP, ranks.place_of_rank_W1[:-1, None]]
    assigned_We = tokens_per_expert_E.view(ranks.num_ranks, -1)
    return torch.cat([first_W[:, None].long(), second_WP, received_WP, assigned_We], dim=1)


def _parts(message_WC: Tensor, num_places: int) -> tuple[Tensor, ...]:
    sizes = [1, num_places, num_places, message_WC.shape[1] - 1 - 2 * num_places]
    return tuple(message_WC.split(sizes, dim=1))


def _before(counts: Tensor) -> Tensor:
    """Sums of all entries before each, in the order of rows."""
    flat = counts.reshape(-1)
    return (flat.cumsum(0) - flat).view(counts.shape)


def message_starts(message_WC: Tensor, *, num_places: int) -> MessageStarts:
    """Where what the messages count begins: see :class:`MessageStarts`."""
    first_W1, passed_on_WP, second_WP, assigned_We = _parts(message_WC, num_places)
    of_references_W2 = torch.stack([passed_on_WP.sum(dim=1), assigned_We.sum(dim=1)], dim=1)
    if num_places:
        rows_WQ = torch.cat([first_W1, second_WP], dim=1)
        own_WQ, lying_WQ = rows_WQ.cumsum(1) - rows_WQ, _before(rows_WQ.t()).t()
        by_rank = [own_WQ[:, :1], _before(passed_on_WP), own_WQ[:, 1:]]
        by_column = [lying_WQ[:, :1], _before(passed_on_WP.t()).t(), lying_WQ[:, 1:]]
    else:
        by_rank, by_column = [torch.zeros_like(first_W1)], [_before(first_W1)]
    return MessageStarts(
        num_places=num_places,
        by_rank_WC=torch.cat([*by_rank, _before(assigned_We)], dim=1).to(torch.int32),
        by_column_WC=torch.cat([*by_column, _before(assigned_We.t()).t()], dim=1).to(torch.int32),
        references_W2=_before(of_references_W2).to(torch.int32),
        totals_C=message_WC.sum(dim=0),
    )


def message_sizes(sent_WC: Tensor, received_WC: Tensor, *, num_places: int) -> Tensor:
    """What the host must know, int64, in this order and without gaps:

    rows of the first hop sent to, then received from each rank; of the second sent to, then received from each place;
    assignments sent to, then received from each rank; references sent to, then received from each rank; assignments
    of each local expert.
    """
    first_sent_W1, passed_sent_WP, _, assigned_sent_We = _parts(sent_WC, num_places)
    first_W1, passed_on_WP, second_WP, assigned_We = _parts(received_WC, num_places)
    sent_W, received_W = assigned_sent_We.sum(dim=1), assigned_We.sum(dim=1)
    parts = [
        first_sent_W1[:, 0],
        first_W1[:, 0],
        passed_on_WP.sum(dim=0),
        second_WP.sum(dim=0),
        sent_W,
        received_W,
        passed_sent_WP.sum(dim=1) + sent_W,
        passed_on_WP.sum(dim=1) + received_W,
        assigned_We.sum(dim=0),
    ]
    return torch.cat(parts)


def pack_references(
    references_N: Tensor, passed_on_N: Tensor, served_N: Tensor, starts: MessageStarts, begins_W2: Tensor
) -> None:
    """Writes to ``references`` those of each rank's rows passed on and of its assignments, from the lists of all ranks.

    ``passed_on_N``, ``served_N``  as :func:`~xmoe.kernels.reference_route.row_references` gives them, by rank
    ``begins_W2``                  where each rank's references of either kind go: with one chunk of tokens
                                   ``starts.references_W2``
    """
    for part, values_N, column in ((0, passed_on_N, 1), (1, served_N, 1 + 2 * starts.num_places)):
        if part or starts.num_places:
            size = values_N.numel()
            from_W = starts.by_rank_WC[:, column]
            counts_W = torch.cat([from_W[1:], from_W.new_full((1,), size)]) - from_W
            places_N = torch.arange(size, device=values_N.device)
            places_N += torch.repeat_interleave(begins_W2[:, part] - from_W, counts_W, output_size=size)
            references_N.scatter_(0, places_N, values_N)


@dataclass(frozen=True, kw_only=True)
class Inbox:
    """What a rank received, by source: ``message_WC``, where its items begin, and the references that followed.

    ``references_N``  int32; ``begins_W2`` where those of each source's rows passed on and of its assignments begin:
                      with one chunk of tokens ``starts.references_W2``
    """

    message_WC: Tensor
    starts: MessageStarts
    references_N: Tensor
    begins_W2: Tensor


def take_assignments(inbox: Inbox, *, width: int, num_rows: int, num_assigned: int) -> tuple[Tensor, Tensor, Tensor]:
    """The assignments of a rank's experts, by expert, then source: int32 ``[M]``, ``[M]`` and ``[R, width]``.

    ``weight_ids_M``    place of each one's weight among those received, which lie by source, then expert
    ``row_ids_M``       the row that serves it
    ``assignments_RK``  at ``[row, n]`` the n-th assignment that the row serves, M where there is none

    References are ``row * width + n``, the rows of one source numbered as they are in ``starts.by_rank_WC``.

    Example: W=2, P=0, e=1, messages [[1, 2], [1, 1]], references [0, 1, 0], width 2, 2 rows, M=3 gives weights
    [0, 1, 2], rows [0, 0, 1] and assignments [[0, 1], [2, 3]].
    """
    starts, first_assigned = inbox.starts, 1 + 2 * inbox.starts.num_places
    rows_WQ, own_WQ, lying_WQ = (
        torch.cat([x[:, :1], x[:, 1 + starts.num_places : first_assigned]], dim=1)
        for x in (inbox.message_WC, starts.by_rank_WC, starts.by_column_WC)
    )
    sums_W = rows_WQ.sum(dim=1)
    start_W = sums_W.cumsum(0) - sums_W
    # From rows by source to rows as they lie.
    row_ids_R = _moved(lying_WQ - own_WQ - start_W[:, None], rows_WQ, num_rows)

    counts_eW = inbox.message_WC[:, first_assigned:].t()
    by_rank_We = starts.by_rank_WC[:, first_assigned:]
    cell_M = torch.repeat_interleave(counts_eW.reshape(-1), output_size=num_assigned)
    shift_eW = (by_rank_We - starts.by_column_WC[:, first_assigned:]).t()
    weight_ids_M = torch.arange(num_assigned, device=cell_M.device) + shift_eW.reshape(-1)[cell_M]
    source_M = cell_M % counts_eW.shape[1]
    begin_W = inbox.begins_W2[:, 1] - by_rank_We[:, 0]
    served_M = inbox.references_N[weight_ids_M + begin_W[source_M]]
    row_M = torch.div(served_M, width, rounding_mode="floor")
    row_ids_M = row_ids_R[row_M + start_W[source_M]]
    places_M = row_ids_M * width + (served_M - row_M * width)
    filled = torch.full((num_rows * width,), num_assigned, dtype=torch.int32, device=cell_M.device)
    filled.scatter_(0, places_M, torch.arange(num_assigned, dtype=torch.int32, device=cell_M.device))
    return weight_ids_M.to(torch.int32), row_ids_M.to(torch.int32), filled.view(num_rows, width)


def _moved(shift_AB: Tensor, counts_AB: Tensor, size: int) -> Tensor:
    """int64 ``[size]``: the number of each item plus the shift of its block, blocks lying by A, then B."""
    places = torch.arange(size, device=counts_AB.device)
    return places + torch.repeat_interleave(shift_AB.reshape(-1), counts_AB.reshape(-1), output_size=size)


def take_copies(inbox: Inbox, *, width: int, num_first: int, num_copies: int) -> tuple[Tensor, Tensor]:
    """The rows that a rank passes on, by place, then source: int32 ``[N]`` and ``[num_first, width]``.

    ``slot_ids_N``  ``row * width + n``: the n-th copy of one of the ``num_first`` rows that the first hop brought
    ``places_RK``   at ``[row, 0]`` the row itself, at ``[row, n]`` where its n-th copy comes back: ``num_first`` plus
                    its number here; ``num_first + N`` where there is none

    Example: W=1, P=1, messages [[2, 1, 0, 0]], references [3], width 2 gives [3] and [[0, 3], [1, 2]].
    """
    starts = inbox.starts
    counts_PW = inbox.message_WC[:, 1 : 1 + starts.num_places].t()
    by_rank_WP, by_column_WP = (x[:, 1 : 1 + starts.num_places] for x in (starts.by_rank_WC, starts.by_column_WC))
    begin_W = inbox.begins_W2[:, 0] - by_rank_WP[:, 0]
    cell_N = torch.repeat_interleave(counts_PW.reshape(-1), output_size=num_copies)
    shift_PW = (by_rank_WP - by_column_WP + begin_W[:, None]).t()
    copies_N = torch.arange(num_copies, dtype=torch.int32, device=cell_N.device)
    copied_N = inbox.references_N[copies_N + shift_PW.reshape(-1)[cell_N]]
    slot_ids_N = copied_N + (starts.by_column_WC[:, 0] * width)[cell_N % counts_PW.shape[1]]
    places = torch.full((num_first * width,), num_first + num_copies, dtype=torch.int32, device=cell_N.device)
    places_RK = places.scatter_(0, slot_ids_N.long(), num_first + copies_N).view(num_first, width)
    places_RK[:, 0] = torch.arange(num_first, dtype=torch.int32, device=cell_N.device)
    return slot_ids_N, places_RK
