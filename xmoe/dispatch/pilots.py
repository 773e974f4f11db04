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
    """bool ``[K, K]``: whether j comes before k."""
    return torch.ones(top_k, top_k, dtype=torch.bool, device=device).tril(-1)


def choose_pilots(rank_TK: Tensor, node_of_rank_W1: Tensor, *, own_node: int, kernels: Any) -> Tensor:
    """int64 ``[T, K]``: the rank each slot's row goes to first, its pilot where its expert is on another node.

    ``rank_TK`` are the ranks of the slots' experts, W where a slot has none. ``kernels`` counts.

    Example: ranks [[2, 3, 0]], nodes of two ranks, own node 0: both remote slots get 2, or both get 3.
    """
    num_ranks, top_k = node_of_rank_W1.numel() - 1, rank_TK.shape[1]
    node_TK = node_of_rank_W1[rank_TK]
    is_remote_TK = (rank_TK < num_ranks) & (node_TK != own_node)
    together_TKK = (node_TK[:, :, None] == node_TK[:, None, :]) & is_remote_TK[:, None, :]
    earlier_KK = earlier_slots(top_k, rank_TK.device)
    before_TKK = together_TKK & earlier_KK
    is_repeated_TK = ((rank_TK[:, :, None] == rank_TK[:, None, :]) & earlier_KK).any(dim=2)
    is_candidate_TK = is_remote_TK & ~is_repeated_TK
    dial_T1 = torch.arange(rank_TK.shape[0], device=rank_TK.device)[:, None] * _GOLDEN % 2**_BITS

    def draw(weight_W1: Tensor) -> Tensor:
        weight_TK = torch.where(is_candidate_TK, weight_W1[rank_TK], 0)
        before_TK = (before_TKK * weight_TK[:, None, :]).sum(dim=2)
        point_TK = dial_T1 * (together_TKK * weight_TK[:, None, :]).sum(dim=2) >> _BITS
        return is_candidate_TK & (before_TK <= point_TK) & (point_TK < before_TK + weight_TK)

    weight_W1 = torch.full_like(node_of_rank_W1, _FIRST_WEIGHT)
    chosen_TK = draw(weight_W1)
    for power in _POWERS:
        load_W = kernels.count_ids(torch.where(chosen_TK, rank_TK, -1).to(torch.int32), num_ranks)
        weight_W1 = _follow(weight_W1, load_W, node_of_rank_W1, power=power)
        chosen_TK = draw(weight_W1)
    pilot_TK = (together_TKK * torch.where(chosen_TK, rank_TK, 0)[:, None, :]).sum(dim=2)
    return torch.where(is_remote_TK, pilot_TK, rank_TK)


def _follow(weight_W1: Tensor, load_W: Tensor, node_of_rank_W1: Tensor, *, power: int) -> Tensor:
    """Weights times their node's mean load over their own: who got more than its share draws less."""
    node_of_rank_W = node_of_rank_W1[:-1]
    load_of_node = torch.zeros_like(weight_W1).scatter_add_(0, node_of_rank_W, load_W)
    ranks_of_node = torch.zeros_like(weight_W1).scatter_add_(0, node_of_rank_W, torch.ones_like(load_W))
    mean_W = load_of_node[node_of_rank_W] // ranks_of_node[node_of_rank_W]
    weight_W = weight_W1[:-1] * (mean_W + 1) ** power // (load_W + 1) ** power
    return torch.cat([weight_W.clamp(1, _MAX_WEIGHT), weight_W1[-1:]])
