"""The rank of each slot, and which GPU of a remote node receives a token for all its experts there: its pilot.

Pilots are drawn in five rounds of a launch each, with a launch between two that lets the GPUs' weights follow their
loads (``reference_route.choose_pilots`` says how). In here ranks of remote nodes go by *member*, ``node * P + place``,
so that a node's ranks lie side by side. Integers only, nothing atomic, nothing read back by the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Cost, Launch, arch_of, launch
from .reference_route import BITS, FIRST_WEIGHT, GOLDEN, MAX_WEIGHT, POWERS, RankMap
from .route_tiles import check_slots, load_choice, load_slots, slot_tile, tile_config
from .tuning import config_for

_BITS, _TURN, _GOLDEN = tl.constexpr(BITS), tl.constexpr(2**BITS), tl.constexpr(GOLDEN)
_FIRST_WEIGHT, _MAX_WEIGHT = tl.constexpr(FIRST_WEIGHT), tl.constexpr(MAX_WEIGHT)


@triton.jit
def _slot_ranks_kernel(
    slot_ids,
    tokens_per_expert,
    ranks,
    num_slots,
    num_tokens,
    top_k,
    num_experts,
    num_local,
    num_ranks,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program (i, w) writes w for slots of rank w's experts, every so many blocks of them; w = W is for those of none.

    Example: slots [3, 0, 1, 2], top_k 2, one expert a rank, 1 and 2 tokens: program 1 finds slots 0 and 1 and writes 1
    for both choices of token 0.
    """
    rank = tl.program_id(1)
    before = tl.zeros((BLOCK_E,), tl.int32)
    own = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, num_experts, BLOCK_E):
        expert = first + tl.arange(0, BLOCK_E)
        found = tl.cast(tl.load(tokens_per_expert + expert, mask=expert < num_experts, other=0), tl.int32)
        before += tl.where(expert // num_local < rank, found, 0)
        own += tl.where(expert // num_local == rank, found, 0)
    start = tl.sum(before, axis=0)
    count = tl.where(rank < num_ranks, tl.sum(own, axis=0), num_slots - start)
    local = tl.arange(0, BLOCK_S)
    for first in range(tl.program_id(0) * BLOCK_S, count, tl.num_programs(0) * BLOCK_S):
        inside = first + local < count
        slot = tl.load(slot_ids + start + first + local, mask=inside, other=0)
        places = tl.cast(slot % top_k, tl.int64) * num_tokens + slot // top_k
        tl.store(ranks + places, tl.zeros((BLOCK_S,), tl.int32) + rank, mask=inside)


def ranks_of_slots(slot_ids_S: Tensor, tokens_per_expert_E: Tensor, *, num_ranks: int, top_k: int) -> Tensor:
    """int32 ``[K, T]``: the rank that holds the expert of each slot, W where it has none. See the twin."""
    num_experts, num_slots = tokens_per_expert_E.numel(), slot_ids_S.numel()
    if num_ranks < 1 or num_experts % num_ranks or top_k < 1 or num_slots % top_k:
        raise ValueError(
            f"the number of experts ({num_experts}) must be a multiple of num_ranks ({num_ranks}), and that of slots "
            f"({num_slots}) one of top_k ({top_k})"
        )
    slot_ids_S, tokens_per_expert_E = slot_ids_S.contiguous(), tokens_per_expert_E.contiguous()
    rank_KT = slot_ids_S.new_empty((top_k, num_slots // top_k), dtype=torch.int32)
    config = config_for("slot_ranks", arch=arch_of(slot_ids_S), dtype=torch.int32, width=num_experts, rows=num_slots)
    # One block for each program of a rank that has its share.
    splits = triton.cdiv(num_slots, num_ranks * config.blocks["BLOCK_S"])
    programs = (num_ranks + 1) * splits
    launch(
        Launch(
            op="slot_ranks",
            kernel=_slot_ranks_kernel,
            grid=(splits, num_ranks + 1),
            arguments=dict(
                slot_ids=slot_ids_S,
                tokens_per_expert=tokens_per_expert_E,
                ranks=rank_KT,
                num_slots=num_slots,
                num_tokens=num_slots // top_k,
                top_k=top_k,
                num_experts=num_experts,
                num_local=num_experts // num_ranks,
                num_ranks=num_ranks,
            ),
            config=config,
            cost=Cost(
                bytes_read=programs * num_experts * tokens_per_expert_E.element_size()
                + num_slots * slot_ids_S.element_size(),
                bytes_written=num_slots * 4,
            ),
        )
    )
    return rank_KT


@triton.jit
def _pilot_candidates_kernel(
    ranks,
    node_of_rank,
    place_of_rank,
    candidates,
    num_tokens,
    top_k,
    num_ranks,
    num_places,
    own_node,
    CHOICES: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """A program writes the members that may be pilots of its tokens: each remote rank once, where it comes first.

    Example: nodes of two ranks, own node 0, a token's ranks [2, 3, 2, 1]: members [2, 3, -1, -1].
    """
    choice, token, inside = slot_tile(num_tokens, top_k, CHOICES, BLOCK_T)
    rank = load_slots(ranks, choice, token, inside, num_tokens, num_ranks)
    repeats = tl.zeros((CHOICES, BLOCK_T), tl.int32)
    for other in range(top_k):
        same = load_choice(ranks, other, token, num_tokens, num_ranks) == rank
        repeats += tl.cast(same & (other < choice), tl.int32)
    node = tl.cast(tl.load(node_of_rank + rank, mask=inside, other=0), tl.int32)
    place = tl.cast(tl.load(place_of_rank + rank, mask=inside, other=0), tl.int32)
    is_candidate = (rank < num_ranks) & (node != own_node) & (repeats == 0)
    places = tl.cast(choice, tl.int64) * num_tokens + token
    tl.store(candidates + places, tl.where(is_candidate, node * num_places + place, -1), mask=inside)


@triton.jit
def _load_mates(candidates, weights, choice, token, num_tokens, node, num_places):
    """``(member, weight, is_mate)`` of one choice of the tokens: is_mate where it is a candidate on ``node``.

    Example: members [[4]], weights [.., 9], nodes of two: (4, 9, node == 2).
    """
    member = load_choice(candidates, choice, token, num_tokens, -1)
    if weights is None:
        weight = tl.where(member < 0, 0, _FIRST_WEIGHT)
    else:
        weight = tl.load(weights + tl.maximum(member, 0), mask=token < num_tokens, other=0)
    return member, weight, (member >= 0) & (member // num_places == node)


@triton.jit
def _draw_pilots_kernel(
    ranks,
    candidates,
    weights,
    node_of_rank,
    neighbours,
    table,
    hops,
    num_tokens,
    top_k,
    num_ranks,
    num_places,
    CHOICES: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """A program draws its tokens' pilots by weight. Row b of the table gets how many each member has of program b's
    tokens; in the last round, which has no table, hops get each slot's pilot, or its own rank where it has none.

    Example: token 1 with candidates of weights 1 and 3 on one node: its dial is 0.618 of a turn, the point
    0.618 * 4 = 2, past the first one's weight: the second is its pilot.
    """
    choice, token, inside = slot_tile(num_tokens, top_k, CHOICES, BLOCK_T)
    rank = load_slots(ranks, choice, token, inside, num_tokens, num_ranks)
    node = tl.cast(tl.load(node_of_rank + rank, mask=inside, other=-1), tl.int32)
    total = tl.zeros((CHOICES, BLOCK_T), tl.int32)
    for other in range(top_k):
        _, weight, is_mate = _load_mates(candidates, weights, other, token, num_tokens, node, num_places)
        total += tl.where(is_mate, weight, 0)
    dial = tl.cast(token % _TURN, tl.int64) * _GOLDEN % _TURN
    point = tl.cast((dial * total) >> _BITS, tl.int32)
    before = tl.zeros((CHOICES, BLOCK_T), tl.int32)
    pilot = tl.zeros((CHOICES, BLOCK_T), tl.int32) - 1
    for other in range(top_k):
        member, weight, is_mate = _load_mates(candidates, weights, other, token, num_tokens, node, num_places)
        pilot = tl.where(is_mate & (before <= point) & (point < before + weight), member, pilot)
        before += tl.where(is_mate, weight, 0)
    if table is not None:
        chosen = load_slots(candidates, choice, token, inside, num_tokens, -1)
        is_chosen = tl.reshape((chosen >= 0) & (chosen == pilot), (CHOICES * BLOCK_T,))
        loads = tl.histogram(tl.reshape(tl.maximum(chosen, 0), (CHOICES * BLOCK_T,)), BINS, mask=is_chosen)
        bins = tl.arange(0, BINS)
        tl.store(table + tl.cast(tl.program_id(0), tl.int64) * num_ranks + bins, loads, mask=bins < num_ranks)
    else:
        row = tl.cast(tl.minimum(rank, num_ranks - 1), tl.int64) * num_places
        found = tl.load(neighbours + row + tl.maximum(pilot, 0) % num_places, mask=inside, other=0)
        places = tl.cast(choice, tl.int64) * num_tokens + token
        tl.store(hops + places, tl.where(pilot < 0, rank, tl.cast(found, tl.int32)), mask=inside)


@triton.jit
def _follow_loads_kernel(
    table,
    weights,
    followed,
    num_blocks,
    num_ranks,
    num_places,
    POWER: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Program g sums the loads of node g's members over the blocks, and writes their weights times the node's mean
    load over their own, to the given power.

    Example: weights 8 and 8, loads 5 and 1, mean 3, power 1: 8 * 4 // 6 = 5 and 8 * 4 // 2 = 16.
    """
    place = tl.arange(0, PLACES)
    is_place = place < num_places
    member = tl.cast(tl.program_id(0), tl.int64) * num_places + place
    load = tl.zeros((PLACES,), tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        block = tl.cast(first + tl.arange(0, BLOCK_B), tl.int64)
        mask = (block < num_blocks)[:, None] & is_place[None, :]
        load += tl.sum(tl.load(table + block[:, None] * num_ranks + member[None, :], mask=mask, other=0), axis=0)
    weight = tl.full((PLACES,), _FIRST_WEIGHT, tl.int64)
    if weights is not None:
        weight = tl.cast(tl.load(weights + member, mask=is_place, other=1), tl.int64)
    mean = tl.cast(tl.sum(load, axis=0) // num_places, tl.int64)
    share = tl.full((PLACES,), 1, tl.int64)
    for _ in tl.static_range(POWER):
        weight *= mean + 1
        share *= tl.cast(load, tl.int64) + 1
    weight = tl.minimum(tl.maximum(weight // share, 1), _MAX_WEIGHT)
    tl.store(followed + member, tl.cast(weight, tl.int32), mask=is_place)


def choose_pilots(rank_KT: Tensor, ranks: RankMap) -> Tensor:
    """int32 ``[K, T]``: the rank each slot's row goes to first, its pilot where its expert is on another node.

    See the twin. Raises ValueError unless every node has ``num_places`` ranks.
    """
    (rank_KT,) = check_slots(ranks, rank_KT=rank_KT)
    if ranks.num_places < 1 or ranks.num_ranks % ranks.num_places:
        raise ValueError(f"num_ranks ({ranks.num_ranks}) must be a multiple of num_places ({ranks.num_places})")
    candidates_KT = _candidates(rank_KT, ranks)
    weights = None
    for power in POWERS:
        table = _draw(rank_KT, candidates_KT, weights, ranks, last=False)
        weights = _follow(table, weights, ranks, power=power)
    return _draw(rank_KT, candidates_KT, weights, ranks, last=True)


def _candidates(rank_KT: Tensor, ranks: RankMap) -> Tensor:
    candidates_KT, config = torch.empty_like(rank_KT), tile_config("pilots", rank_KT)
    top_k, num_tokens = rank_KT.shape
    launch(
        Launch(
            op="pilots",
            kernel=_pilot_candidates_kernel,
            grid=(triton.cdiv(num_tokens, config.blocks["BLOCK_T"]),),
            arguments=dict(
                ranks=rank_KT,
                node_of_rank=ranks.node_of_rank_W1,
                place_of_rank=ranks.place_of_rank_W1,
                candidates=candidates_KT,
                num_tokens=num_tokens,
                top_k=top_k,
                num_ranks=ranks.num_ranks,
                num_places=ranks.num_places,
                own_node=ranks.own_node,
                CHOICES=triton.next_power_of_2(top_k),
            ),
            config=config,
            cost=Cost(bytes_read=rank_KT.numel() * (2 * 4 + 2 * 8), bytes_written=rank_KT.numel() * 4),
        )
    )
    return candidates_KT


def _draw(rank_KT: Tensor, candidates_KT: Tensor, weights: Tensor | None, ranks: RankMap, *, last: bool) -> Tensor:
    """The loads by block of tokens, int32 ``[blocks, W]``, or in the last round the hops, int32 ``[K, T]``."""
    config, (top_k, num_tokens) = tile_config("pilots", rank_KT), rank_KT.shape
    num_blocks = triton.cdiv(num_tokens, config.blocks["BLOCK_T"])
    out = torch.empty_like(rank_KT) if last else rank_KT.new_empty((num_blocks, ranks.num_ranks))
    # Of each slot its rank and node and, twice, its member and weight; then its member, or the rank of its pilot.
    slot_bytes = 4 + 8 + 2 * (4 if weights is None else 8) + (8 if last else 4)
    launch(
        Launch(
            op="pilots",
            kernel=_draw_pilots_kernel,
            grid=(num_blocks,),
            arguments=dict(
                ranks=rank_KT,
                candidates=candidates_KT,
                weights=weights,
                node_of_rank=ranks.node_of_rank_W1,
                neighbours=ranks.neighbours_WP,
                table=None if last else out,
                hops=out if last else None,
                num_tokens=num_tokens,
                top_k=top_k,
                num_ranks=ranks.num_ranks,
                num_places=ranks.num_places,
                CHOICES=triton.next_power_of_2(top_k),
                BINS=triton.next_power_of_2(ranks.num_ranks),
            ),
            config=config,
            cost=Cost(bytes_read=rank_KT.numel() * slot_bytes, bytes_written=out.numel() * 4),
        )
    )
    return out


def _follow(table: Tensor, weights: Tensor | None, ranks: RankMap, *, power: int) -> Tensor:
    """int32 ``[W]``, by member: the weights of the next round."""
    followed = table.new_empty((ranks.num_ranks,))
    num_blocks, width = table.shape[0], triton.next_power_of_2(ranks.num_places)
    launch(
        Launch(
            op="pilot_weights",
            kernel=_follow_loads_kernel,
            grid=(ranks.num_ranks // ranks.num_places,),
            arguments=dict(
                table=table,
                weights=weights,
                followed=followed,
                num_blocks=num_blocks,
                num_ranks=ranks.num_ranks,
                num_places=ranks.num_places,
                POWER=power,
                PLACES=width,
            ),
            config=config_for("pilot_weights", arch=arch_of(table), dtype=torch.int32, width=width, rows=num_blocks),
            cost=Cost(
                bytes_read=(table.numel() + (0 if weights is None else ranks.num_ranks)) * 4,
                bytes_written=ranks.num_ranks * 4,
            ),
        )
    )
    return followed
