"""The dispatch benchmark on a small cluster, and that its checks and counters can fail."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import dispatch_ranks
import dispatch_timing
import pytest
import torch
import torch.distributed as dist
from dispatch_peers import expert_scales
from dispatch_phased import reordered

from xmoe.testing import run_ranks
from xmoe.testing_cluster import Traffic, unavailable

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_dispatch.py"

CASE = dispatch_ranks.Case(
    nodes=2,
    ranks_per_node=2,
    experts=8,
    k=3,
    hidden=16,
    tokens=5,
    dtype="float32",
    popularity=0.0,
    link_mbit_per_s=100.0,
    rounds=1,
    timeout_s=30.0,
    contestants=("flat",),
)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_contestant_is_checked_counted_and_timed(tmp_path, monkeypatch, capsys):
    if reason := unavailable():
        pytest.skip(reason)
    pictures = {"--picture": tmp_path / "time.png", "--speedup-picture": tmp_path / "speedup.png"}
    sizes = {"--cluster": "2x2", "--link-mbit": 100, "--k": "2,4", "--experts": 16, "--hidden": 512, "--tokens": 64}
    options = {**sizes, "--routing": "skewed", "--dtype": "bf16", "--rounds": 2, **pictures}
    arguments = ["--json", *(part for option in options.items() for part in option)]
    # Run as a script is, in a process that has imported what it needs.
    monkeypatch.setattr(sys, "argv", [str(BENCH), *map(str, arguments)])
    runpy.run_path(str(BENCH), run_name="__main__")
    assert all(picture.stat().st_size > 10_000 for picture in pictures.values())
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {result["setting"]["k"] for result in results} == {2, 4}
    found = {
        (result["metric"], result["setting"].get("dispatch")): result
        for result in results
        if result["setting"]["k"] == 4
    }

    def value(metric: str, name: str) -> float:
        return found[f"dispatch.{metric}", name]["value"]

    ours = ("gpu", "node", "node+gpu")
    everybody = (*ours, "flat", "piper", "deepspeed", "autoep")
    for name in everybody:
        assert value("time", name) > 0
        assert 0.95 < value("counted_over_interface_bytes", name) < 1.0
    for name in everybody[:3] + everybody[4:]:
        low, high = found["dispatch.speedup_over_flat", name]["spread"]
        assert low <= value("speedup_over_flat", name) <= high
    for name in ours:
        assert value("speedup_over_flat", name) == pytest.approx(value("time", "flat") / value("time", name))
        assert value("speedup_over_deepspeed", name) == pytest.approx(value("time", "deepspeed") / value("time", name))
        assert value("speedup_over_autoep", name) == pytest.approx(value("time", "autoep") / value("time", name))
        assert value("host_syncs_per_layer", name) == 1
    rows = {name: value("inter_node_rows_over_lower_bound", name) for name in everybody}
    assert rows["node"] == rows["node+gpu"] == 1.0
    assert 1.0 < rows["gpu"] < rows["flat"] == rows["piper"] == rows["autoep"] < rows["deepspeed"]
    setting = found["dispatch.speedup_over_flat", "node+gpu"]["setting"]
    wanted = {"nodes": 2, "ranks_per_node": 2, "dispatch": "node+gpu", "k": 4, "link_mbit_per_s": 100.0}
    wanted |= {"routing": "skewed", "dtype": "bfloat16"}
    assert {key: setting[key] for key in wanted} == wanted


def _contestant(fault: str):
    """The right answer from one rank's own tokens, but for ``fault``."""

    def run(x, ids, weights):
        if fault == "expert":
            ids = (ids + (torch.arange(ids.numel()).view_as(ids) == 7)) % CASE.experts
        if fault == "dtype":
            dist.all_to_all_single(torch.empty(1, 16).double(), torch.ones(1, 16).double())
        used = weights.detach() if fault == "weight" else weights
        out = x * (used * expert_scales(CASE.experts)[ids.long()]).sum(dim=1, keepdim=True)
        extra = (x - x.detach())[:1] if fault == "row" else 0.0  # changes the gradient alone
        return out + 0.0 * weights.sum() + extra

    return run


# Each fault, and what is said of it.
EXAMINED = {
    "none": "right",
    "dtype": "it: rows travelled as ['float64'], not as float32",
    "expert": "it: output: error",
    "weight": "it: weight gradient: error",
    "row": "it: input gradient: error",
}


def _examined() -> dict[str, str]:
    still = Traffic(sent_bytes=0, received_bytes=0, looped_bytes=0, sent_packets=0, received_packets=0)
    dispatch_ranks.read_traffic = lambda: still
    inputs = dispatch_ranks.routing_of(CASE)
    upstream = torch.ones_like(inputs[0])
    said = {}
    for fault in EXAMINED:
        try:
            dispatch_ranks.examine("it", CASE, _contestant(fault), inputs, upstream)
            said[fault] = "right"
        except RuntimeError as error:
            said[fault] = str(error)
    return said


@pytest.mark.dist
def test_a_wrong_exchange_is_not_timed():
    (found,) = run_ranks(1, _examined)
    for fault, said in EXAMINED.items():
        assert found[fault].startswith(said), fault


def _shares() -> tuple[list[float], list[float]]:
    """Of the tokens, what each of eight experts gets, the greatest first: uniformly and by Zipf's law."""
    found = []
    for popularity in (0.0, 1.0):
        case = replace(CASE, k=1, tokens=20_000, popularity=popularity)
        (_, ids, _), again = dispatch_ranks.routing_of(case), dispatch_ranks.routing_of(case)
        assert torch.equal(ids, again[1])
        counts = torch.bincount(ids.reshape(-1).long(), minlength=case.experts)
        found.append(sorted((counts / case.tokens).tolist(), reverse=True))
    return tuple(found)


@pytest.mark.dist
def test_skewed_routing_follows_zipf_and_is_the_same_in_every_run():
    ((uniform, skewed),) = run_ranks(1, _shares)
    assert uniform == pytest.approx([1 / 8] * 8, abs=0.015)
    total = sum(1 / place for place in range(1, 9))
    assert skewed == pytest.approx([1 / place / total for place in range(1, 9)], abs=0.015)


def _counted_rows():
    own = dist.get_rank()
    transport = dispatch_ranks.Transport(ranks_per_node=2, row_bytes=16)
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][own // 2]
    with transport.counting():
        rows = torch.zeros(10, 4)  # 1, 2, 3 and 4 rows to ranks 0 to 3
        sizes = [torch.zeros(n * 4 + 4, 4) for n in range(4)]
        dist.all_to_all_single(sizes[own], rows, [own + 1] * 4, [1, 2, 3, 4])
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4))
        work = dist.all_to_all_single(torch.zeros(2, 4), torch.zeros(2, 4), group=pair, async_op=True)
        work.wait()
    dist.all_to_all_single(torch.zeros(4), torch.zeros(4))  # not counted
    return transport.crossing_rows, transport.crossing_bytes, transport.staying_bytes


@pytest.mark.dist
def test_the_transport_is_counted_by_kinds_of_link():
    found = run_ranks(4, _counted_rows)
    scalars, pair = 4, 16
    assert found[0] == (7, 7 * 16 + 2 * scalars, 2 * 16 + scalars + pair)
    assert found[3] == (3, 3 * 16 + 2 * scalars, 3 * 16 + scalars + pair)


def test_host_reads_are_counted_once_each_and_only_inside():
    x, mask = torch.arange(4), torch.tensor([True, False, True, False])
    reads = dispatch_ranks.HostReads()
    with reads.counting():
        seen = [x.tolist(), x[0].item(), int(x[1]), bool(mask[0]), float(x[2]), x.numpy()]
        seen += [x.nonzero(), torch.unique(x), x[mask], torch.repeat_interleave(x, x), torch.bincount(x)]
        assert reads.count == len(seen)
        free = [x[1:3], x[[0, 1]], x.sum(), torch.repeat_interleave(x, x, output_size=6), x.index_select(0, x)]
        assert reads.count == len(seen)
    x.tolist()
    assert reads.count == len(seen)
    assert free


def test_blocks_are_listed_by_their_second_index_first():
    rows = torch.arange(6)[:, None]
    assert reordered(rows, [[1, 2], [3, 0]])[:, 0].tolist() == [0, 3, 4, 5, 1, 2]
    assert reordered(rows[:0], [[0, 0, 0]]).shape == (0, 1)


def test_pairs_are_the_fewest_rows_that_cross(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    ids = torch.tensor([[0, 1, 2], [4, 5, 6], [3, 4, 7], [0, 3, 5], [2, 1, 0]])  # experts 4 to 7 are on node 1
    assert dispatch_ranks.crossing_pairs(CASE, ids) == 3


def test_a_median_is_the_slowest_ranks():
    assert dispatch_timing.median_of_slowest([[1.0, 5.0, 2.0], [3.0, 1.0, 1.0]]) == 3.0
