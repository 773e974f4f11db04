"""Triton's interpreter without work that it repeats, which is a third of the time that kernels take in it.

What a kernel computes is the same. The interpreter replaces Triton's language by its own functions, name by name, for
a launch, and again for each call of one jitted function by another (``tl.sum`` is one); once a launch is enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from interpreter_floats import Patches
from triton.runtime import interpreter

# Modules of the language that are replaced in the launch that runs now; None outside of launches.
_REPLACED: list[set[int] | None] = [None]


def _launch(original: Callable[..., Any]) -> Callable[..., Any]:
    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        _REPLACED.append(set())
        try:
            return original(executor, *args, **kwargs)
        finally:
            _REPLACED.pop()

    return launch


@functools.cache
def _modules(function: Any) -> frozenset[int]:
    """The language's modules that ``function`` knows by a name."""
    return frozenset(id(one) for one in function.__globals__.values() if one is tl or one is tl.core)


def _replace(original: Callable[..., Any]) -> Callable[..., Any]:
    def replace(function: Any) -> Any:
        replaced, modules = _REPLACED[-1], _modules(function)
        if replaced is not None:
            if modules and modules <= replaced:
                return None  # the launch, which comes first, undoes what it replaced; calls inside undo nothing
            replaced |= modules
        return original(function)

    return replace


def _dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    """numpy's dtype of a scalar, a pointer or a block of one; the original makes its table anew for each question."""
    known: dict[str, Any] = {}

    def dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = original(kind)
        return known[name]

    return dtype


def patches() -> Patches:
    """(owner, attribute, replacement), as :func:`interpreter_floats.patches` has them."""
    return [
        (interpreter.GridExecutor, "__call__", _launch(interpreter.GridExecutor.__call__)),
        (interpreter, "_patch_lang", _replace(interpreter._patch_lang)),
        (interpreter, "_get_np_dtype", _dtype(interpreter._get_np_dtype)),
    ]
