"""Which GPU of a remote node receives a token for all its experts there: its pilot.

Any GPU that holds one of them saves a copy inside the node, so the choice is free to even out what the node's GPUs
receive. Every GPU has a weight, and a token draws among its candidates by their weights, from a low-discrepancy
sequence in place of chance. The weights then follow the loads they led to, in a few rounds. Integers throughout: the
choice is the same on every device and in every run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# How far each round follows. The first one overshoots, since the tokens of a GPU that have no other choice do not
# move; more would swing. Measured on 512 tokens: at most 11 % above the lowest load possible, 1 % on average.
_POWERS = (2, 1, 1, 1)
_BITS = 16
_GOLDEN = 40503  # 2^16 / golden ratio: multiples of it, modulo 2^16, spread evenly however many there are
_FIRST_WEIGHT, _MAX_WEIGHT = 2**12, 2**20


def earlier_slots(top_k: int, device: torch.device) -> Tensor:
    """bool ``[K, K, 1]``: at ``[k, j]`` whether slot j of a token comes before its slot k."""
    return torch.ones(top_k, top_k, dtype=torch.bool, device=device).tril(-1)[:, :, None]


def choose_pilots(rank_KT: Tensor, node_of_rank_W1: Tensor, *, own_node: int, kernels: Any) -> Tensor:
    """int64 ``[K, T]``: the rank each slot's row goes to first, its pilot where its expert is on another node.

    ``rank_KT`` are the ranks of the slots' experts, W where a slot has none; tokens come last, so that comparisons of
    a token's slots run along memory. ``kernels`` counts.

    Example: ranks [[2], [3], [0]], nodes of two ranks, own node 0: both remote slots get 2, or both get 3.
    """
    num_ranks, (top_k, num_tokens) = node_of_rank_W1.numel() - 1, rank_KT.shape
    node_KT = node_of_rank_W1[rank_KT]
    is_remote_KT = (rank_KT < num_ranks) & (node_KT != own_node)
    together_KKT = (node_KT[:, None] == node_KT) & is_remote_KT
    earlier_KK1 = earlier_slots(top_k, rank_KT.device)
    before_KKT = together_KKT & earlier_KK1
    is_first_KT = ((rank_KT[:, None] == rank_KT) & earlier_KK1).sum(dim=1) == 0
    is_candidate_KT = is_remote_KT & is_first_KT
    dial_T = torch.arange(num_tokens, device=rank_KT.device) * _GOLDEN % 2**_BITS

    def draw(weight_W1: Tensor) -> Tensor:
        weight_KT = torch.where(is_candidate_KT, weight_W1[rank_KT], 0)
        before_KT = (before_KKT * weight_KT).sum(dim=1)
        point_KT = dial_T * (together_KKT * weight_KT).sum(dim=1) >> _BITS
        return is_candidate_KT & (before_KT <= point_KT) & (point_KT < before_KT + weight_KT)

    weight_W1 = torch.full_like(node_of_rank_W1, _FIRST_WEIGHT)
    chosen_KT = draw(weight_W1)
    for power in _POWERS:
        load_W = kernels.count_ids(torch.where(chosen_KT, rank_KT, -1).to(torch.int32), num_ranks)
        weight_W1 = _follow(weight_W1, load_W, node_of_rank_W1, power=power)
        chosen_KT = draw(weight_W1)
    pilot_KT = (together_KKT * torch.where(chosen_KT, rank_KT, 0)).sum(dim=1)
    return torch.where(is_remote_KT, pilot_KT, rank_KT)


def _follow(weight_W1: Tensor, load_W: Tensor, node_of_rank_W1: Tensor, *, power: int) -> Tensor:
    """Weights times their node's mean load over their own: who got more than its share draws less."""
    node_of_rank_W = node_of_rank_W1[:-1]
    load_of_node = torch.zeros_like(weight_W1).scatter_add_(0, node_of_rank_W, load_W)
    ranks_of_node = torch.zeros_like(weight_W1).scatter_add_(0, node_of_rank_W, torch.ones_like(load_W))
    mean_W = load_of_node[node_of_rank_W] // ranks_of_node[node_of_rank_W]
    weight_W = weight_W1[:-1] * (mean_W + 1) ** power // (load_W + 1) ** power
    return torch.cat([weight_W.clamp(1, _MAX_WEIGHT), weight_W1[-1:]])
