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
    check_triton(device_type=x.device.type, dtype=x.dtype)
    from ..kernels import triton_kernels

    return triton_kernels


def _found() -> bool:
    return importlib.util.find_spec("triton") is not None


def check_triton(*, device_type: str, dtype: torch.dtype | None = None) -> None:
    """Raises ValueError naming the setting when the Triton kernels cannot run."""
    if not _found():
        raise ValueError(
            'xmoe.kernels is "triton", but there is no module triton: a ROCm or CUDA build of torch brings its own, '
            "elsewhere pip install triton"
        )
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            'xmoe.kernels is "triton", but the layer is on a CPU: use "auto" or "torch", or set TRITON_INTERPRET=1 to '
            "run the kernels in Triton's interpreter (slow, for tests)"
        )
    if dtype == torch.float64:
        raise ValueError('xmoe.kernels is "triton", which has bfloat16, float16 and float32: float64 needs "torch"')
