"""What is watched of collectives on devices, and for how long it is held; what a wait on the host says."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from xmoe.ops import collectives
from xmoe.ops.collectives import Begun, Exchange

CUDA = torch.device("cuda", 0)


class Buffer:
    """Rows received, as far as a reference to them goes."""


class Work:
    """As NCCL's: it refers to the outputs as long as it is held, and its wait only queues one.

    ``ask``  what ``is_completed`` does; ``fail`` what ``wait`` raises
    """

    def __init__(self, ask: Callable[[], bool] = lambda: False, *, fail: Exception | None = None) -> None:
        self.outputs, self.ask, self.fail = [Buffer()], ask, fail

    def is_completed(self) -> bool:
        return self.ask()

    def wait(self) -> None:
        if self.fail is not None:
            raise self.fail


class Device:
    """Streams by name; ``done`` says of how many events, in the order of recording, each has come past."""

    def __init__(self) -> None:
        self.stream = "computing"
        self.recorded: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.set_device = lambda device: None

    def current_stream(self, device: torch.device) -> str:
        assert device == CUDA
        return self.stream

    def Event(self) -> SimpleNamespace:
        place: list[tuple[str, int]] = []

        def record(stream: str) -> None:
            self.recorded[stream] = self.recorded.get(stream, 0) + 1
            place.append((stream, self.recorded[stream]))

        def query() -> bool:
            ((stream, number),) = place
            return number <= self.done.get(stream, 0)

        return SimpleNamespace(record=record, query=query)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    return fake


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> collectives._Monitor:
    """Without its thread: rounds are the test's."""
    monitor = collectives._Monitor()
    monitor._thread = SimpleNamespace()
    monkeypatch.setattr(collectives, "_MONITOR", monitor)
    monkeypatch.setattr(collectives.dist, "get_rank", lambda: 3)
    return monitor


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(collectives, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def begin(work: object, label: str, device: torch.device = CUDA) -> Begun:
    return Begun(work, Exchange(group=None, label=label, timeout_s=4.0), device)


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Labels, in the order of the reports."""
    labels = [re.findall("'(.*?)'", record.getMessage())[0] for record in caplog.records]
    caplog.clear()
    return labels


def test_a_finished_collective_holds_no_tensor(device: Device, monitor: collectives._Monitor) -> None:
    work = Work()
    buffer = weakref.ref(work.outputs[0])
    begun = begin(work, "rows")
    del work
    monitor._look()
    assert buffer() is not None
    begun.finish()
    assert buffer() is None


def test_a_round_holds_nothing_afterwards(device: Device, monitor: collectives._Monitor) -> None:
    work = Work(lambda: True)
    buffer = weakref.ref(work.outputs[0])
    begun = begin(work, "rows")
    del work
    monitor._look()
    assert not monitor._begun
    begun.finish()
    assert device.recorded == {}, "an event for a collective known to be complete"
    assert buffer() is None


def test_a_collective_that_hangs_on_the_device_is_reported_though_the_host_waited(
    device: Device, monitor: collectives._Monitor, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    begin(Work(), "first").finish()
    begin(Work(), "second").finish()
    device.stream = "another"
    begin(Work(), "third").finish()
    device.done["computing"] = 1
    for _ in range(3):  # once for each timeout that goes by, not in each round
        now[0] += 3.0
        monitor._look()
    assert sorted(reported(caplog)) == ["second", "third"]
    device.done.update(computing=2, another=1)
    now[0] += 100.0
    monitor._look()
    assert reported(caplog) == []
    assert not monitor._begun
    assert not monitor._finished


def test_the_time_of_one_begins_when_the_one_before_it_is_over(
    device: Device, monitor: collectives._Monitor, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    begin(Work(), "slow").finish()
    begin(Work(), "next").finish()
    now[0] += 5.0
    monitor._look()
    assert reported(caplog) == ["slow"]
    device.done["computing"] = 1
    monitor._look()
    monitor._look()
    assert reported(caplog) == [], "it has only now begun to run"
    now[0] += 5.0
    monitor._look()
    assert reported(caplog) == ["next"]


def test_those_behind_the_one_that_hangs_are_not_reported(
    device: Device, monitor: collectives._Monitor, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    older = begin(Work(), "older, and complete")
    now[0] += 1.0
    begin(Work(), "hangs").finish()
    older.finish()  # its event comes behind the other's wait
    now[0] += 4.5
    monitor._look()
    assert reported(caplog) == ["hangs"]


def test_one_that_is_not_finished_is_reported(
    device: Device, monitor: collectives._Monitor, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    begun = begin(Work(), "rows")
    now[0] += 4.5
    monitor._look()
    assert reported(caplog) == ["rows"]
    begun.finish()


@pytest.mark.parametrize("finished", [False, True])
def test_one_that_cannot_be_asked_is_dropped_and_the_others_are_watched(
    device: Device,
    monitor: collectives._Monitor,
    now: list[float],
    caplog: pytest.LogCaptureFixture,
    finished: bool,
) -> None:
    def fail() -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    if finished:
        event = device.Event
        device.Event = lambda: SimpleNamespace(record=lambda stream: None, query=fail)
        begin(Work(), "spoilt").finish()
        device.Event = event
        begin(Work(), "hangs").finish()
    else:
        waiting = [begin(Work(fail), "spoilt"), begin(Work(), "hangs")]
        assert len(monitor._begun) == len(waiting)
    monitor._look()
    assert "unspecified launch failure" in caplog.text
    assert reported(caplog) == ["spoilt"]
    now[0] += 4.5
    monitor._look()
    assert reported(caplog) == ["hangs"]


def test_a_wait_that_fails_on_a_device_names_its_collective(device: Device, monitor: collectives._Monitor) -> None:
    begun = begin(Work(fail=RuntimeError("NCCL communicator was aborted")), "layer 1: rows")
    with pytest.raises(RuntimeError, match=r"rank 3: collective 'layer 1: rows' failed: NCCL communicator was aborted"):
        begun.finish()
    assert not monitor._begun
    assert not monitor._finished


def test_the_thread_is_on_the_device_of_its_collectives(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def stop(seconds: float) -> None:
        asked.append(seconds)
        raise InterruptedError

    device.set_device = asked.append
    monkeypatch.setattr(collectives, "time", SimpleNamespace(sleep=stop))
    with pytest.raises(InterruptedError):
        collectives._Monitor()._run(CUDA)
    assert asked == [CUDA, 1.0]


class HostWork:
    def __init__(self, says: str) -> None:
        self.says = says

    def wait(self, timeout: object) -> None:
        raise RuntimeError(self.says)


@pytest.mark.parametrize(
    ("computed_s", "says", "report"),
    [
        (9.0, "Connection closed by peer [127.0.0.1]:37814", "collective 'rows' failed: Connection closed by peer"),
        (9.0, "Timed out waiting 4000ms for send operation to complete", "rank 3 has waited 4 s in 'rows'"),
        (4.0, "Operation timed out!", "rank 3 has waited 4 s in 'rows'"),
        (1.0, "Timed out waiting 1000ms for send operation", "collective 'rows' failed: Timed out waiting 1000ms"),
    ],
)
def test_a_wait_on_the_host_says_what_is_true(
    monitor: collectives._Monitor, now: list[float], computed_s: float, says: str, report: str
) -> None:
    begun = begin(HostWork(says), "rows", torch.device("cpu"))
    now[0] += computed_s
    with pytest.raises(RuntimeError, match=report):
        begun.finish()
