"""Which slots of a token share rows, and what the ranks on their way are told of these: references.

Integers only, nothing atomic, nothing read back by the host; ``reference_route`` has the twins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Cost, Launch, launch
from .reference_route import RankMap, Routes, SharedRows
from .reference_route_messages import MessageStarts
from .route_tiles import check_slots, load_choice, load_slots, slot_numbers, slot_tile, tile_config


@triton.jit
def _share_rows_kernel(
    ranks,
    hops,
    node_of_rank,
    place_of_rank,
    first_ids,
    second_ids,
    leaders,
    last_leaders,
    nths,
    num_tokens,
    top_k,
    num_ranks,
    num_places,
    own_node,
    PER_GPU: tl.constexpr,
    PER_NODE: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """A program compares its tokens' slots with those before them, and writes what :class:`SharedRows` has of each.

    Example: nodes of two ranks, own node 0, both levels, a token's ranks [3, 1, 2], hops [3, 1, 3]: first ids
    [3, 1, -1], second ids [-1, -1, 6], leaders [0, 1, 0], last leaders [0, 1, 2], nths 0.
    """
    choice, token, inside = slot_tile(num_tokens, top_k, CHOICES, BLOCK_T)
    rank = load_slots(ranks, choice, token, inside, num_tokens, num_ranks)
    hop = load_slots(hops, choice, token, inside, num_tokens, num_ranks)
    may_share = rank < num_ranks
    if PER_NODE and not PER_GPU:
        may_share = may_share & (tl.load(node_of_rank + rank, mask=inside, other=0) != own_node)
    if not PER_NODE and not PER_GPU:
        may_share = may_share & (rank < 0)
    is_second = rank != hop
    leader = tl.zeros((CHOICES, BLOCK_T), tl.int32) + choice
    last_leader = tl.zeros((CHOICES, BLOCK_T), tl.int32) + choice
    nth = tl.zeros((CHOICES, BLOCK_T), tl.int32)
    for other in range(top_k):
        other_rank = load_choice(ranks, other, token, num_tokens, num_ranks)
        other_hop = load_choice(hops, other, token, num_tokens, num_ranks)
        shares = may_share & (other_hop == hop) & (other < choice)
        leader = tl.where(shares, tl.minimum(leader, other), leader)
        # With a row for each GPU those of both hops; otherwise a row of the second is one slot's alone.
        shares_last = shares & ((other_rank == rank) if PER_GPU else (other_rank == other_hop) & (rank == hop))
        last_leader = tl.where(shares_last, tl.minimum(last_leader, other), last_leader)
        nth += tl.cast(shares_last, tl.int32)
    place = tl.cast(tl.load(place_of_rank + rank, mask=inside, other=0), tl.int32)
    slots = slot_numbers(choice, token, top_k)
    tl.store(first_ids + slots, tl.where((rank < num_ranks) & (leader == choice), hop, -1), mask=inside)
    leads_second = is_second & (last_leader == choice)
    tl.store(second_ids + slots, tl.where(leads_second, hop * num_places + place, -1), mask=inside)
    places = tl.cast(choice, tl.int64) * num_tokens + token
    tl.store(leaders + places, leader, mask=inside)
    tl.store(last_leaders + places, tl.where(is_second, last_leader, leader), mask=inside)
    tl.store(nths + places, nth, mask=inside)


def share_rows(rank_KT: Tensor, hop_KT: Tensor, ranks: RankMap) -> SharedRows:
    """Which slots of each token share rows of the first and of the second hop. See the twin."""
    rank_KT, hop_KT = check_slots(ranks, rank_KT=rank_KT, hop_KT=hop_KT)
    (top_k, num_tokens), config = rank_KT.shape, tile_config("share_rows", rank_KT)
    shared = SharedRows(
        first_ids_TK=rank_KT.new_empty((num_tokens, top_k)),
        second_ids_TK=rank_KT.new_empty((num_tokens, top_k)),
        leader_KT=torch.empty_like(rank_KT),
        last_leader_KT=torch.empty_like(rank_KT),
        nth_KT=torch.empty_like(rank_KT),
    )
    looks_up_nodes = ranks.per_node and not ranks.per_gpu
    launch(
        Launch(
            op="share_rows",
            kernel=_share_rows_kernel,
            grid=(triton.cdiv(num_tokens, config.blocks["BLOCK_T"]),),
            arguments=dict(
                ranks=rank_KT,
                hops=hop_KT,
                node_of_rank=ranks.node_of_rank_W1,
                place_of_rank=ranks.place_of_rank_W1,
                first_ids=shared.first_ids_TK,
                second_ids=shared.second_ids_TK,
                leaders=shared.leader_KT,
                last_leaders=shared.last_leader_KT,
                nths=shared.nth_KT,
                num_tokens=num_tokens,
                top_k=top_k,
                num_ranks=ranks.num_ranks,
                num_places=ranks.num_places,
                own_node=ranks.own_node,
                PER_GPU=ranks.per_gpu,
                PER_NODE=ranks.per_node,
                CHOICES=triton.next_power_of_2(top_k),
            ),
            config=config,
            # Ranks and hops twice each, and what is looked up of ranks, 8 bytes each.
            cost=Cost(
                bytes_read=rank_KT.numel() * (4 * 4 + 8 * (1 + looks_up_nodes)), bytes_written=rank_KT.numel() * 5 * 4
            ),
        )
    )
    return shared


@triton.jit
def _row_references_kernel(
    ranks,
    hops,
    leaders,
    last_leaders,
    nths,
    second_ids,
    slot_places,
    first_places,
    second_places,
    place_of_rank,
    by_rank,
    by_column,
    passed_on,
    served,
    num_tokens,
    top_k,
    num_ranks,
    num_places,
    num_columns,
    serving_width,
    passing_width,
    CHOICES: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """A program writes the references of its tokens' slots: which row serves each, and which row it is copied from.

    Without a second hop ``passed_on`` is None, and nothing is copied.

    Example: the second row to its rank, of two, serving width 4: the slot that it serves first gets 1 * 4 + 0.
    """
    choice, token, inside = slot_tile(num_tokens, top_k, CHOICES, BLOCK_T)
    rank = tl.minimum(load_slots(ranks, choice, token, inside, num_tokens, 0), num_ranks - 1)
    hop = tl.minimum(load_slots(hops, choice, token, inside, num_tokens, 0), num_ranks - 1)
    leader = load_slots(leaders, choice, token, inside, num_tokens, 0)
    hop_row = tl.cast(hop, tl.int64) * num_columns
    row = tl.load(first_places + slot_numbers(leader, token, top_k), mask=inside, other=0)
    row -= tl.load(by_column + hop_row, mask=inside, other=0)
    slots = slot_numbers(choice, token, top_k)
    if passed_on is not None:
        copied = row * passing_width + 1
        for other in range(top_k):
            second_id = tl.load(second_ids + slot_numbers(other, token, top_k), mask=token < num_tokens, other=-1)
            is_copy = (second_id >= 0) & (second_id // num_places == hop) & (other < choice)
            copied += tl.cast(is_copy, tl.int32)
        tl.store(passed_on + tl.load(second_places + slots, mask=inside, other=0), copied, mask=inside)

        last_leader = load_slots(last_leaders, choice, token, inside, num_tokens, 0)
        second = tl.load(second_places + slot_numbers(last_leader, token, top_k), mask=inside, other=0)
        place = tl.cast(tl.load(place_of_rank + rank, mask=inside, other=0), tl.int32)
        second -= tl.load(by_rank + hop_row + 1 + place, mask=inside, other=0)
        place = tl.cast(tl.load(place_of_rank + hop, mask=inside, other=0), tl.int32)
        rank_row = tl.cast(rank, tl.int64) * num_columns
        second += tl.load(by_rank + rank_row + 1 + num_places + place, mask=inside, other=0)
        row = tl.where(rank == hop, row, second)
    nth = load_slots(nths, choice, token, inside, num_tokens, 0)
    place = tl.load(slot_places + slots, mask=inside, other=0)
    tl.store(served + place, row * serving_width + nth, mask=inside)


def row_references(routes: Routes, starts: MessageStarts, ranks: RankMap, *, num_local: int) -> tuple[Tensor, Tensor]:
    """Which rows are passed on, and which serve the assignments: two int32 ``[T*K]``. See the twin."""
    shared, passes_on = routes.shared, ranks.num_places > 0
    given = dict(
        rank_KT=routes.rank_KT,
        hop_KT=routes.hop_KT,
        leader_KT=shared.leader_KT,
        last_leader_KT=shared.last_leader_KT,
        nth_KT=shared.nth_KT,
    )
    rank_KT, hop_KT, leader_KT, last_leader_KT, nth_KT = check_slots(ranks, **given)
    (top_k, num_tokens), config = rank_KT.shape, tile_config("row_references", rank_KT)
    served_S = rank_KT.new_empty((rank_KT.numel(),))
    passed_on_S = torch.empty_like(served_S) if passes_on else routes.second_places_S
    # Of each slot its rank, hop, leader, place in its row and among the assignments, and its first row's place and
    # start. With a second hop also all slots' rows of that, three places, and of two ranks place and start.
    slot_bytes = 7 * 4 + passes_on * (4 * 4 + 2 * (8 + 4))
    launch(
        Launch(
            op="row_references",
            kernel=_row_references_kernel,
            grid=(triton.cdiv(num_tokens, config.blocks["BLOCK_T"]),),
            arguments=dict(
                ranks=rank_KT,
                hops=hop_KT,
                leaders=leader_KT,
                last_leaders=last_leader_KT,
                nths=nth_KT,
                second_ids=shared.second_ids_TK.contiguous(),
                slot_places=routes.places_S.contiguous(),
                first_places=routes.first_places_S.contiguous(),
                second_places=routes.second_places_S.contiguous(),
                place_of_rank=ranks.place_of_rank_W1,
                by_rank=starts.by_rank_WC,
                by_column=starts.by_column_WC,
                passed_on=passed_on_S if passes_on else None,
                served=served_S,
                num_tokens=num_tokens,
                top_k=top_k,
                num_ranks=ranks.num_ranks,
                num_places=ranks.num_places,
                num_columns=starts.by_rank_WC.shape[1],
                serving_width=ranks.serving_width(top_k, num_local),
                passing_width=ranks.passing_width(top_k),
                CHOICES=triton.next_power_of_2(top_k),
            ),
            config=config,
            cost=Cost(bytes_read=rank_KT.numel() * slot_bytes, bytes_written=rank_KT.numel() * 4 * (1 + passes_on)),
        )
    )
    return passed_on_S, served_S
