"""``xmoe bench links`` over gloo: what is measured for which ranks, and what becomes of the figures."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from xmoe import link_bench
from xmoe.launch import cli
from xmoe.link_bench import LinkReport, measure_links
from xmoe.links import Link, Setting, find_links, links_path
from xmoe.testing import run_ranks
from xmoe.testing_cluster import ClusterShape, EmulatedCluster, unavailable

pytestmark = pytest.mark.dist

MAX_BYTES = 2**20
LINKS = {
    "intra-node": Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9),
    "inter-node": Link(latency_s=1e-4, bandwidth_bytes_per_s=1e8),
}


class LinkClock:
    """A clock that stands but while rows are sent, when it moves by what LINKS need for them.

    ``exchanges``  the all-to-alls of MAX_BYTES: the group's ranks, bytes to each and from each
    """

    def __init__(self, host_of_rank: Sequence[str]) -> None:
        self.now = 0.0
        self.exchanges: set[tuple[tuple[int, ...], ...]] = set()
        self.hosts = host_of_rank

    def install(self) -> None:
        exchange = link_bench.exchange_rows

        def exchange_rows(rows, send, recv, exchange_of):
            ranks = dist.get_process_group_ranks(exchange_of.group)
            self._move([rank for rank, num_bytes in zip(ranks, send, strict=True) if num_bytes], sum(send))
            if sum(send) == MAX_BYTES:
                self.exchanges.add((tuple(ranks), tuple(send), tuple(recv)))
            return exchange(rows, send, recv, exchange_of)

        def moving(turn):
            def take(block, peer):
                self._move([peer], len(block))
                return turn(block, peer)

            return take

        link_bench.exchange_rows = exchange_rows
        link_bench.time = SimpleNamespace(perf_counter=lambda: self.now)
        dist.isend, dist.irecv = moving(dist.isend), moving(dist.irecv)

    def _move(self, peers: list[int], num_bytes: int) -> None:
        own = self.hosts[dist.get_rank()]
        (link_class,) = {"intra-node" if self.hosts[peer] == own else "inter-node" for peer in peers}
        self.now += LINKS[link_class].seconds(messages=len(peers), num_bytes=num_bytes)


def measure(host_of_rank: list[str]) -> tuple[LinkReport, set[tuple[tuple[int, ...], ...]]]:
    clock = LinkClock(host_of_rank)
    clock.install()
    host = host_of_rank[dist.get_rank()]
    return measure_links(torch.device("cpu"), max_bytes=MAX_BYTES, rounds=3, host=host), clock.exchanges


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
def test_every_class_of_links_is_measured_once_and_over_its_own_links_only(hosts, measured):
    reports, exchanges = zip(*run_ranks(len(hosts), measure, hosts), strict=True)
    assert all(report == reports[0] for report in reports)
    found = {(m.pattern, m.link_class): {p.messages for p in m.points} for m in reports[0].measurements}
    assert found == {key: {messages} for key, messages in measured.items()}
    assert reports[0].hosts == tuple(dict.fromkeys(hosts))
    ranks_per_node = len(hosts) // len(set(hosts))
    assert reports[0].setting == Setting(ranks_per_node=ranks_per_node, backend="gloo", device="cpu")
    for measurement in reports[0].measurements:
        sizes = [point.num_bytes for point in measurement.points]
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == MAX_BYTES
        link, expected = measurement.fit.link, LINKS[measurement.link_class]
        assert link.bandwidth_bytes_per_s == pytest.approx(expected.bandwidth_bytes_per_s, rel=1e-3)
        assert link.latency_s == pytest.approx(expected.latency_s, rel=1e-3)
    if len(hosts) == 4:
        half = MAX_BYTES // 2
        assert exchanges[0] == {
            ((0, 2), (0, MAX_BYTES), (0, MAX_BYTES)),
            ((0, 1, 2, 3), (0, half, 0, half), (0, half, 0, half)),
        }
        assert exchanges[3] == {
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

# So slow that a busy machine keeps up with them.
LINK_MBIT_PER_S = 80.0


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


def run_command(port: int, cache: str, arguments: list[str]) -> tuple[object, str, str]:
    """The command's exit status on this rank, and what it wrote to stdout and stderr."""
    variables = {"XMOE_CACHE_DIR": cache, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # As torchrun does it: no rank opens the port, which the test holds.
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    LinkClock(["here", "here"]).install()
    out, err, status = io.StringIO(), io.StringIO(), None
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["xmoe", "bench", "links", "--max-mib", "1", "--rounds", "3", *arguments])
        try:
            cli.main()
        except SystemExit as stop:
            status = stop.code
    return status, out.getvalue(), err.getvalue()


def launch(cache: Path, *arguments: str) -> list[tuple[object, str, str]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_ranks(2, run_command, store.port, str(cache), [*arguments], init=False)


def test_the_command_keeps_what_jobs_on_these_hosts_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("XMOE_LINKS", raising=False)
    ranks = launch(tmp_path, "--json")
    assert [status for status, _, _ in ranks] == [0, 0], ranks
    assert ranks[1][1] == ""
    lines = [json.loads(line) for line in ranks[0][1].splitlines()]
    assert [(line["pattern"], line["link"]) for line in lines] == [
        ("all-to-all", "intra-node"),
        ("point-to-point", "intra-node"),
    ]
    setting = Setting(ranks_per_node=2, backend="gloo", device="cpu")
    links, source = find_links([socket.gethostname()], setting, needed={"intra_node"})
    assert source == str(links_path([socket.gethostname()], 2)) == lines[0]["file"]
    assert links.intra_node.bandwidth_bytes_per_s == pytest.approx(lines[0]["bandwidth_gb_per_s"] * 1e9)
    assert links.intra_node.latency_s == pytest.approx(lines[0]["latency_us"] * 1e-6)


def test_a_file_that_cannot_be_written_fails_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ranks = launch(tmp_path, "--out", str(tmp_path / "file" / "links.json"))
    assert [status for status, _, _ in ranks] == [2, 2], ranks
    assert all("cannot be written" in said.splitlines()[-1] for _, _, said in ranks)


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
