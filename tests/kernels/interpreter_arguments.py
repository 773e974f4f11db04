"""The tensors of a launch by their addresses, and pointers that know which one they came from."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from torch import Tensor

from xmoe.kernels.ragged import Stacked

_STACKS: list[weakref.ref[Stacked]] = []


@dataclass
class Argument:
    """A tensor of a launch: ``count`` pieces of ``span`` bytes, ``period`` bytes apart, from ``start`` on."""

    name: str
    start: int
    span: int
    period: int
    count: int
    item_size: int

    @classmethod
    def of(cls, name: str, x: Tensor) -> Argument:
        """Rows of a view are pieces, and so are the matrices of the :class:`Stacked` whose ``first`` x is."""
        size = x.element_size()
        if x.dim() == 2 and x.numel() and x.stride(1) == 1 and x.stride(0) > x.shape[1]:
            return cls(name, x.data_ptr(), x.shape[1] * size, x.stride(0) * size, x.shape[0], size)
        last = sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride(), strict=True))
        span = (last + 1) * size if x.numel() else 0
        start = x.data_ptr()
        for stacked in _stacks():
            if stacked.num_experts > 1 and stacked.stride and stacked.first.data_ptr() == start and span:
                apart = stacked.stride * size
                lowest = min(start, start + apart * (stacked.num_experts - 1))
                return cls(name, lowest, span, abs(apart), stacked.num_experts, size)
        return cls(name, start, span, max(span, 1), 1, size)

    def holds(self, addresses: np.ndarray) -> bool:
        offsets = addresses.astype(np.int64) - self.start
        if offsets.min() < 0 or offsets.max() > self.period * (self.count - 1) + self.span - self.item_size:
            return False
        return self.count == 1 or bool((offsets % self.period <= self.span - self.item_size).all())

    def items(self, addresses: np.ndarray) -> dict[str, Any]:
        """The accessed items by number, for :class:`~interpreter_races.Races`."""
        items = (self.period * (self.count - 1) + self.span) // self.item_size
        places = (addresses.astype(np.int64) - self.start) // self.item_size
        return {"name": self.name, "start": self.start, "items": items, "places": places}

    def describe(self) -> str:
        pieces = f", {self.count} pieces every {self.period}" if self.count > 1 else ""
        return f"{self.name} ({self.span} bytes{pieces}, items of {self.item_size})"


class Pointer(tl.pointer_type):
    """A pointer's type that knows its argument; the interpreter hands it on through pointer arithmetic."""

    def __init__(self, element_ty: Any, argument: Argument) -> None:
        super().__init__(element_ty)
        self.argument = argument


def _stacks() -> list[Stacked]:
    _STACKS[:] = [reference for reference in _STACKS if reference() is not None]
    return [stacked for reference in _STACKS if (stacked := reference()) is not None]


def remembered(original: Callable[..., None]) -> Callable[..., None]:
    """``Stacked.__init__`` that makes the stack known to :meth:`Argument.of`, for as long as it lives."""

    def __init__(stacked: Stacked, **fields: Any) -> None:
        original(stacked, **fields)
        _STACKS.append(weakref.ref(stacked))

    return __init__
