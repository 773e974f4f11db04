"""What one rank did in one step of a layer, and which exchanges were under way meanwhile.

Stages are what the layer's own clock sees; an exchange is seen from the call that begins it to its completion, which
the transport's thread reports whenever it comes, awaited or not.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xmoe.layer import RoutedMLP
from xmoe.ops.clock import StageClock


@dataclass(frozen=True, kw_only=True)
class Span:
    """Seconds since the step began."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    """``stages`` of the rank's own thread; ``exchanges`` of rows, weights left out; ``seconds`` of the whole step."""

    stages: list[Span] = field(default_factory=list)
    exchanges: list[Span] = field(default_factory=list)
    seconds: float

    def overlapped_share(self) -> float:
        """Of the time in which at least one exchange was under way, the share in which the rank did not wait for it."""
        edges = sorted({edge for span in [*self.exchanges, *self.stages] for edge in (span.start_s, span.end_s)})
        waits = [span for span in self.stages if span.name.endswith("_wait")]
        under_way = waited = 0.0
        for start, end in itertools.pairwise(edges):
            middle = (start + end) / 2
            if any(span.start_s <= middle < span.end_s for span in self.exchanges):
                under_way += end - start
                waited += (end - start) * any(span.start_s <= middle < span.end_s for span in waits)
        return 1 - waited / under_way if under_way else 0.0


class _RecordingClock(StageClock):
    """Keeps every span, not their sums alone."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self.spans: list[tuple[str, float, float]] = []

    def _add(self, name: str, start: Any, end: Any) -> None:
        self.spans.append((name, start, end))


class _Mark(torch.autograd.Function):
    """Passes a tensor on and calls ``note`` when its gradient comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return grad, None


class _Marked(nn.Module):
    """A module whose backward becomes a span of ``clock``: autograd alone runs it, so that no stage is around it."""

    def __init__(self, inner: nn.Module, name: str, clock: _RecordingClock) -> None:
        super().__init__()
        self.inner, self.name, self.clock = inner, name, clock
        self.started = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return _Mark.apply(self.inner(_Mark.apply(x, self._end)), self._start)

    def _start(self) -> None:
        self.started = time.perf_counter()

    def _end(self) -> None:
        self.clock.spans.append((self.name, self.started, time.perf_counter()))


class _Exchanges:
    """Notes every exchange of rows begun within :meth:`noting`, when it completes."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.num_begun = 0

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        begin = dist.all_to_all_single

        def noted(output: Tensor, input: Tensor, *args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            work = begin(output, input, *args, **options)
            if input.dim() == 2:
                self.num_begun += 1
                done = work.get_future()
                done.add_done_callback(lambda _: self.spans.append(("rows", started, time.perf_counter())))
            return work

        dist.all_to_all_single = noted
        try:
            yield
        finally:
            dist.all_to_all_single = begin

    def wait(self) -> None:
        """Until the last one is noted: the transport's thread says so a moment after it has ended the wait for it."""
        deadline = time.monotonic() + 5.0
        while len(self.spans) < self.num_begun and time.monotonic() < deadline:
            time.sleep(0.001)


def traced(layer: RoutedMLP, run: Callable[[], object]) -> Trace:
    """One call of ``run``, which runs ``layer``."""
    clock, shared = layer.clock, layer.shared_mlp
    recording = _RecordingClock()
    exchanges = _Exchanges()
    layer.clock = recording
    if shared is not None:
        layer.shared_mlp = _Marked(shared, "shared_experts_backward", recording)
    started = time.perf_counter()
    try:
        with exchanges.noting():
            run()
    finally:
        layer.clock, layer.shared_mlp = clock, shared
    seconds = time.perf_counter() - started
    exchanges.wait()
    spans = [
        [
            Span(name=name, start_s=start - started, end_s=end - started)
            for name, start, end in sorted(found, key=_start)
        ]
        for found in (recording.spans, exchanges.spans)
    ]
    return Trace(stages=spans[0], exchanges=spans[1], seconds=seconds)


def _start(span: tuple[str, float, float]) -> float:
    return span[1]
