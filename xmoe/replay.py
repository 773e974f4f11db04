"""Decides once: under activation checkpointing, a layer's second forward repeats the first one's decisions.

Which experts a token takes, which assignments are dropped and where each row goes are integers, and a recompute
that came to other integers (a tie broken by noise, a non-deterministic attention kernel upstream) would give
gradients of another function, or a collective with other sizes on one rank: a hang. So the first forward records
its decisions and the recompute replays them; only differentiable values are computed again.

The record must be found again by the right recompute, with several micro-batches in flight and backwards in any
order. It therefore hangs on the object that stands for one checkpointed call and dies with its graph:

    torch reentrant, DeepSpeed and Megatron    the autograd context of their checkpoint Function
    torch non-reentrant                        the call's ``_CheckpointFrame``
    DeepSpeed ``non_reentrant_checkpoint``     the call's storage of recomputed tensors

These objects are found on the Python stack: in the first forward the checkpoint's own frame encloses the layer,
in the recompute its backward (or unpack hook) does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.autograd.function import FunctionCtx

V = TypeVar("V")

_ATTRIBUTE = "_xmoe_decisions"
_TORCH = "torch.utils.checkpoint"
_DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"


class Decisions:
    """One forward of one layer: call it with a function to decide, or to be told what was decided before.

    ``replaying``  this forward is a recompute
    ``recorded``   this forward will be recomputed (it stands inside a checkpointed call)
    """

    def __init__(self, made: list[Any], *, replaying: bool, recorded: bool) -> None:
        self._made, self._next = made, 0
        self.replaying, self.recorded = replaying, recorded

    def __call__(self, decide: Callable[[], V]) -> V:
        if not self.replaying:
            self._made.append(decide())
        if self._next >= len(self._made):
            raise RuntimeError(
                "activation checkpointing recomputes a layer whose first forward decided less: "
                "the layer's settings changed between forward and backward"
            )
        decision: V = self._made[self._next]
        self._next += 1
        return decision


def fresh_decisions() -> Decisions:
    """Decisions of a forward that no checkpoint encloses."""
    return Decisions([], replaying=False, recorded=False)


def decisions_for(layer: object) -> Decisions:
    """The decisions of the forward of ``layer`` that is being run now, found by its enclosing checkpoints.

    A layer called several times in one checkpointed function is replayed in the order of its calls.
    """
    recording, replaying = _enclosing_checkpoints()
    if replaying is None:
        made: list[Any] = []
    else:
        calls = getattr(replaying, _ATTRIBUTE, {}).get(id(layer))
        if not calls:  # the first forward ran elsewhere, e.g. the checkpoint was entered after the layer
            return fresh_decisions()
        made = calls.pop(0)
        calls.append(made)  # a graph kept by retain_graph recomputes in the same order again
    for checkpoint in recording:
        if not hasattr(checkpoint, _ATTRIBUTE):
            setattr(checkpoint, _ATTRIBUTE, {})
        getattr(checkpoint, _ATTRIBUTE).setdefault(id(layer), []).append(made)
    # Where no gradient is enabled, only a reentrant checkpoint, which disables it, will come back.
    recorded = bool(recording) and (torch.is_grad_enabled() or any(isinstance(c, FunctionCtx) for c in recording))
    return Decisions(made, replaying=replaying is not None, recorded=recorded)


def _enclosing_checkpoints() -> tuple[list[Any], Any | None]:
    """Checkpointed calls around the caller: those in their first forward, and the nearest one in its recompute."""
    recording: list[Any] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_name
        if name in _FINDERS:
            checkpoint, is_recompute = _FINDERS[name](frame)
            if is_recompute:
                return recording, checkpoint
            if checkpoint is not None:
                recording.append(checkpoint)
        frame = frame.f_back
    return recording or _checkpoint_of_saved_tensor_hooks(), None


def _autograd_function(frame: FrameType) -> tuple[Any | None, bool]:
    if "ctx" not in frame.f_code.co_varnames:
        return None, False  # some module's forward: its locals are not for us to hold on to
    context = frame.f_locals.get("ctx")
    if not isinstance(context, FunctionCtx):
        return None, False
    if frame.f_code.co_name == "backward":
        return context, True
    # Called without gradients (an evaluation, or a checkpoint around it records) it will not be recomputed.
    return (context if context.next_functions else None), False  # type: ignore[attr-defined]


def _torch_forward(frame: FrameType) -> tuple[Any | None, bool]:
    if frame.f_globals.get("__name__") != _TORCH:
        return None, False
    generator = frame.f_locals.get("gen")
    inner = getattr(generator, "gi_frame", None)
    return (inner.f_locals.get("new_frame") if inner is not None else None), False


def _torch_recompute(frame: FrameType) -> tuple[Any | None, bool]:
    found = frame.f_locals.get("frame") if frame.f_globals.get("__name__") == _TORCH else None
    return found, found is not None


def _deepspeed_call(frame: FrameType) -> tuple[Any | None, bool]:
    if frame.f_globals.get("__name__") != _DEEPSPEED:
        return None, False
    return frame.f_locals.get("storage"), frame.f_code.co_name == "checkpoint_unpack"


_FINDERS: dict[str, Callable[[FrameType], tuple[Any | None, bool]]] = {
    "forward": _autograd_function,
    "backward": _autograd_function,
    "checkpoint": _torch_forward,
    "unpack_hook": _torch_recompute,
    "non_reentrant_checkpoint": _deepspeed_call,
    "checkpoint_unpack": _deepspeed_call,
}


def _checkpoint_of_saved_tensor_hooks() -> list[Any]:
    """torch's composable ``checkpoint(module)`` leaves no frame on the stack; its pack hook knows the call."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack = hooks[0] if hooks else None
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    cells = getattr(pack, "__closure__", None)
    if cells is None or pack.__module__ != _TORCH or "frame" not in names:
        return []
    return [cells[names.index("frame")].cell_contents]
