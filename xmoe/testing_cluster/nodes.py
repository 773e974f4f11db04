"""The inside of an emulated cluster: one supervisor that makes the nodes and runs the ranks (standard library only).

    supervisor: process 1 of its own PID, mount and network namespace; holds the switch, a bridge
      node0: network and UTS namespace; eth0 10.77.0.1  <- veth, tbf both ways ->  a port of the switch
      node1: ...                        eth0 10.77.0.2

Nothing here has a name outside. Namespaces live as long as the supervisor's descriptors and the processes in them, and
links as long as their namespaces. The supervisor ends when the connection to its owner ends, however the owner died;
with process 1 the kernel kills every process of a PID namespace. So there is nothing to clean up and nothing to find
again. ``cluster.py`` is the outside: how tests and benchmarks use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn, cast

from .jobs import ClusterShape, Job, Outcome, Report, Traffic

NETWORK = "10.77.0"  # seen by the nodes of one cluster alone, and routed nowhere
INTERFACE = "eth0"
SHOW_TRAFFIC = "ip -j -s link"
_MTU = 9000  # what high-speed networks use; frame headers are then below 1 % of the bytes
# Every kernel has reno; bbr, some machines' default, measures bandwidth by itself and does not fill a short burst.
# Without IPv6 no router is looked for, and an idle link's counters stand still.
_SYSCTLS = {"ipv4/tcp_congestion_control": "reno", "ipv6/conf/all/disable_ipv6": "1"}
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_LOG_CHARACTERS = 8000


def load_function(path: str, qualname: str) -> Callable[..., Any]:
    """The function ``qualname`` of the file ``path``, or of a module by its name."""
    if not path.endswith(".py"):
        module = importlib.import_module(path)
    else:
        name = "ranks_" + Path(path).stem
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    function: Any = module
    for part in qualname.split("."):
        function = getattr(function, part)
    return cast(Callable[..., Any], function)


def read_traffic() -> Traffic:
    """The counters of the node on which this runs, since the cluster was made."""
    return traffic_of(_command(SHOW_TRAFFIC))


def traffic_of(shown: str) -> Traffic:
    """The counters in the output of SHOW_TRAFFIC."""
    by_name = {link["ifname"]: link["stats64"] for link in json.loads(shown)}
    link, loop = by_name[INTERFACE], by_name["lo"]
    return Traffic(
        sent_bytes=link["tx"]["bytes"],
        received_bytes=link["rx"]["bytes"],
        looped_bytes=loop["tx"]["bytes"],
        sent_packets=link["tx"]["packets"],
        received_packets=link["rx"]["packets"],
    )


def _system(call: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, call)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


class _Namespaces:
    """The network and UTS namespace of the calling process, held open by descriptors."""

    def __init__(self) -> None:
        kinds = (("net", _CLONE_NEWNET), ("uts", _CLONE_NEWUTS))
        self.held = [(os.open(f"/proc/self/ns/{name}", os.O_RDONLY), kind) for name, kind in kinds]

    def enter(self) -> None:
        for descriptor, kind in self.held:
            _system("setns", descriptor, kind)


def _command(line: str, inside: _Namespaces | None = None) -> str:
    enter = None if inside is None else inside.enter
    done = subprocess.run(line.split(), capture_output=True, text=True, preexec_fn=enter)
    if done.returncode:
        raise RuntimeError(f"'{line}' failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


class _Rank:
    """One running process of a job."""

    def __init__(self, rank: int, node: int, pid: int, log: int, answers: Connection, *, must_answer: bool) -> None:
        self.rank, self.node, self.pid, self.log = rank, node, pid, log
        self.must_answer = must_answer
        self.answers: Connection | None = answers
        self.answer = b""
        self.status: int | None = None

    @property
    def ended(self) -> bool:
        return self.status is not None or bool(self.answer)

    @property
    def final_status(self) -> int | None:
        if self.answer:
            return int(not pickle.loads(self.answer)[0])
        return 1 if self.must_answer and self.status == 0 else self.status  # it left without a word

    def receive(self) -> None:
        assert self.answers is not None
        with contextlib.suppress(EOFError):  # a command, or a function's process that died: its status will say
            self.answer = self.answers.recv_bytes()
        self.answers.close()
        self.answers = None

    def outcome(self) -> Outcome:
        log = os.pread(self.log, os.fstat(self.log).st_size, 0).decode(errors="replace")
        os.close(self.log)
        if self.answers is not None:
            self.answers.close()
        return Outcome(
            rank=self.rank,
            node=f"node{self.node}",
            status=self.final_status,
            answer=self.answer,
            log=log[-_LOG_CHARACTERS:],
        )


class Supervisor:
    """Makes nodes and links in the namespaces it was started in; then runs one job at a time."""

    def __init__(self, shape: ClusterShape, owner: Connection) -> None:
        self.shape = shape
        self.owner = owner
        self.num_jobs = 0
        self.switch = _Namespaces()
        _command("ip link set lo up")
        _command("ip link add switch type bridge mcast_snooping 0")
        _command("ip link set switch up")
        self.nodes = [self._make_node(index) for index in range(shape.num_nodes)]
        self.shape_links(shape.link_mbit_per_s)

    def _make_node(self, index: int) -> _Namespaces:
        _system("unshare", _CLONE_NEWNET | _CLONE_NEWUTS)
        node = _Namespaces()
        socket.sethostname(f"node{index}")
        for setting, value in _SYSCTLS.items():
            with contextlib.suppress(FileNotFoundError):  # a kernel without it
                Path("/proc/sys/net", setting).write_text(value)
        self.switch.enter()
        _command("ip link set lo up", inside=node)
        # The other end goes to where process 1 is: to the switch.
        peer = f"peer name port{index} mtu {_MTU} netns 1"
        _command(f"ip link add {INTERFACE} mtu {_MTU} type veth {peer}", inside=node)
        _command(f"ip address add {NETWORK}.{index + 1}/24 dev {INTERFACE}", inside=node)
        _command(f"ip link set {INTERFACE} up", inside=node)
        _command(f"ip link set port{index} master switch up")
        return node

    def shape_links(self, mbit_per_s: float | None) -> None:
        """Sets the rate of every link, each way."""
        ends = [(f"port{index}", None) for index in range(len(self.nodes))] + [(INTERFACE, node) for node in self.nodes]
        for device, node in ends:
            if mbit_per_s is None:
                shown = _command(f"tc qdisc show dev {device}", inside=node)
                if " tbf " in f" {shown} ":
                    _command(f"tc qdisc del dev {device} root", inside=node)
                continue
            limits = f"burst {self.shape.burst_bytes} latency {round(self.shape.queue_s * 1e3)}ms"
            rate = f"rate {round(mbit_per_s * 1e6)}bit"
            _command(f"tc qdisc replace dev {device} root tbf {rate} {limits}", inside=node)

    def run(self, job: Job) -> Report:
        """Runs a job to its end or its time limit. No process of it is left."""
        before = self._traffic()
        started = time.monotonic()
        self.num_jobs += 1
        per_node = self.shape.ranks_per_node
        ranks = [self._start(job, rank, rank // per_node) for rank in range(per_node * len(self.nodes))]
        self._wait(job, ranks, deadline=started + job.timeout_s)
        seconds, after = time.monotonic() - started, self._traffic()
        hanging = [rank for rank in ranks if not rank.ended]
        if hanging and job.function is not None:
            for rank in hanging:
                os.kill(rank.pid, signal.SIGUSR1)  # makes it print its stacks
            time.sleep(0.5)
        _kill_all()
        traffic = [late - early for late, early in zip(after, before, strict=True)]
        return Report(outcomes=[rank.outcome() for rank in ranks], traffic=traffic, seconds=seconds)

    def _traffic(self) -> list[Traffic]:
        return [traffic_of(_command(SHOW_TRAFFIC, inside=node)) for node in self.nodes]

    def _start(self, job: Job, rank: int, node: int) -> _Rank:
        log = os.memfd_create(f"rank-{rank}")
        reader, writer = Pipe(duplex=False)
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            writer.close()
            return _Rank(rank, node, pid, log, reader, must_answer=job.function is not None)
        try:
            os.dup2(log, 1)
            os.dup2(log, 2)
            self.owner.close()
            self.nodes[node].enter()
            os.setsid()
            os.chdir(job.folder)
            os.environ.update(self._environment(rank, node), **job.environment)
            if job.function is None:
                _execute(list(job.command))
            _call(job.function, job.arguments, writer)
        except BaseException:  # nothing may unwind into the supervisor's code
            traceback.print_exc()
        finally:
            os._exit(1)

    def _environment(self, rank: int, node: int) -> dict[str, str]:
        per_node = self.shape.ranks_per_node
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % per_node),
            "GROUP_RANK": str(node),
            "WORLD_SIZE": str(per_node * len(self.nodes)),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": f"{NETWORK}.1",
            "MASTER_PORT": str(29500 + self.num_jobs % 1000),  # another each time: the last may still linger
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "HOSTNAME": f"node{node}",
        }

    def _wait(self, job: Job, ranks: list[_Rank], deadline: float) -> None:
        """Until all have ended, the time is over, or the grace after a first failure is."""
        failed = False
        while not all(rank.ended for rank in ranks) and time.monotonic() < deadline:
            answers = {rank.answers: rank for rank in ranks if rank.answers is not None}
            for ready in wait([self.owner, *answers], timeout=0.02):
                if ready is self.owner:
                    os._exit(0)  # it sends nothing during a job: it is gone, and with this process all others
                answers[ready].receive()  # type: ignore[index]
            for pid, status in _reaped():
                for rank in ranks:
                    if rank.pid == pid:
                        rank.status = status
            if not failed and any(rank.final_status not in (None, 0) for rank in ranks):
                failed = True
                deadline = min(deadline, time.monotonic() + job.grace_s)


def _execute(command: list[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)  # as a shell says it


def _call(function: tuple[str, str], arguments: bytes, writer: Connection) -> None:
    """Runs the function, sends its answer and waits to be killed: a rank that leaves early breaks the others' last
    collective."""
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    try:
        answer = pickle.dumps((True, load_function(*function)(*pickle.loads(arguments))))
    except BaseException as error:
        traceback.print_exc()
        answer = pickle.dumps((False, error))
        try:
            pickle.loads(answer)
        except Exception:
            answer = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
    writer.send_bytes(answer)
    while True:
        signal.pause()


def _reaped() -> Iterator[tuple[int, int]]:
    """Every child that has ended, orphans that became ours included, with its exit status."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def _kill_all() -> None:
    """Every process of this PID namespace but this one, which is process 1."""
    assert os.getpid() == 1
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def serve(descriptor: int) -> None:
    """The supervisor's main program. The first message is the shape and the modules to import, others are calls."""
    owner = Connection(descriptor)
    shape, preload = owner.recv()
    supervisor: Supervisor | None = None
    call, arguments = "started", ()
    while True:
        try:
            if supervisor is None:
                supervisor = Supervisor(shape, owner)
                for module in preload:
                    importlib.import_module(module)
                result: Any = None
            else:
                result = getattr(supervisor, call)(*arguments)
            owner.send((True, result))
        except Exception as error:
            owner.send((False, f"{type(error).__name__}: {error}"))
        try:
            call, arguments = owner.recv()
        except EOFError:
            os._exit(0)  # the owner is gone; the kernel kills whatever is left in this PID namespace
