"""Collectives that say who they are: each has a label, and one that does not end names itself.

A hang is how most mixture-of-experts jobs fail: one rank skipped a layer, or sends other counts than its peers
expect. On CPU tensors a collective that outlasts its timeout raises with its label; on devices, where waiting does
not block the host, a monitor thread logs the label of every collective that is still not complete.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .clock import timed_wait

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One collective's group and manners.

    ``label``           what a timeout reports, e.g. ``"blocks.3.moe: dispatch of rows"``
    ``timeout_s``       seconds until a waiting collective reports itself
    ``self_row_guard``  a rank that would send or receive nothing sends itself one dummy row, because RCCL without
                        its zero-byte fix never returns from such a call; agreed with nobody, as it concerns only
                        the rank's row to itself
    ``step``            the optimizer step being computed, for reports; None outside a training run
    """

    group: dist.ProcessGroup
    label: str
    timeout_s: float
    self_row_guard: bool = False
    step: Callable[[], int | None] | None = None

    def named(self, part: str) -> Exchange:
        return replace(self, label=f"{self.label}: {part}")

    @property
    def title(self) -> str:
        """What a report calls it: ``"blocks.3.moe: dispatch of rows, step 17"``."""
        step = self.step() if self.step is not None else None
        return self.label if step is None else f"{self.label}, step {step}"


def carriers(group: dist.ProcessGroup, device: torch.device) -> tuple[str, str]:
    """The backend and the device that carry the group's collectives of such tensors: ``("nccl", "NVIDIA H200")``."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return backends.get(device.type, dist.get_backend(group)), name


@dataclass(eq=False)
class _Watched:
    """One collective under watch. ``is_over`` asks the device whether it is complete; it never waits."""

    label: str
    timeout_s: float
    is_over: Callable[[], bool]
    since: float


class _Monitor:
    """Watches the collectives of devices; one daemon thread, started by the first of them.

    Until a collective is finished, its work handle says whether it is complete. Finishing it only queues a wait: on
    NCCL and RCCL ``work.wait()`` lets the current stream wait for the event at the collective's end and returns, so
    that from then on, as the host sees it, the collective may still run or be stuck. The handle must go at that moment
    all the same, because it refers to the collective's outputs: the rows received would outlive their use until the
    next round. An event recorded behind the wait takes its place. It refers to no tensor, and is complete no sooner
    than the collective.

    A stream comes to its events in their order, so of those not complete only the first can be what holds it up.
    Those behind it wait through no fault of theirs and are not reported.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held while a device is asked: that can block when a device is stuck
        self._begun: dict[_Watched, None] = {}
        self._finished: dict[Any, list[_Watched]] = {}  # by stream, in the order of their events
        self._thread: threading.Thread | None = None

    def watch(self, work: Any, label: str, timeout_s: float, device: torch.device) -> _Watched:
        watched = _Watched(label=label, timeout_s=timeout_s, is_over=work.is_completed, since=time.monotonic())
        with self._lock:
            self._begun[watched] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=[device], name="xmoe-collectives", daemon=True)
                self._thread.start()
        return watched

    def follow_on_stream(self, watched: _Watched, device: torch.device) -> None:
        """Lets go of the work handle. To be called behind its wait, in the thread and the stream that waited."""
        if watched not in self._begun:  # found complete already
            return
        module = torch.get_device_module(device)
        event, stream = module.Event(), module.current_stream(device)
        event.record(stream)
        watched.is_over = event.query
        with self._lock:
            if watched in self._begun:
                del self._begun[watched]
                self._finished.setdefault(stream, []).append(watched)

    def forget(self, watched: _Watched) -> None:
        with self._lock:
            self._begun.pop(watched, None)

    def _run(self, device: torch.device) -> None:
        # A new thread is on device 0, where the first question would make a context: half a gigabyte for each rank.
        torch.get_device_module(device).set_device(device)
        while True:
            time.sleep(1.0)
            self._look()

    def _look(self) -> None:
        """One round. Handles that it holds meanwhile, and their tensors, are let go when it returns."""
        with self._lock:
            begun, streams = list(self._begun), {stream: list(queue) for stream, queue in self._finished.items()}
        over = {watched for watched in begun if _is_done_with(watched)}
        for queue in streams.values():
            for watched, following in itertools.zip_longest(queue, queue[1:]):
                if not _is_done_with(watched):
                    break
                over.add(watched)
                if following is not None:
                    following.since = time.monotonic()  # it was held up by this one until now
        with self._lock:
            for watched in over:
                self._begun.pop(watched, None)
            left = {stream: [w for w in queue if w not in over] for stream, queue in self._finished.items()}
            self._finished = {stream: queue for stream, queue in left.items() if queue}


def _is_done_with(watched: _Watched) -> bool:
    """Whether there is nothing more to watch; reports a collective that is late."""
    try:
        if watched.is_over():
            return True
        if time.monotonic() - watched.since > watched.timeout_s:
            logger.error(_stuck_message(watched.label, watched.timeout_s))
            watched.since = time.monotonic()
    except Exception as error:  # the device's own, or the process group is gone: the others must still be watched
        logger.error("nothing more can be said of '%s': %s", watched.label, error)
        return True
    return False


_MONITOR = _Monitor()


def _stuck_message(label: str, timeout_s: float) -> str:
    return (
        f"rank {dist.get_rank()} has waited {timeout_s:g} s in '{label}': some rank of its group did not reach this "
        "call (a layer skipped on one rank, evaluation on rank 0 only, or a rank that died)"
    )


def _failure_message(label: str, error: BaseException) -> str:
    return f"rank {dist.get_rank()}: collective '{label}' failed: {error}"


class Begun:
    """A collective under way, watched from now on; ``work`` is its handle, which is held until it is finished."""

    def __init__(self, work: Any, exchange: Exchange, device: torch.device) -> None:
        self._work, self._exchange, self._device = work, exchange, device
        self._since = time.monotonic()
        self._watched: _Watched | None = None
        if device.type != "cpu":
            self._watched = _MONITOR.watch(work, exchange.title, exchange.timeout_s, device)

    def finish(self) -> None:
        """Waits as the backend does, once. Raises RuntimeError with the label when it fails or outlasts its timeout."""
        work, watched = self._work, self._watched
        self._work = self._watched = None  # both refer to the outputs
        with timed_wait(self._device):
            if watched is None:
                _wait_on_host(work, self._exchange, since=self._since)
            else:
                _wait_on_device(work, self._exchange, watched, self._device)


def _wait_on_host(work: Any, exchange: Exchange, *, since: float) -> None:
    try:
        work.wait(timedelta(seconds=exchange.timeout_s))
    except RuntimeError as error:
        # A peer that died while this rank computed fails at once, after whatever time; every timeout says "timed out".
        if time.monotonic() - since >= exchange.timeout_s and "timed out" in str(error).lower():
            raise RuntimeError(_stuck_message(exchange.title, exchange.timeout_s)) from error
        raise RuntimeError(_failure_message(exchange.title, error)) from error


def _wait_on_device(work: Any, exchange: Exchange, watched: _Watched, device: torch.device) -> None:
    try:
        work.wait()
    except BaseException as error:
        _MONITOR.forget(watched)
        if isinstance(error, RuntimeError):  # an aborted communicator, or TORCH_NCCL_BLOCKING_WAIT's timeout
            raise RuntimeError(_failure_message(exchange.title, error)) from error
        raise
    _MONITOR.follow_on_stream(watched, device)


def sum_over_ranks(values: Tensor, exchange: Exchange) -> Tensor:
    """The group's sum, in a tensor of its own. Not differentiable."""
    total = values.clone()
    work = dist.all_reduce(total, group=exchange.group, async_op=True)
    Begun(work, exchange, values.device).finish()
    return total


def gather_over_ranks(values: Tensor, exchange: Exchange) -> Tensor:
    """``values`` of every rank, ``[W, *values.shape]``, in rank order; the same shape on all. Not differentiable."""
    world = dist.get_world_size(exchange.group)
    found = values.new_empty(world * values.numel())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name
    # gloo gathers into a flat buffer from a flat tensor only.
    work = gather(found, values.reshape(-1), group=exchange.group, async_op=True)
    Begun(work, exchange, values.device).finish()
    return found.view(world, *values.shape)


def exchange_counts(counts: Tensor, exchange: Exchange) -> Tensor:
    """Equal all-to-all of an integer ``[W * n]`` tensor: row w goes to rank w; returns what each rank sent."""
    received = torch.empty_like(counts)
    work = dist.all_to_all_single(received, counts, group=exchange.group, async_op=True)
    Begun(work, exchange, counts.device).finish()
    return received


class Pending:
    """An uneven all-to-all of rows under way. Other work may go on until :meth:`finish`, which must be called.

    ``send[w]`` rows go to rank w, ``recv[w]`` come from it, in the order of the ranks; into ``out`` where it is given,
    which is contiguous. Every rank of the group must begin its exchanges in the same order. Not differentiable.
    """

    def __init__(
        self,
        rows: Tensor,
        send: Sequence[int],
        recv: Sequence[int],
        *,
        exchange: Exchange,
        out: Tensor | None = None,
    ) -> None:
        send, recv = list(send), list(recv)
        self._out = out
        self._dummy_at: int | None = None
        if exchange.self_row_guard and (sum(send) == 0 or sum(recv) == 0):
            own = dist.get_rank(exchange.group)
            at, self._dummy_at = sum(send[:own]), sum(recv[:own])
            rows = torch.cat([rows[:at], rows.new_zeros((1, *rows.shape[1:])), rows[at:]])
            send[own] += 1
            recv[own] += 1
            out = None
        self._rows = rows.contiguous()  # held until it has left
        self._received = out if out is not None else rows.new_empty((sum(recv), *rows.shape[1:]))
        work = dist.all_to_all_single(self._received, self._rows, recv, send, group=exchange.group, async_op=True)
        self._begun = Begun(work, exchange, self._rows.device)

    def finish(self) -> Tensor:
        """The rows received. Raises RuntimeError naming the exchange when it fails or outlasts its timeout."""
        self._begun.finish()
        del self._rows
        if self._dummy_at is None:
            return self._received
        received = torch.cat([self._received[: self._dummy_at], self._received[self._dummy_at + 1 :]])
        return received if self._out is None else self._out.copy_(received)


def exchange_rows(rows: Tensor, send: Sequence[int], recv: Sequence[int], exchange: Exchange) -> Tensor:
    """An uneven all-to-all of rows, begun and finished; see :class:`Pending`."""
    return Pending(rows, send, recv, exchange=exchange).finish()
