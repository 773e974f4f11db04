"""The Triton kernels under the names of their PyTorch twins in ``xmoe.kernels.reference``."""

from .activation import activation_backward, activation_forward
from .gating import gate_forward
from .gating_backward import gate_backward
from .gating_select import experts_of_best_groups, ranks_within_expert, top_k_ids
from .grouped_wgrad import grouped_wgrad
from .plan import count_ids, sort_slots, tile_schedule
from .rows import combine_rows, gather_rows, row_dot, segment_sums

__all__ = [
    "activation_backward",
    "activation_forward",
    "combine_rows",
    "count_ids",
    "experts_of_best_groups",
    "gate_backward",
    "gate_forward",
    "gather_rows",
    "grouped_wgrad",
    "ranks_within_expert",
    "row_dot",
    "segment_sums",
    "sort_slots",
    "tile_schedule",
    "top_k_ids",
]
