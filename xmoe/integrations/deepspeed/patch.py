"""``patch_deepspeed``: scripts written for DeepSpeed's layer and ``deepspeed.initialize`` run on xmoe's, unchanged.

The class stays the object it is, so that whoever holds it (``from deepspeed.moe.layer import MoE`` before the patch, a
registry, DeepSpeed's own ``isinstance``) goes on to hold the right one: what changes is that calling it builds
xmoe's layer, which is an instance of it. The function is replaced by name: in ``deepspeed``, and in every module that
has taken it from there by then.

Not reached are layers that are built already, and classes derived from DeepSpeed's: they stay native, and
``initialize`` warns of them by name.
"""

from __future__ import annotations

import sys
from types import ModuleType, TracebackType
from typing import Any

from deepspeed.moe.layer import MoE as NativeMoE

from .engine import initialize, native_initialize
from .moe import MoE

_builds_ours = False


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    """``__new__`` of DeepSpeed's layer. Python then calls ``__init__`` of the class of what it returns.

    Copying and unpickling call it without arguments, and mean the very class.
    """
    is_call = bool(args or kwargs)
    return object.__new__(MoE if _builds_ours and cls is NativeMoE and is_call else cls)


class Patch:
    """What one call of :func:`patch_deepspeed` changed. ``undo()``, or leaving its ``with``, takes it back."""

    def __init__(self) -> None:
        global _builds_ours
        self._switched = not _builds_ours
        self._modules: list[tuple[ModuleType, str]] = []
        NativeMoE.__new__ = staticmethod(_new)
        _builds_ours = True
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and not name.startswith("xmoe."):
                self._replace_in(module)

    def _replace_in(self, module: ModuleType) -> None:
        for name, value in list(vars(module).items()):
            if value is native_initialize:
                setattr(module, name, initialize)
                self._modules.append((module, name))

    def undo(self) -> None:
        """Makes DeepSpeed's class and function its own again; once undone, does nothing.

        What was built stays xmoe's, names bound to something else since stay so, and a module that took the function
        in the meantime keeps it.
        """
        global _builds_ours
        if self._switched:
            # __new__ stays where it is, without effect: Python refuses arguments to a class that has lost one.
            _builds_ours = self._switched = False
        while self._modules:
            module, name = self._modules.pop()
            if vars(module).get(name) is initialize:
                setattr(module, name, native_initialize)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def patch_deepspeed() -> Patch:
    """Makes code written for ``deepspeed.moe.layer.MoE`` and ``deepspeed.initialize`` use xmoe's.

    Call it before the model is built. The result may be ignored::

        import xmoe
        xmoe.patch_deepspeed()

        layer = deepspeed.moe.layer.MoE(...)    # an xmoe.MoE
        engine, *_ = deepspeed.initialize(...)  # xmoe.initialize: the "xmoe" section is read

    or used as a context manager, or undone by its ``undo()``. A second call has nothing left to change, but for
    modules that were imported around the first, and nothing else to undo.
    """
    return Patch()
