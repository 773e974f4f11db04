"""Selections that the gating kernel does not make itself: of noisy logits, and of those that fit an expert's capacity.

The names, signatures and results are those of the twins. Sorting and small tensor code are torch's own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gating_tiles import BARRED, check_logits, gate_config, load_logits, rank_of, take_best
from .launch import Cost, Launch, launch
from .reference_gating import check_top_k, experts_of_groups, group_scores


@triton.jit
def _top_k_ids_kernel(
    scores,
    ids,
    num_tokens,
    num_experts,
    top_k,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILES: tl.constexpr,
):
    """A program writes the ids of the top_k largest scores of BLOCK_T * TILES tokens.

    Example: scores [[1, 3, 3, 0]], top_k 2: ids [[1, 2]].
    """
    expert, place = tl.arange(0, WIDTH), tl.arange(0, CHOICES)
    valid = expert < num_experts
    first = tl.program_id(0) * (BLOCK_T * TILES)
    for start in range(first, tl.minimum(first + BLOCK_T * TILES, num_tokens), BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        inside = token < num_tokens
        x = load_logits(scores, token, inside, expert, valid, num_experts)
        ranks = tl.where(valid[None, :], rank_of(x), BARRED)
        picked = tl.zeros((BLOCK_T, CHOICES), tl.int32)
        for choice in range(top_k):
            found, ranks = take_best(ranks, WIDTH)
            picked = tl.where(place[None, :] == choice, found[:, None], picked)
        slots = (tl.cast(token, tl.int64) * top_k)[:, None] + place[None, :]
        tl.store(ids + slots, tl.cast(picked, tl.int64), mask=inside[:, None] & (place < top_k)[None, :])


def top_k_ids(scores_TE: Tensor, top_k: int) -> Tensor:
    """Ids of the K largest scores of each row, largest first; of equal scores the lowest id wins. int64 ``[T, K]``."""
    scores_TE = check_logits(scores_TE)
    num_tokens, num_experts = scores_TE.shape
    check_top_k(top_k, num_experts)
    ids_TK = scores_TE.new_empty((num_tokens, top_k), dtype=torch.int64)
    width = triton.next_power_of_2(num_experts)
    config = gate_config("top_k_ids", scores_TE, columns=width)
    launch(
        Launch(
            op="top_k_ids",
            kernel=_top_k_ids_kernel,
            grid=(triton.cdiv(num_tokens, config.blocks["BLOCK_T"] * config.blocks["TILES"]),),
            arguments=dict(
                scores=scores_TE,
                ids=ids_TK,
                num_tokens=num_tokens,
                num_experts=num_experts,
                top_k=top_k,
                WIDTH=width,
                CHOICES=triton.next_power_of_2(top_k),
            ),
            config=config,
            cost=Cost(bytes_read=4 * scores_TE.numel(), bytes_written=8 * ids_TK.numel()),
        )
    )
    return ids_TK


def experts_of_best_groups(scores_TE: Tensor, *, num_groups: int, num_limited: int, num_counted: int) -> Tensor:
    """bool ``[T, E]``: True for the experts of each token's ``num_limited`` best groups. See the twin."""
    group_TG = group_scores(scores_TE, num_groups=num_groups, num_counted=num_counted)
    return experts_of_groups(top_k_ids(group_TG, num_limited), num_groups=num_groups, num_experts=scores_TE.shape[1])


def ranks_within_expert(ids: Tensor, priorities: Tensor, num_experts: int) -> Tensor:
    """int64, shaped like ``ids``: the place of each assignment among those of its expert, highest priority first.

    Two stable sorts; an expert's first place is found in the sorted ids by bisection, so nothing is counted.
    """
    flat = ids.reshape(-1)
    key = torch.where(flat < 0, num_experts, flat)
    by_priority = priorities.reshape(-1).argsort(descending=True, stable=True)
    sorted_keys, by_expert = key[by_priority].sort(stable=True)
    places = torch.arange(flat.numel(), device=flat.device)
    places -= torch.searchsorted(sorted_keys, sorted_keys)
    return torch.empty_like(places).scatter_(0, by_priority[by_expert], places).view(ids.shape)
