"""``xmoe bench links`` over gloo: what is measured for which ranks, and what becomes of the figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from xmoe import link_bench
from xmoe.launch import cli
from xmoe.link_bench import measure_links
from xmoe.links import find_links, links_path
from xmoe.testing import run_ranks
from xmoe.testing_cluster import ClusterShape, EmulatedCluster, unavailable

pytestmark = pytest.mark.dist

MAX_BYTES = 16 * 2**20


def measure(host_of_rank: list[str]):
    host = host_of_rank[dist.get_rank()]
    return measure_links(torch.device("cpu"), max_bytes=MAX_BYTES, rounds=8, host=host)


@pytest.mark.parametrize(
    ("hosts", "measured"),
    [
        (["a", "a"], {("all-to-all", "intra-node"): 1, ("point-to-point", "intra-node"): 1}),
        (["a", "b"], {("all-to-all", "inter-node"): 1, ("point-to-point", "inter-node"): 1}),
        (
            ["b", "a", "b", "a"],
            {
                ("all-to-all", "intra-node"): 1,
                ("point-to-point", "intra-node"): 1,
                ("all-to-all", "inter-node"): 2,
                ("point-to-point", "inter-node"): 1,
            },
        ),
    ],
)
def test_every_class_of_links_is_measured_once(hosts, measured):
    reports = run_ranks(len(hosts), measure, hosts)
    assert all(report == reports[0] for report in reports)
    found = {(m.pattern, m.link_class): {p.messages for p in m.points} for m in reports[0].measurements}
    assert found == {key: {messages} for key, messages in measured.items()}
    assert reports[0].hosts == tuple(dict.fromkeys(hosts))
    assert reports[0].ranks_per_node == len(hosts) // len(set(hosts))
    for measurement in reports[0].measurements:
        sizes = [point.num_bytes for point in measurement.points]
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == MAX_BYTES
        # Slower than a processor's cache, faster than a telephone line.
        assert 1e5 < measurement.fit.link.bandwidth_bytes_per_s < 1e12
        assert measurement.fit.link.latency_s < 1.0


def watch_sends(hosts):
    """Bytes to each rank in each all-to-all of rows, of the largest size."""
    seen = set()
    exchange = link_bench.exchange_rows

    def watched(rows, send, recv, exchange_of):
        if sum(send) == MAX_BYTES:
            seen.add((tuple(dist.get_process_group_ranks(exchange_of.group)), tuple(send), tuple(recv)))
        return exchange(rows, send, recv, exchange_of)

    link_bench.exchange_rows = watched
    measure(hosts)
    return seen


def test_each_pattern_sends_over_its_own_links_only():
    answers = run_ranks(4, watch_sends, ["a", "b", "a", "b"])
    half = MAX_BYTES // 2
    assert answers[0] == {
        ((0, 2), (0, MAX_BYTES), (0, MAX_BYTES)),
        ((0, 1, 2, 3), (0, half, 0, half), (0, half, 0, half)),
    }
    assert answers[3] == {
        ((1, 3), (MAX_BYTES, 0), (MAX_BYTES, 0)),
        ((0, 1, 2, 3), (half, 0, half, 0), (half, 0, half, 0)),
    }


def delay_rank(slow):
    """The time of the slowest rank counts, on all."""
    import time

    bench = link_bench._Bench(torch.device("cpu"), {"a": [0, 1]}, rounds=3)
    point = bench.time(lambda each: 0.05 if dist.get_rank() == slow else time.sleep(0) or 0.001, 1, 1000)
    return point.seconds


def test_the_slowest_rank_counts():
    assert run_ranks(2, delay_rank, 1) == [pytest.approx(0.05)] * 2


def test_unequal_nodes_are_refused_on_every_rank():
    answers = run_ranks(3, measure, ["a", "a", "b"], return_exceptions=True)
    assert [type(answer) for answer in answers] == [ValueError] * 3
    assert "a has 2, b has 1" in str(answers[2])


def test_sizes_that_do_not_do_are_refused_on_every_rank():
    answers = run_ranks(2, measure_one_size, return_exceptions=True)
    assert [type(answer) for answer in answers] == [ValueError] * 2
    assert "all-to-all over intra-node links: latency and bandwidth cannot be told apart" in str(answers[0])


def measure_one_size():
    return measure_links(torch.device("cpu"), max_bytes=1024, rounds=3, host="a")


# Two tiers of known speed

LINK_MBIT_PER_S = 200.0


def measure_between_nodes():
    dist.init_process_group("gloo")
    return measure_links(torch.device("cpu"), max_bytes=2**22, rounds=8)


def test_links_of_a_given_speed_are_measured_as_such():
    if reason := unavailable():
        pytest.skip(reason)
    shape = ClusterShape(num_nodes=2, ranks_per_node=2, link_mbit_per_s=LINK_MBIT_PER_S)
    with EmulatedCluster(shape, preload=["torch.distributed", "pytest", "xmoe.link_bench"]) as cluster:
        report = cluster.run(measure_between_nodes, timeout_s=100).values[0]
    assert report.hosts == ("node0", "node1")
    wire = LINK_MBIT_PER_S * 1e6 / 8
    largest = {(m.pattern, m.link_class): m.points[-1].num_bytes / m.points[-1].seconds for m in report.measurements}
    assert largest["point-to-point", "inter-node"] == pytest.approx(wire, rel=0.1)
    # Both ranks of a node send at once, and share its link. Small sizes pass an idle link faster than its rate.
    assert report.fit_of("all-to-all", "inter-node").link.bandwidth_bytes_per_s == pytest.approx(wire / 2, rel=0.4)
    assert largest["all-to-all", "inter-node"] < 0.55 * wire
    assert report.fit_of("all-to-all", "intra-node").link.bandwidth_bytes_per_s > wire


# The command


def launch(world: int, *arguments: str, environ: dict[str, str]) -> list[subprocess.CompletedProcess[str]]:
    from xmoe.launch.env import _free_port

    port = str(_free_port())
    command = [sys.executable, "-P", "-m", "xmoe.launch.cli", "bench", "links", "--max-mib", "16", *arguments]
    started = []
    for rank in range(world):
        place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        variables = {**os.environ, **environ, **{name: str(value) for name, value in place.items()}}
        started.append(
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        outputs = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
    return [subprocess.CompletedProcess(command, p.returncode, *o) for p, o in zip(started, outputs, strict=True)]


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("XMOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("XMOE_LINKS", raising=False)
    return {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def test_the_command_keeps_what_jobs_on_these_hosts_find(environ: dict[str, str]) -> None:
    import socket

    ranks = launch(2, "--json", environ=environ)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    assert ranks[1].stdout == ""
    lines = [json.loads(line) for line in ranks[0].stdout.splitlines()]
    assert [(line["pattern"], line["link"]) for line in lines] == [
        ("all-to-all", "intra-node"),
        ("point-to-point", "intra-node"),
    ]
    links, source = find_links([socket.gethostname()])
    assert source == str(links_path([socket.gethostname()], 2)) == lines[0]["file"]
    assert links.intra_node.bandwidth_bytes_per_s == pytest.approx(lines[0]["bandwidth_gb_per_s"] * 1e9)
    assert links.intra_node.latency_s == pytest.approx(lines[0]["latency_us"] * 1e-6)


def test_a_file_that_cannot_be_written_fails_on_every_rank(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "file").write_text("")
    ranks = launch(2, "--out", str(tmp_path / "file" / "links.json"), environ=environ)
    assert [rank.returncode for rank in ranks] == [2, 2], ranks
    assert all("cannot be written" in rank.stderr.splitlines()[-1] for rank in ranks)


def test_one_rank_has_no_links(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["xmoe", "bench", "links"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "error: xmoe bench links is '1 rank': has no links: start at least two ranks with torchrun, srun or mpiexec\n"
    )
