"""The overlap benchmark on a small cluster, and that its check can fail."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import overlap_ranks
import pytest
import torch
import torch.distributed as dist
from overlap_trace import Span, Trace, traced
from torch import nn

from xmoe.testing import run_ranks
from xmoe.testing_cluster import unavailable

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_overlap.py"

CASE = overlap_ranks.Case(
    nodes=1,
    ranks_per_node=2,
    experts=8,
    k=3,
    hidden=16,
    ffn=24,
    shared_ffn=8,
    tokens=12,
    link_mbit_per_s=100.0,
    rounds=1,
    timeout_s=30.0,
    dispatchers=("flat",),
    chunks=(1, 3),
)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_number_of_chunks_is_checked_and_timed(tmp_path, monkeypatch, capsys):
    if reason := unavailable():
        pytest.skip(reason)
    picture = tmp_path / "overlap.png"
    sizes = {"--hidden": 64, "--ffn": 96, "--shared-ffn": 32, "--experts": 8, "--k": 3, "--tokens": 64}
    options = {**sizes, "--cluster": "2x2", "--link-mbit": 50, "--rounds": 2, "--picture": picture}
    arguments = ["--json", "--chunks", 3, *(part for item in options.items() for part in item)]
    # Run as a script is, in a process that has imported what it needs.
    monkeypatch.setattr(sys, "argv", [str(BENCH), *map(str, arguments)])
    runpy.run_path(str(BENCH), run_name="__main__")
    assert picture.stat().st_size > 10_000
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(each["metric"], each["setting"]["dispatch"], each["setting"]["chunks"]): each for each in results}
    for name in ("flat", "node+gpu"):
        for chunks in (1, 3):
            parts = ("time", "experts_alone", "exchanges_alone", "shared_alone")
            assert all(found[f"overlap.{part}", name, chunks]["value"] > 0 for part in parts)
            assert 0 <= found["overlap.share_overlapped", name, chunks]["value"] <= 1
        assert ("overlap.speedup_over_one_chunk", name, 1) not in found
        one, three = (found["overlap.time", name, chunks]["value"] for chunks in (1, 3))
        result = found["overlap.speedup_over_one_chunk", name, 3]
        assert result["value"] == pytest.approx(one / three)
        low, high = result["spread"]
        assert low <= result["value"] <= high
    setting = found["overlap.speedup_over_one_chunk", "flat", 3]["setting"]
    wanted = {"nodes": 2, "ranks_per_node": 2, "dispatch": "flat", "chunks": 3, "link_mbit_per_s": 50.0}
    wanted |= {"tokens": 64, "hidden": 64, "ffn": 96, "shared_ffn": 32, "experts": 8, "k": 3}
    assert {key: setting[key] for key in wanted} == wanted


def _emulated() -> dict[str, float]:
    case = replace(CASE, emulated_us=1000.0)
    layer = overlap_ranks.build(case)
    x, upstream = torch.randn(2, case.tokens, case.hidden)
    found = {}
    for (_, chunks), dispatcher in overlap_ranks.dispatchers_of(case).items():
        layer.set_dispatcher(dispatcher)
        results = overlap_ranks.results_of(layer, x, upstream)
        found[chunks] = results
        trace = traced(layer, lambda: overlap_ranks.step(layer, x, upstream))
        slept_s = sum(span.end_s - span.start_s for span in trace.stages if span.name.startswith("experts"))
    overlap_ranks.check(("flat", 3), found[3], found[1])
    rows = layer.take_counters().computed_rows // 4  # two steps of either number of chunks
    return {"slept_s": slept_s, "least_s": rows * 1e-3}


@pytest.mark.dist
def test_emulated_experts_take_their_time_in_both_directions():
    for found in run_ranks(2, _emulated):
        assert found["slept_s"] >= found["least_s"] > 0


# Each fault, and what is said of it; "": none.
VERDICTS = {
    "": "right",
    "output": "flat in 3 chunks: output",
    "experts.mlps.0.up_proj.weight": "flat in 3 chunks: experts.mlps.0.up_proj.weight",
    "gate.wg.weight": "flat in 3 chunks: gate.wg.weight",
    "missing": "('flat', 3): gradients of other parameters: ['gradient of the input']",
}


def _verdicts() -> dict[str, str]:
    layer = overlap_ranks.build(CASE)
    x, upstream = torch.randn(2, CASE.tokens, CASE.hidden)
    found = []
    for dispatcher in overlap_ranks.dispatchers_of(CASE).values():
        layer.set_dispatcher(dispatcher)
        found.append(overlap_ranks.results_of(layer, x, upstream))
    whole, cut = found
    verdicts = {}
    for fault in VERDICTS:
        spoilt = {name: value.clone() for name, value in cut.items()}
        if fault == "missing":
            del spoilt["gradient of the input"]
        elif fault:
            spoilt[fault].view(-1)[0] += 0.1
        try:
            overlap_ranks.check(CASE.kinds[-1], spoilt, whole)
            verdicts[fault] = "right"
        except RuntimeError as error:
            verdicts[fault] = str(error)
    return verdicts


@pytest.mark.dist
def test_other_results_than_those_of_one_chunk_are_not_timed():
    for verdicts in run_ranks(2, _verdicts):
        for fault, said in VERDICTS.items():
            assert verdicts[fault].startswith(said), fault


def _traces() -> dict[int, Trace]:
    layer = overlap_ranks.build(CASE)
    x, upstream = torch.randn(2, CASE.tokens, CASE.hidden)
    traces = {}
    for (_, chunks), dispatcher in overlap_ranks.dispatchers_of(CASE).items():
        layer.set_dispatcher(dispatcher)
        traces[chunks] = traced(layer, lambda: overlap_ranks.step(layer, x, upstream))
        dist.barrier()
        assert isinstance(layer.shared_mlp, nn.Module)
        assert not layer.clock.enabled
    return traces


@pytest.mark.dist
def test_a_trace_has_every_exchange_and_stage():
    for traces in run_ranks(2, _traces):
        assert set(traces) == {1, 3}
        for chunks, trace in traces.items():
            assert len(trace.exchanges) == 4 * chunks  # out and home, forward and backward
            names = [span.name for span in trace.stages]
            for stage in ("experts", "experts_backward"):
                assert names.count(stage) == chunks
            assert names.count("shared_experts") == names.count("shared_experts_backward") == 1
            assert all(0 <= span.start_s <= span.end_s <= trace.seconds for span in trace.stages)


def test_what_is_overlapped_is_what_was_not_waited_for():
    def span(name: str, start: float, end: float) -> Span:
        return Span(name=name, start_s=start, end_s=end)

    exchanges = [span("out", 1.0, 3.0), span("out", 2.0, 5.0), span("home", 8.0, 10.0)]
    stages = [span("experts", 0.0, 4.0), span("dispatch_wait", 4.0, 6.0), span("combine_wait", 9.0, 10.0)]
    assert Trace(stages=stages, exchanges=exchanges, seconds=11.0).overlapped_share() == pytest.approx(4 / 6)
    assert Trace(stages=stages, seconds=11.0).overlapped_share() == 0.0
