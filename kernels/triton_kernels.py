"""The Triton kernels under the names of their PyTorch twins in ``xmoe.kernels.reference``."""

from .activation import activation_backward, activation_forward
from .expert_mlp import expert_mlp_backward, expert_mlp_forward
from .gating import gate_forward
from .gating_backward import gate_backward
from .gating_select import experts_of_best_groups, ranks_within_expert, top_k_ids
from .grouped_dgrad import grouped_dgrad, grouped_dgrad_activated
from .grouped_forward import grouped_forward, grouped_forward_activated
from .grouped_wgrad import grouped_wgrad
from .plan import count_ids, sort_slots, tile_schedule
from .rows import combine_rows, gather_rows, row_dot, segment_sums

__all__ = [
    "activation_backward",
    "activation_forward",
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
    "ranks_within_expert",
    "row_dot",
    "segment_sums",
    "sort_slots",
    "tile_schedule",
    "top_k_ids",
]
