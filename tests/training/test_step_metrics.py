"""What a step reports, and that one all-reduce gives every rank the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from xmoe.metrics import LayerLoad, Traffic
from xmoe.testing import run_ranks
from xmoe.training.step_metrics import LocalStep, StepMetrics, reduce_step


def load(
    name: str,
    selected: list[int],
    routed: list[int],
    *,
    received: int = 5,
    between_nodes: int = 3,
    stage_s: Mapping[str, float] | None = None,
) -> LayerLoad:
    return LayerLoad(
        name=name,
        selected_E=torch.tensor(selected),
        routed_E=torch.tensor(routed),
        computed_rows=sum(routed),
        all_to_all_bytes=100,
        between_nodes_bytes=60,
        to_self_bytes=7,
        traffic=Traffic(between_nodes=between_nodes, inside_node=2, received_between_nodes=received, assigned_remote=4),
        stage_s=stage_s or {},
    )


def local(*loads: LayerLoad, stop: bool = False) -> LocalStep:
    return LocalStep(
        loss_sum_nats=2 * math.log(2), aux_loss_sum=0.5, num_micro_batches=2, num_tokens=64, loads=loads, stop=stop
    )


def test_tokens_that_ranks_share_are_counted_once() -> None:
    """Two ranks of one tensor-parallel group have counted the same selections: what they sum to is halved."""
    both = replace(local(load("a", [4, 0], [2, 0])), num_sharers=2)
    for selected, routed in run_ranks(2, reduced_loads, both):
        assert (selected, routed) == ([[4, 0]], [[2, 0]])


def reduced_loads(step: LocalStep) -> tuple[list[list[int]], list[list[int]]]:
    metrics = reduce_step(step, torch.device("cpu"))
    return metrics.selected_LE.tolist(), metrics.routed_LE.tolist()


def test_one_rank() -> None:
    loads = [load("blocks.1.moe.deepspeed_moe", [4, 0, 2, 2], [2, 0, 2, 2]), load("b", [2, 2, 2, 2], [2, 2, 2, 2])]
    metrics = reduce_step(local(*loads), torch.device("cpu"))
    assert metrics.loss_bits == pytest.approx(1.0)
    assert metrics.aux_loss == 0.25
    assert metrics.num_tokens == 64
    assert [layer.name for layer in metrics.layers] == ["blocks.1.moe", "b"]
    assert metrics.selected_LE.tolist() == [[4, 0, 2, 2], [2, 2, 2, 2]]
    assert metrics.computed_rows == 14
    assert metrics.all_to_all_bytes == 200
    assert metrics.between_nodes_bytes == 120
    assert metrics.traffic == Traffic(between_nodes=6, inside_node=4, received_between_nodes=10, assigned_remote=8)
    assert metrics.traffic.redundancy == 0.25
    for layer, rows in zip(metrics.layers, (6, 8), strict=True):
        assert layer.computed_rows == rows
        assert (layer.to_self_bytes, layer.inside_node_bytes, layer.between_nodes_bytes) == (7, 40, 60)
        assert (layer.stage_s, layer.slowest_stage_s) == ({}, {})
    assert metrics.busiest_receiver == 1.0
    assert metrics.dropped_share == pytest.approx(2 / 16)
    # Loads 4, 0, 2, 2 have mean 2 and standard deviation sqrt(2); the other layer is even.
    assert metrics.load_cv == pytest.approx(math.sqrt(2) / 2 / 2)
    assert metrics.num_dead_experts == 1
    assert not metrics.stop


def test_a_model_without_moe_layers() -> None:
    metrics = reduce_step(local(), torch.device("cpu"))
    assert (metrics.dropped_share, metrics.load_cv, metrics.num_dead_experts) == (0.0, 0.0, 0)
    assert (metrics.layers, metrics.traffic, metrics.busiest_receiver) == ((), Traffic(), 1.0)


def step_of_rank() -> StepMetrics:
    rank = torch.distributed.get_rank()
    own = load("b", [rank, 2**40], [0, 2**40], received=3 + 6 * rank)
    return reduce_step(local(own, stop=rank == 1), torch.device("cpu"))


@pytest.mark.dist
def test_ranks_agree_on_sums_and_on_stopping_when_one_was_asked() -> None:
    steps = run_ranks(2, step_of_rank)
    for step in steps:
        assert step.stop
        assert step.num_tokens == 128
        assert step.selected_LE.tolist() == [[1, 2**41]]
        assert step.received_W.tolist() == step.layers[0].received_W.tolist() == [3, 9]
        assert step.busiest_receiver == 1.5
        assert step.loss_bits == pytest.approx(1.0)


def two_layers_of_rank(timed_ranks: tuple[int, ...]) -> tuple[StepMetrics, int]:
    """The step, and how many collectives it took."""
    rank = torch.distributed.get_rank()
    one, other = ({"experts": 1.0 + rank, "dispatch": 0.5}, {"experts_backward": 0.3 - 0.1 * rank, "unheard_of": 9.0})
    timed = rank in timed_ranks
    loads = [
        load("a", [1, 2], [1, 1], received=10 * rank, between_nodes=rank, stage_s=one if timed else None),
        load("b", [0, 4], [0, 4], received=8 - 8 * rank, between_nodes=4, stage_s=other if timed else None),
    ]
    all_reduce, calls = torch.distributed.all_reduce, []
    torch.distributed.all_reduce = lambda *args, **options: calls.append(1) or all_reduce(*args, **options)
    return reduce_step(local(*loads), torch.device("cpu")), len(calls)


@pytest.mark.dist
def test_each_layer_has_its_own_rows_receivers_and_times() -> None:
    for step, num_collectives in run_ranks(2, two_layers_of_rank, (0, 1)):
        a, b = step.layers
        assert (a.traffic.between_nodes, b.traffic.between_nodes) == (1, 8)
        assert (a.traffic.redundancy, b.traffic.redundancy) == (1 - 1 / 8, 0.0)
        assert (a.received_W.tolist(), b.received_W.tolist()) == ([0, 10], [8, 0])
        assert (a.computed_rows, b.computed_rows) == (4, 8)
        assert (a.to_self_bytes, a.inside_node_bytes, a.between_nodes_bytes) == (14, 80, 120)
        # Each layer has its own busiest rank: over both layers they even out.
        assert step.received_W.tolist() == [8, 10]
        assert step.busiest_receiver == pytest.approx(10 / 9)
        assert (step.traffic.between_nodes, step.all_to_all_bytes, step.between_nodes_bytes) == (9, 400, 240)
        assert a.stage_s == {"dispatch": 0.5, "experts": 1.5}
        assert a.slowest_stage_s == {"dispatch": 0.5, "experts": 2.0}
        assert b.stage_s == pytest.approx({"experts_backward": 0.25})
        assert b.slowest_stage_s == pytest.approx({"experts_backward": 0.3})
        assert step.selected_LE.tolist() == [[2, 4], [0, 8]]
        assert step.routed_LE.tolist() == [[2, 2], [0, 8]]
        assert num_collectives == 2


@pytest.mark.dist
def test_ranks_that_time_nothing_follow_those_that_do() -> None:
    for step, num_collectives in run_ranks(2, two_layers_of_rank, (1,)):
        assert step.layers[0].stage_s == {"dispatch": 0.25, "experts": 1.0}
        assert step.layers[0].slowest_stage_s == {"dispatch": 0.5, "experts": 2.0}
        assert num_collectives == 2
    for step, num_collectives in run_ranks(2, two_layers_of_rank, ()):
        assert [layer.stage_s for layer in step.layers] == [layer.slowest_stage_s for layer in step.layers] == [{}, {}]
        assert num_collectives == 1
