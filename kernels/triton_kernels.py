"""The Triton kernels under the names of their PyTorch twins in ``xmoe.kernels.reference``."""

from .rows import gather_rows

__all__ = ["gather_rows"]
