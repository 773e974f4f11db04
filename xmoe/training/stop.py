"""Noticing that a rank should stop: SIGTERM, SIGUSR1, or a launcher that is gone.

No torch here: the command line installs the handlers before the slow imports begin.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this rank was asked to stop. The ranks agree on stopping in the all-reduce of each step.

    A handler only remembers the signal, so one that arrives while a checkpoint is written, or twice, breaks nothing.
    """

    def __init__(self, *, launcher_pid: int | None = None) -> None:
        self._signal: signal.Signals | None = None
        self._launcher_pid = launcher_pid

    @classmethod
    def install(cls, environ: Mapping[str, str]) -> StopRequest:
        """Takes over the two signals of this process, and watches its parent if a launcher started it.

        Without a launcher the parent is a shell, which may well end before a job in the background does.
        """
        launched = "WORLD_SIZE" in environ or "SLURM_PROCID" in environ
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
        if self._launcher_pid is not None and os.getppid() != self._launcher_pid:
            return f"the launcher (process {self._launcher_pid}) is gone"
        return None
