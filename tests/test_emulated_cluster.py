"""The emulated cluster: nodes that differ, links of the speed they were given, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from xmoe.testing_cluster import ClusterShape, EmulatedCluster, RankFailure, read_traffic, unavailable

LINK_MBIT_PER_S = 40.0
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def cluster():
    if reason := unavailable():
        pytest.skip(reason)
    shape = ClusterShape(num_nodes=2, ranks_per_node=2, link_mbit_per_s=LINK_MBIT_PER_S)
    with EmulatedCluster(shape, preload=["torch.distributed", "pytest"]) as made:
        yield made


def _who_am_i():
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return socket.gethostname(), [int(os.environ[name]) for name in names], os.readlink("/proc/self/ns/net")


def test_every_node_has_its_own_name_and_network(cluster):
    found = cluster.run(_who_am_i, timeout_s=30).values
    assert [name for name, _, _ in found] == ["node0", "node0", "node1", "node1"]
    assert [numbers for _, numbers, _ in found] == [[0, 0, 0, 4, 2], [1, 1, 0, 4, 2], [2, 0, 1, 4, 2], [3, 1, 1, 4, 2]]
    networks = [network for _, _, network in found]
    assert networks[0] == networks[1] != networks[2] == networks[3]
    assert os.readlink("/proc/self/ns/net") not in networks
    assert socket.gethostname() not in ("node0", "node1")


def _send(receiver: int, sender: int, num_bytes: int) -> float | None:
    """Seconds of a transfer between two ranks, as the sender sees it, until the receiver has all.

    A receiver that is late to look finds bytes that have come meanwhile: its own clock may show more than the rate.
    """
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    host = f"10.77.0.{receiver // 2 + 1}"
    if rank == receiver:
        with socket.create_server((host, port)) as server, server.accept()[0] as stream:
            missing = num_bytes
            while missing:
                missing -= len(stream.recv(min(missing, 1 << 20)))
    if rank == sender:
        deadline = time.monotonic() + 30.0
        while True:
            try:
                stream = socket.create_connection((host, port))
                break
            except ConnectionRefusedError:  # the other rank is not there yet
                assert time.monotonic() < deadline
                time.sleep(0.01)
        with stream:
            started = time.perf_counter()
            stream.sendall(bytes(num_bytes))
            stream.shutdown(socket.SHUT_WR)
            stream.recv(1)  # until the receiver has all
            return time.perf_counter() - started
    return None


def _mbit_per_s(job, sender: int, num_bytes: int) -> float:
    return 8e-6 * num_bytes / job.values[sender]


def test_links_have_their_rate_and_loopback_is_free(cluster):
    between = cluster.run(_send, 0, 2, 8 * MEGABYTE, timeout_s=60)
    rate = _mbit_per_s(between, 2, 8 * MEGABYTE)
    assert 0.75 * LINK_MBIT_PER_S < rate < 1.25 * LINK_MBIT_PER_S
    sent, received = between.traffic[1], between.traffic[0]
    assert 1.0 < sent.sent_bytes / (8 * MEGABYTE) < 1.05
    # A last acknowledgement may be on its way while the counters are read.
    assert sent.sent_bytes == pytest.approx(received.received_bytes, abs=1000)
    assert sent.received_bytes == pytest.approx(received.sent_bytes, abs=1000)
    assert received.sent_bytes < 0.05 * sent.sent_bytes
    assert sent.looped_bytes + received.looped_bytes < 1000

    within = cluster.run(_send, 0, 1, 100 * MEGABYTE, timeout_s=60)
    assert _mbit_per_s(within, 1, 100 * MEGABYTE) > 8 * rate
    assert within.traffic[0].looped_bytes >= 100 * MEGABYTE
    assert within.traffic[0].sent_bytes + within.traffic[1].sent_bytes < 1000


def test_the_rate_can_change(cluster):
    cluster.set_link_rate(4 * LINK_MBIT_PER_S)
    try:
        rate = _mbit_per_s(cluster.run(_send, 3, 1, 32 * MEGABYTE, timeout_s=60), 1, 32 * MEGABYTE)
        cluster.set_link_rate(None)
        free = _mbit_per_s(cluster.run(_send, 3, 1, 100 * MEGABYTE, timeout_s=60), 1, 100 * MEGABYTE)
    finally:
        cluster.set_link_rate(LINK_MBIT_PER_S)
    assert 3 * LINK_MBIT_PER_S < rate < 5 * LINK_MBIT_PER_S
    assert free > 2 * rate


def _exchange(num_rows: int):
    dist.init_process_group("gloo")
    rows = torch.full((4 * num_rows, 256), float(dist.get_rank()))
    received = torch.empty_like(rows)
    dist.barrier()
    before = read_traffic()
    dist.barrier()  # nobody sends before all have read
    dist.all_to_all_single(received, rows)
    dist.barrier()
    return received[::num_rows, 0].tolist(), (read_traffic() - before).sent_bytes


def test_gloo_uses_link_and_loopback(cluster):
    num_rows = 512
    job = cluster.run(_exchange, num_rows, timeout_s=30)
    crossing = 4 * num_rows * 256 * 4  # two ranks of a node send to two of the other
    for received, sent_bytes in job.values:
        assert received == [0.0, 1.0, 2.0, 3.0]
        assert 1.0 < sent_bytes / crossing < 1.05
    for node in job.traffic:
        assert 1.0 < node.sent_bytes / crossing < 1.1  # the rendezvous, too
        assert 1.0 < node.looped_bytes / (crossing / 2) < 1.1


class _OwnError(Exception):
    def __init__(self, a: int, b: int) -> None:  # cannot be unpickled
        super().__init__(f"broken by {a} and {b}")


def _fail_on(rank: int, own: bool):
    if int(os.environ["RANK"]) == rank:
        print("said before")
        raise _OwnError(1, 2) if own else ValueError("broken here")
    return rank


def test_exceptions_come_back_with_what_was_said(cluster):
    with pytest.raises(RankFailure, match=r"(?s)^rank 3 \(node1\) raised ValueError: broken here\n.*said before"):
        cluster.run(_fail_on, 3, False, timeout_s=30)
    job = cluster.run(_fail_on, 1, True, timeout_s=30, check=False)
    assert [outcome.status for outcome in job.outcomes] == [0, 1, 0, 0]
    assert str(job.values[1]) == "_OwnError: broken by 1 and 2"
    assert job.values[2] == 1


def _hang_on(ranks: list[int]):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)  # ends with the job
    if int(os.environ["RANK"]) in ranks:
        time.sleep(1000)
    if ranks == [2]:
        raise ValueError("not the one that hangs")


def _other_processes():
    return sorted(name for name in os.listdir("/proc") if name.isdigit())


def test_a_hang_ends_with_stacks_and_leaves_no_process(cluster):
    with pytest.raises(RankFailure, match=r"(?s)rank 1 \(node0\) did not finish \(limit 5 s\):.*_hang_on") as failure:
        cluster.run(_hang_on, [1, 3], timeout_s=5.0)
    assert "rank 0" not in str(failure.value)
    processes = cluster.run(_other_processes, timeout_s=30).values[0]
    assert "1" in processes
    assert len(processes) <= 5  # the supervisor and the ranks of this job


def test_after_a_failure_others_get_the_grace_alone(cluster):
    # Longer than a test may take, were the limit what ends the job.
    job = cluster.run(_hang_on, [2], timeout_s=900.0, grace_s=2.0, check=False)
    assert [outcome.status for outcome in job.outcomes] == [1, 1, None, 1]


def _kill_myself(signal_number: int):
    if os.environ["RANK"] == "2":
        os.kill(os.getpid(), signal_number)
    return "alive"


def test_a_killed_and_a_stopped_rank_are_told_from_each_other(cluster):
    killed = cluster.run(_kill_myself, int(signal.SIGKILL), timeout_s=30, grace_s=3.0, check=False)
    assert [outcome.status for outcome in killed.outcomes] == [0, 0, -9, 0]
    with pytest.raises(RankFailure, match=r"^rank 2 \(node1\) did not finish"):
        cluster.run(_kill_myself, int(signal.SIGSTOP), timeout_s=5.0)


def _leave(rank: int):
    if int(os.environ["RANK"]) == rank:
        os._exit(0)


def test_a_function_that_leaves_without_an_answer_has_failed(cluster):
    with pytest.raises(RankFailure, match=r"^rank 3 \(node1\) exited with status 1:\n$"):
        cluster.run(_leave, 3, timeout_s=30)


def test_commands_and_functions_by_name(cluster, tmp_path):
    line = 'echo "$RANK of $WORLD_SIZE on $(hostname), $COLOUR" > $FOLDER/$RANK; test $RANK != 1 || exit 7'
    environment = {"COLOUR": "blue", "FOLDER": str(tmp_path)}
    job = cluster.run_command(["sh", "-c", line], timeout_s=30, check=False, environment=environment)
    assert [outcome.status for outcome in job.outcomes] == [0, 7, 0, 0]
    assert (tmp_path / "2").read_text() == "2 of 4 on node1, blue\n"
    with pytest.raises(RankFailure, match=r"rank 0 \(node0\) exited with status 127:\n.*no-such-program"):
        cluster.run_command(["no-such-program"], timeout_s=30)
    assert cluster.run("socket:gethostname", timeout_s=30).values == ["node0", "node0", "node1", "node1"]


KINDS = ("net", "uts", "pid", "mnt")


def _own_namespaces() -> set[str]:
    return {os.readlink(f"/proc/self/ns/{kind}") for kind in KINDS}


def _namespaces_in_use() -> set[str]:
    """Those of every process on the machine."""
    found = set()
    for kind in KINDS:
        for link in Path("/proc").glob(f"[0-9]*/ns/{kind}"):
            with contextlib.suppress(OSError):  # the process ended meanwhile
                found.add(os.readlink(link))
    return found


def _links_and_names() -> tuple[list[str], list[str]]:
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return [line.split(": ")[1] for line in links.splitlines()], sorted(os.listdir("/run"))


SAY_NAMESPACES = "for kind in net uts pid mnt; do readlink /proc/self/ns/$kind; done"

# Alone in its process: 2 nodes with 2 ranks each, which leave a detached process behind, and sleep or have ended.
OWNER = """
import sys, time
from xmoe.testing_cluster import ClusterShape, EmulatedCluster
with EmulatedCluster(ClusterShape(num_nodes=2, ranks_per_node=2, link_mbit_per_s=100)) as cluster:
    cluster.run_command(["sh", "-c", sys.argv[1]], timeout_s=1000)
    print("idle", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("while_running", [True, False], ids=["running", "idle"])
def test_a_killed_owner_leaves_nothing(cluster, tmp_path, while_running):
    before = _links_and_names()
    line = f"cd {tmp_path}; ({SAY_NAMESPACES}) > $RANK.part; mv $RANK.part $RANK.txt; setsid sleep 1000 &\n"
    line += "sleep 1000" if while_running else ""
    owner = subprocess.Popen([sys.executable, "-P", "-c", OWNER, line], stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while len(found := list(tmp_path.glob("*.txt"))) < 4:
            assert owner.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if not while_running:
            assert owner.stdout.readline() == "idle\n"
        names = {name for path in found for name in path.read_text().split()} - _own_namespaces()
        assert len(names) == 6  # two networks, two host names, one tree of processes, its mounts
        assert names & _namespaces_in_use()
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    deadline = time.monotonic() + 30
    while names & _namespaces_in_use() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not names & _namespaces_in_use()
    assert _links_and_names() == before


def test_close_ends_everything_before_it_returns(cluster):
    before = _links_and_names()
    with EmulatedCluster(ClusterShape(num_nodes=3, ranks_per_node=1)) as other:
        job = other.run_command(["sh", "-c", SAY_NAMESPACES], timeout_s=30)
        names = set(" ".join(outcome.log for outcome in job.outcomes).split()) - _own_namespaces()
        assert len(names) == 8
        assert names & _namespaces_in_use()
    assert not names & _namespaces_in_use()
    assert _links_and_names() == before
    other.close()


def test_without_root_there_is_a_reason_to_skip():
    program = (
        "import os, sys\n"
        "from xmoe.testing_cluster import ClusterShape, EmulatedCluster, unavailable\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "print(unavailable())\n"
        "try: EmulatedCluster(ClusterShape(num_nodes=1, ranks_per_node=1))\n"
        "except RuntimeError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True).stdout
    first, second = said.splitlines()
    assert "needs root" in first
    assert first == second


def test_a_missing_program_is_named(monkeypatch, tmp_path):
    (tmp_path / "ip").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert unavailable.__wrapped__() == "an emulated cluster needs the program 'tc' (Debian package iproute2)"


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"num_nodes": 0}, "0 nodes"),
        ({"num_nodes": 251}, "251 nodes"),
        ({"ranks_per_node": 0}, "0 ranks"),
        ({"link_mbit_per_s": 0.0}, r"link_mbit_per_s is 0\.0"),
    ],
)
def test_impossible_shapes_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        ClusterShape(**{"num_nodes": 2, "ranks_per_node": 2, **wrong})
