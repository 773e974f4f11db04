"""Counts what reads a device from the host, or would if the tensors lay on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_READS = [
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "__array__",
]
# Results whose size is a matter of the values.
_SIZES = ["nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "is_nonzero", "equal"]


@contextlib.contextmanager
def recorded_syncs() -> Iterator[list[str]]:
    """The list fills with the names of the calls inside that wait for the device."""
    found: list[str] = []
    depth = [0]
    with contextlib.ExitStack() as stack:

        def watch(owner: Any, name: str, waits: Callable[..., bool] = lambda *a, **k: True) -> None:
            original = getattr(owner, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                if depth[0] == 0 and waits(*args, **kwargs):
                    found.append(name)
                depth[0] += 1
                try:
                    return original(*args, **kwargs)
                finally:
                    depth[0] -= 1

            setattr(owner, name, call)
            stack.callback(setattr, owner, name, original)

        for name in _READS:
            watch(Tensor, name)
        for owner in (Tensor, torch):
            for name in _SIZES:
                if hasattr(owner, name):
                    watch(owner, name)
            watch(owner, "repeat_interleave", _no_size)
        watch(torch, "where", lambda *args, **kwargs: len(args) + len(kwargs) == 1)
        watch(Tensor, "to", lambda x, *args, **kwargs: any(map(_is_device, [*args, *kwargs.values()])))
        for name in ("__getitem__", "__setitem__"):
            watch(Tensor, name, lambda x, index, *value: _has_mask(index))
        yield found


def _no_size(x: Tensor, repeats: Any = None, *args: Any, output_size: int | None = None, **kwargs: Any) -> bool:
    return output_size is None and not isinstance(repeats, int)


def _is_device(value: Any) -> bool:
    if isinstance(value, Tensor):
        value = value.device
    return isinstance(value, (str, torch.device))


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)
