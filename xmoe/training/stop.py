"""Noticing that a rank should stop: SIGTERM, SIGUSR1, or a launcher that is gone.

No torch here: the command line installs the handlers before the slow imports begin.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this rank was asked to stop. The ranks agree on stopping in the all-reduce of each step.

    A handler only remembers the signal, so one that arrives while a checkpoint is written, or twice, breaks nothing.
    """

    def __init__(self, *, launcher_pid: int | None = None) -> None:
        self._signal: signal.Signals | None = None
        self._launcher_pid = launcher_pid
        # The deepspeed command is two processes: the ranks' parent, and above it the one that users and batch
        # systems see and signal, which dies alone.
        two_levels = launcher_pid is not None and b"deepspeed.launcher" in _command_line(launcher_pid)
        self._runner_pid = _parent_of(launcher_pid) if launcher_pid is not None and two_levels else None

    @classmethod
    def install(cls, *, launched: bool) -> StopRequest:
        """Takes over the two signals of this process, and watches its parent if a launcher started it (``launched``).

        Without a launcher the parent is a shell, which may well end before a job in the background does.
        """
        request = cls(launcher_pid=os.getppid() if launched else None)
        for number in STOP_SIGNALS:
            signal.signal(number, request._remember)
        return request

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)

    def ignore_further(self) -> None:
        """Lets no later signal spoil the exit code of a rank whose work is done.

        A handler would not do: Python takes its own handlers away before the process ends.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @property
    def reason(self) -> str | None:
        """Why this rank should stop, or None."""
        if self._signal is not None:
            return f"received {self._signal.name}"
        if self._launcher_pid is None:
            return None
        if os.getppid() != self._launcher_pid:
            return f"the launcher (process {self._launcher_pid}) is gone"
        if self._runner_pid is not None and _parent_of(self._launcher_pid) != self._runner_pid:
            return f"the deepspeed command (process {self._runner_pid}) is gone"
        return None


def _command_line(pid: int) -> bytes:
    """Arguments of a process, separated by zero bytes; empty where /proc does not tell."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _parent_of(pid: int) -> int | None:
    """Parent of a process, None where /proc does not tell."""
    try:
        # "pid (name) state ppid ...", and the name may hold spaces and brackets.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
