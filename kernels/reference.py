"""PyTorch twins of the kernels: the CPU path, and the oracle each Triton kernel is compared with.

Same names, same signatures and same results as the kernels; plain tensor code, no autograd (the operators of
``xmoe.ops`` call forward and backward by name). Shape letters are those of ``xmoe/types.py``.

Accumulation is in at least float32 (``accumulator_dtype``), in an order fixed by the integers, so that two runs
agree bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dtypes import accumulator_dtype
from .reference_activation import Activation, activation_backward, activation_forward
from .reference_experts import ExpertWeights, expert_mlp_backward, expert_mlp_forward
from .reference_plan import count_ids, inverse_permutation, ranks_within_expert, sort_slots, tile_schedule
from .reference_rows import combine_rows, gather_rows, row_dot, segment_sums

__all__ = [
    "Activation",
    "ExpertWeights",
    "accumulator_dtype",
    "activation_backward",
    "activation_forward",
    "combine_rows",
    "count_ids",
    "expert_mlp_backward",
    "expert_mlp_forward",
    "experts_of_best_groups",
    "gather_rows",
    "inverse_permutation",
    "ranks_within_expert",
    "row_dot",
    "segment_sums",
    "sort_slots",
    "tile_schedule",
    "top_k_ids",
]


def top_k_ids(scores_TE: Tensor, top_k: int) -> Tensor:
    """Ids of the K largest scores of each row, largest first; of equal scores the lowest id wins.

    Returns int64 ``[T, K]``. ``torch.topk`` leaves the order of ties open, and with it the determinism of routing.

    Example: scores [[1, 3, 3, 0]], K=2 gives [[1, 2]].
    """
    remaining = scores_TE.clone()
    ids_TK = scores_TE.new_empty((scores_TE.shape[0], top_k), dtype=torch.int64)
    for choice in range(top_k):
        best_T1 = remaining.argmax(dim=1, keepdim=True)
        ids_TK[:, choice : choice + 1] = best_T1
        remaining.scatter_(1, best_T1, float("-inf"))
    return ids_TK


def experts_of_best_groups(scores_TE: Tensor, *, num_groups: int, num_limited: int, num_counted: int) -> Tensor:
    """bool ``[T, E]``: True for the experts of each token's ``num_limited`` best groups.

    Groups are ``num_groups`` equal runs of consecutive experts. A group's score is the sum of its ``num_counted``
    best experts' scores (of all, where it has fewer); of equal groups the lowest wins.

    Example: scores [[5, 0, 3, 3]], 2 groups, 1 limited: the second group at 2 counted, the first at 1.
    """
    num_tokens, num_experts = scores_TE.shape
    scores_TGe = scores_TE.view(num_tokens, num_groups, num_experts // num_groups)
    best_TGc = scores_TGe.topk(min(num_counted, scores_TGe.shape[2]), dim=2).values
    group_ids_TL = top_k_ids(best_TGc.sum(dim=2), num_limited)
    chosen_TG = torch.zeros((num_tokens, num_groups), dtype=torch.bool, device=scores_TE.device)
    chosen_TG.scatter_(1, group_ids_TL, True)
    return chosen_TG.repeat_interleave(num_experts // num_groups, dim=1)
