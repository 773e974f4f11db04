"""Which kernels run: the one rule, and the one place that asks.

``auto``    Triton on a GPU, the PyTorch twins on a CPU and for float64
``torch``   the twins
``triton``  the Triton kernels; on a CPU that takes Triton's interpreter (``TRITON_INTERPRET=1``)

A layer says its choice around its forward with :func:`use_kernels`. An operator asks :func:`kernels_for` once, in
forward, and keeps the answer for its backward, which may run on another thread.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor

from ..kernels import reference

KernelChoice = Literal["auto", "torch", "triton"]

_CHOICE: ContextVar[KernelChoice] = ContextVar("xmoe_kernels", default="auto")


@contextlib.contextmanager
def use_kernels(choice: KernelChoice) -> Iterator[None]:
    """Operators called inside follow ``choice``."""
    token = _CHOICE.set(choice)
    try:
        yield
    finally:
        _CHOICE.reset(token)


def kernels_for(x: Tensor) -> Any:
    """``xmoe.kernels.reference`` or ``xmoe.kernels.triton_kernels``, which define the same functions.

    Raises ValueError where ``triton`` was asked for and cannot run on x.
    """
    choice = _CHOICE.get()
    if choice == "torch" or (
        choice == "auto" and (x.device.type != "cuda" or x.dtype == torch.float64 or not _found())
    ):
        return reference
    reason = why_not_triton(device_type=x.device.type, dtype=x.dtype)
    if reason is not None:
        raise ValueError(f"xmoe.kernels is 'triton': {reason}")
    from ..kernels import triton_kernels

    return triton_kernels


def _found() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_not_triton(*, device_type: str, dtype: torch.dtype | None = None) -> str | None:
    """Why the Triton kernels cannot run there, or None."""
    if not _found():
        return "there is no module triton. ROCm and CUDA builds of torch bring their own; elsewhere pip install triton"
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "the layer is on a CPU. Use 'auto' or 'torch', or run Triton's interpreter (slow, for tests) with "
            "TRITON_INTERPRET=1"
        )
    if dtype == torch.float64:
        return "the kernels compute in bfloat16, float16 and float32; a float64 layer needs 'auto' or 'torch'"
    return None
