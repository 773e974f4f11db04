"""The times of MoE layers in DeepSpeed's log under ``wall_clock_breakdown``, taken by DeepSpeed's own timers.

    fwd_moe   ``layer.time_moe``         the whole layer
    top_k     ``gate.gate_time``         the gate
    1st_a2a   ``layer.time_falltoall``   exchange of counts and dispatch, with the wait for slower ranks
    2nd_a2a   ``layer.time_salltoall``   combine, with the same wait

What was computed while an exchange was under way (shared experts, other chunks' experts) counts for neither.
Milliseconds of forward. DeepSpeed's layers add them up from the start of the run, and so do these under plain
``deepspeed.initialize``; :func:`start_times_with_each_log` makes them those of a step, as the times beside them are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.moe.sharded_moe import FIRST_ALLTOALL_TIMER, MOE_TIMER, SECOND_ALLTOALL_TIMER
from torch import Tensor

from ...dispatch.base import Dispatcher
from ...layer import RoutedMLP
from ...ops.overlap import Pausing, within
from ...types import ExpertPlan, Rows, TokenBuffer, Traffic

if TYPE_CHECKING:
    from .moe import MOELayer


@contextmanager
def measured(owner: Any, timer: str, attribute: str) -> Iterator[None]:
    """Adds the milliseconds of its body to ``owner``'s attribute, where the engine asked for a breakdown."""
    if not owner.wall_clock_breakdown:
        yield
        return
    clock = owner.timers(timer)
    clock.start()
    try:
        yield
    finally:
        clock.stop()
        setattr(owner, attribute, getattr(owner, attribute) + clock.elapsed(reset=True))


class _Timed:
    """A dispatcher whose exchanges are timed as a layer's two all-to-alls."""

    def __init__(self, dispatcher: Dispatcher, layer: MOELayer) -> None:
        self._dispatcher, self._layer = dispatcher, layer

    @property
    def num_chunks(self) -> int:
        return self._dispatcher.num_chunks

    def plan(self, buffers: Sequence[TokenBuffer]) -> list[ExpertPlan]:
        with self._first():
            return self._dispatcher.plan(buffers)

    def dispatch(self, x_TD: Tensor, buffer: TokenBuffer, plan: ExpertPlan) -> Pausing[Rows]:
        return within(self._dispatcher.dispatch(x_TD, buffer, plan), self._first)

    def combine(self, y_RD: Tensor, buffer: TokenBuffer, plan: ExpertPlan) -> Pausing[Tensor]:
        return within(self._dispatcher.combine(y_RD, buffer, plan), self._second)

    def traffic(self, plan: ExpertPlan) -> Traffic:
        return self._dispatcher.traffic(plan)

    def _first(self) -> AbstractContextManager[None]:
        return measured(self._layer, FIRST_ALLTOALL_TIMER, "time_falltoall")

    def _second(self) -> AbstractContextManager[None]:
        return measured(self._layer, SECOND_ALLTOALL_TIMER, "time_salltoall")


@torch.compiler.disable(recursive=True)
def timed_forward(layer: MOELayer, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``RoutedMLP.forward(layer, *args)``, timed."""
    dispatcher = layer.dispatcher
    layer.dispatcher = _Timed(dispatcher, layer)
    try:
        with measured(layer, MOE_TIMER, "time_moe"):
            return RoutedMLP.forward(layer, *args)
    finally:
        layer.dispatcher = dispatcher


def start_times_with_each_log(engine: Any) -> None:
    """Rebinds the method that logs the times, so that they start anew with each log."""
    print_forward_breakdown = engine.print_forward_breakdown

    def and_start_anew(fwd_time: float) -> None:
        print_forward_breakdown(fwd_time=fwd_time)
        for gate in engine.gate_modules:
            gate.gate_time = 0.0
        for layer in engine.moe_layers:
            layer.time_moe = layer.time_falltoall = layer.time_salltoall = 0.0

    engine.print_forward_breakdown = and_start_anew
