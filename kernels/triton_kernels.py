"""The Triton kernels under the names of their PyTorch twins in ``xmoe.kernels.reference``."""

from .gating import gate_forward
from .gating_backward import gate_backward
from .gating_select import experts_of_best_groups, ranks_within_expert, top_k_ids
from .grouped_wgrad import grouped_wgrad
from .rows import gather_rows

__all__ = [
    "experts_of_best_groups",
    "gate_backward",
    "gate_forward",
    "gather_rows",
    "grouped_wgrad",
    "ranks_within_expert",
    "top_k_ids",
]
