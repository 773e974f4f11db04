"""The Triton kernels under the names of their PyTorch twins in ``xmoe.kernels.reference``."""

from .activation import activation_backward, activation_forward
from .expert_mlp import expert_mlp_backward, expert_mlp_forward
from .gating import gate_forward
from .gating_backward import gate_backward
from .gating_select import experts_of_best_groups, ranks_within_expert, top_k_ids
from .grouped_dgrad import grouped_dgrad, grouped_dgrad_activated
from .grouped_forward import grouped_forward, grouped_forward_activated
from .grouped_wgrad import grouped_wgrad
from .plan import count_ids, sort_and_count, sort_slots, tile_schedule
from .route_arrivals import pack_references, take_assignments, take_copies
from .route_messages import message_sizes, message_starts, route_message
from .route_pilots import choose_pilots, ranks_of_slots
from .route_rows import row_references, share_rows
from .rows import combine_rows, gather_rows, row_dot, segment_sums

__all__ = [
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
