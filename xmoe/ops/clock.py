"""How long a layer's stages take, with boundaries where the work is: on the host, or on the device's stream.

On a device the host only queues work, so that its own clock would show nothing. There each boundary is an event in the
stream that computes, and times are read when they are asked for: nothing waits in between. The wait for an exchange
counts for what it holds up the computing stream, which is the part of the exchange that nothing overlapped. A wait for
a rank that comes late to an exchange is part of it: no clock of one rank can tell the two apart.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from .overlap import Pausing, within

V = TypeVar("V")

STAGES = ("route", "plan", "dispatch", "experts", "combine", "shared_experts")
"""What a layer's forward consists of, in its order."""

STAGE_TIMES = tuple(stage + part for stage in STAGES for part in ("", "_wait", "_backward", "_backward_wait"))
"""Every name a layer's times can have, in an order that all ranks share. See :class:`StageClock`."""

# Spans of a device that nobody asked for are read in passing once there are so many.
_MAX_UNREAD = 2048


class StageClock:
    """Adds up the seconds of named stages. Off, it costs nothing and finds nothing.

    ``NAME``           a stage of forward, those of a recompute included
    ``NAME_backward``  backward of what the stage computed with xmoe's own operators: exchanges and fused experts
    ``NAME_wait``, ``NAME_backward_wait``  the part of them in which the stage waited for an exchange
    """

    def __init__(self) -> None:
        self.enabled = False
        self._seconds: dict[str, float] = {}
        self._unread: deque[tuple[str, Any, Any]] = deque()
        self._names: list[str] = []

    @contextmanager
    def span(self, name: str, device: torch.device) -> Iterator[None]:
        """Adds the time of its body to stage ``name``."""
        start = _boundary(device)
        self._names.append(name)
        try:
            yield
        finally:
            self._names.pop()
            self._add(name, start, _boundary(device))

    @contextmanager
    def wait(self, device: torch.device) -> Iterator[None]:
        """Its body waits for an exchange: adds its time to ``NAME_wait`` as well, NAME being the stage around it."""
        with self.span(f"{self.current}_wait", device):
            yield

    @property
    def current(self) -> str:
        return self._names[-1] if self._names else "other"

    def take(self) -> dict[str, float]:
        """Seconds of each stage since the last call, waiting for the device to have computed them."""
        while self._unread:
            self._read_oldest()
        taken, self._seconds = self._seconds, {}
        return taken

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the layer starts without spans that are under way: a device's events cannot be copied.
        return self.__dict__ | {"_seconds": {}, "_unread": deque(), "_names": []}

    def _add(self, name: str, start: Any, end: Any) -> None:
        if isinstance(start, float):
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
            return
        self._unread.append((name, start, end))
        if len(self._unread) > _MAX_UNREAD:
            self._read_oldest()

    def _read_oldest(self) -> None:
        name, start, end = self._unread.popleft()
        end.synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + start.elapsed_time(end) * 1e-3


def _boundary(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    module = torch.get_device_module(device)
    event = module.Event(enable_timing=True)
    # The stream of the tensors' device, which need not be the current one.
    event.record(module.current_stream(device))
    return event


_CLOCK: ContextVar[StageClock | None] = ContextVar("xmoe_stage_clock", default=None)


@contextmanager
def use_clock(clock: StageClock | None) -> Iterator[None]:
    """Within it, :func:`timed` adds to ``clock``, if that is on."""
    token = _CLOCK.set(clock if clock is not None and clock.enabled else None)
    try:
        yield
    finally:
        _CLOCK.reset(token)


def timed(name: str, device: torch.device) -> AbstractContextManager[None]:
    """Its body is stage ``name`` of the layer being run; see :meth:`StageClock.span`."""
    clock = _CLOCK.get()
    return nullcontext() if clock is None else clock.span(name, device)


def timed_wait(device: torch.device) -> AbstractContextManager[None]:
    """Its body waits for an exchange of the layer being run; see :meth:`StageClock.wait`."""
    clock = _CLOCK.get()
    return nullcontext() if clock is None else clock.wait(device)


def timed_run(name: str, run: Pausing[V], device: torch.device) -> Pausing[V]:
    """``run``, what it does between its pauses being stage ``name``."""
    return within(run, lambda: timed(name, device))


def timed_backward() -> Callable[[torch.device], AbstractContextManager[None]]:
    """Called in forward; what it returns makes backward stage ``NAME_backward``, NAME being the stage called in."""
    clock = _CLOCK.get()
    if clock is None:
        return lambda device: nullcontext()
    name = f"{clock.current}_backward"

    @contextmanager
    def span(device: torch.device) -> Iterator[None]:
        with use_clock(clock), clock.span(name, device):
            yield

    return span
