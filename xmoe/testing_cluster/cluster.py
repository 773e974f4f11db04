"""The outside of an emulated cluster: what a test or a benchmark holds."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Pipe
from types import TracebackType
from typing import Any

from .jobs import ClusterShape, Job, Outcome, RankFailure, Report

_NEW_NAMESPACES = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_PROBE = (
    "ip link add port0 type veth peer name eth0 && ip link add switch type bridge && "
    "tc qdisc add dev port0 root tbf rate 1mbit burst 128kb latency 50ms"
)
_SUPERVISOR = "import sys; sys.path[:] = {path}; from xmoe.testing_cluster.nodes import serve; serve({descriptor})"
_START_S = 120.0


@functools.cache
def unavailable() -> str | None:
    """Why this machine cannot emulate a cluster, or None if it can."""
    if sys.platform != "linux":
        return f"an emulated cluster needs Linux's network namespaces, this is {sys.platform}"
    if os.geteuid() != 0:
        return f"an emulated cluster needs root to make network namespaces, this is user {os.geteuid()}"
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            return f"an emulated cluster needs the program {program!r} (Debian package {package})"
    probe = subprocess.run([*_NEW_NAMESPACES, "sh", "-c", _PROBE], capture_output=True, text=True)
    if probe.returncode:
        return f"this kernel or container cannot emulate a cluster: {probe.stderr.strip() or probe.returncode}"
    return None


class EmulatedCluster:
    """Nodes that live until ``close``, the end of the ``with`` block, or the end of this process.

    ``preload`` names modules that are imported once, before ranks are forked, so that a job starts in a fraction of a
    second. They must not start threads on import. Raises RuntimeError where ``unavailable`` has a reason.
    """

    def __init__(self, shape: ClusterShape, *, preload: Sequence[str] = ()) -> None:
        if reason := unavailable():
            raise RuntimeError(reason)
        self.shape = shape
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - has no name, so nothing is left of it
        self._connection, theirs = Pipe()
        with theirs:
            # Modules are found where the owner finds them, less the current folder, which a command line adds.
            program = _SUPERVISOR.format(path=[folder for folder in sys.path if folder], descriptor=theirs.fileno())
            self._process = subprocess.Popen(
                [*_NEW_NAMESPACES, sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                cwd="/",
                start_new_session=True,  # an interrupt at the terminal is the owner's to answer
            )
        try:
            self._connection.send((shape, list(preload)))
            self._answer(_START_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EmulatedCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process of the cluster; its namespaces and links end with them. Harmless the second time."""
        self._connection.close()  # which ends the supervisor
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and its child, the supervisor, with it
            self._process.wait()
        self._said.close()

    def set_link_rate(self, mbit_per_s: float | None) -> None:
        """Changes the speed of all links, between jobs."""
        self._connection.send(("shape_links", (mbit_per_s,)))
        self._answer(_START_S)

    def run(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        timeout_s: float,
        grace_s: float = 3.0,
        check: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> Report:
        """Runs ``function(*args)`` on every rank, as torchrun would, and returns when all ranks have ended.

        ``function`` stands at the top level of a file, or is named "package.module:function". It finds RANK,
        LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment and makes its own
        process group; gloo takes the node's link. Its process is kept until all ranks have an answer.

        A rank that raises, or has not ended after ``timeout_s``, is reported in a RankFailure with what it printed,
        its stacks if it hung, and its node; ``grace_s`` after the first failure nobody is waited for. With
        ``check=False`` the outcomes say so instead.
        """
        module, _, qualname = function.partition(":") if isinstance(function, str) else ("", "", "")
        if not isinstance(function, str):
            module, qualname = os.path.abspath(function.__code__.co_filename), function.__qualname__
        job = self._job((module, qualname), pickle.dumps(args), (), environment, timeout_s, grace_s)
        return self._run(job, check)

    def run_command(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        grace_s: float = 3.0,
        check: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> Report:
        """The same for a command: every rank must exit with status 0."""
        return self._run(self._job(None, b"", list(command), environment, timeout_s, grace_s), check)

    @staticmethod
    def _job(
        function: tuple[str, str] | None,
        arguments: bytes,
        command: Sequence[str],
        environment: Mapping[str, str] | None,
        timeout_s: float,
        grace_s: float,
    ) -> Job:
        return Job(
            function=function,
            arguments=arguments,
            command=command,
            environment=dict(environment or {}),
            folder=os.getcwd(),
            timeout_s=timeout_s,
            grace_s=grace_s,
        )

    def _run(self, job: Job, check: bool) -> Report:
        self._connection.send(("run", (job,)))
        report: Report = self._answer(job.timeout_s + _START_S)
        failures = [_sentence(outcome, job.timeout_s) for outcome in report.outcomes if outcome.status != 0]
        if check and failures:
            raise RankFailure("\n".join(failures))
        return report

    def _answer(self, timeout_s: float) -> Any:
        """What the supervisor answers; RuntimeError with its words when it cannot do what it was asked."""
        try:
            if not self._connection.poll(timeout_s):
                self.close()
                raise RuntimeError(f"the emulated cluster did not answer within {timeout_s:g} s")
            good, result = self._connection.recv()
        except EOFError:
            self._process.wait()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"the emulated cluster died: {said}") from None
        if not good:
            raise RuntimeError(f"emulated cluster: {result}")
        return result


def _sentence(outcome: Outcome, timeout_s: float) -> str:
    who = f"rank {outcome.rank} ({outcome.node})"
    if outcome.status is None:
        return f"{who} did not finish (limit {timeout_s:g} s):\n{outcome.log}"
    if outcome.answer:
        return f"{who} raised {type(outcome.value).__name__}: {outcome.value}\n{outcome.log}"
    ended = f"exited with status {outcome.status}" if outcome.status >= 0 else f"died of signal {-outcome.status}"
    return f"{who} {ended}:\n{outcome.log}"
