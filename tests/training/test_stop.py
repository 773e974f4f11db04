"""Noticing signals and launchers that are gone, in one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from xmoe.training import stop as stop_module
from xmoe.training.stop import STOP_SIGNALS, StopRequest


@pytest.fixture(autouse=True)
def _restore_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_remembered_and_nothing_else_happens(number: signal.Signals) -> None:
    request = StopRequest.install(launched=False)
    assert request.reason is None
    for _ in range(3):
        os.kill(os.getpid(), number)
    assert request.reason == f"received {number.name}"


def test_signals_are_ignored_once_the_work_is_done() -> None:
    request = StopRequest.install(launched=False)
    request.ignore_further()
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.reason is None


@pytest.mark.parametrize("launched", [False, True])
def test_a_dead_launcher_is_noticed_and_a_dead_shell_is_not(monkeypatch: pytest.MonkeyPatch, launched: bool) -> None:
    request = StopRequest.install(launched=launched)
    assert request.reason is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert (request.reason is not None) == launched


def test_the_upper_process_of_the_deepspeed_command_is_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "_command_line", lambda pid: b"python\0-m\0deepspeed.launcher.launch")
    request = StopRequest.install(launched=True)
    assert request.reason is None
    monkeypatch.setattr(stop_module, "_parent_of", lambda pid: -1)
    assert "deepspeed command" in (request.reason or "")


def test_parents_are_read_from_proc() -> None:
    assert stop_module._parent_of(os.getpid()) == os.getppid()
    assert b"python" in stop_module._command_line(os.getpid())
    assert stop_module._parent_of(2**30) is None
    assert stop_module._command_line(2**30) == b""
