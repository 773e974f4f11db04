"""PyTorch twins of the kernels: the CPU path, and the oracle each Triton kernel is compared with.

Same names, same signatures and same results as the kernels; plain tensor code, no autograd (the operators of
``xmoe.ops`` call forward and backward by name). Shape letters are those of ``xmoe/types.py``.

Accumulation is in at least float32 (``accumulator_dtype``), in an order fixed by the integers, so that two runs
agree bit by bit.
"""

from __future__ import annotations

from .dtypes import accumulator_dtype
from .reference_activation import Activation, activation_backward, activation_forward
from .reference_experts import ExpertWeights, WantedGradients, expert_mlp_backward, expert_mlp_forward
from .reference_gating import GateRule, Gating, experts_of_best_groups, gate_backward, gate_forward, top_k_ids
from .reference_gemm import grouped_dgrad, grouped_dgrad_activated, grouped_forward, grouped_forward_activated
from .reference_plan import (
    count_ids,
    inverse_permutation,
    ranks_within_expert,
    sort_and_count,
    sort_slots,
    tile_schedule,
)
from .reference_route import RankMap, Routes, SharedRows, choose_pilots, ranks_of_slots, row_references, share_rows
from .reference_route_messages import (
    Inbox,
    MessageStarts,
    message_sizes,
    message_starts,
    pack_references,
    route_message,
    take_assignments,
    take_copies,
)
from .reference_rows import combine_rows, gather_rows, row_dot, segment_sums
from .reference_wgrad import grouped_wgrad

__all__ = [
    "Activation",
    "ExpertWeights",
    "GateRule",
    "Gating",
    "Inbox",
    "MessageStarts",
    "RankMap",
    "Routes",
    "SharedRows",
    "WantedGradients",
    "accumulator_dtype",
    "activation_backward",
    "activation_forward",
    "choose_pilots",
    "combine_rows",
    "count_ids",
    "expert_mlp_backward",
    "expert_mlp_forward",
    "experts_of_best_groups",
    "gate_backward",
    "gate_forward",
    "gather_rows",
    "grouped_dgrad",
    "grouped_dgrad_activated",
    "grouped_forward",
    "grouped_forward_activated",
    "grouped_wgrad",
    "inverse_permutation",
    "message_sizes",
    "message_starts",
    "pack_references",
    "ranks_of_slots",
    "ranks_within_expert",
    "route_message",
    "row_dot",
    "row_references",
    "segment_sums",
    "share_rows",
    "sort_and_count",
    "sort_slots",
    "take_assignments",
    "take_copies",
    "tile_schedule",
    "top_k_ids",
]
