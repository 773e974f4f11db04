"""What a step reports, and that one all-reduce gives every rank the same."""

from __future__ import annotations

import math

import pytest
import torch

from xmoe.metrics import LayerLoad, Traffic
from xmoe.testing import run_ranks
from xmoe.training.step_metrics import LocalStep, StepMetrics, reduce_step


def load(name: str, selected: list[int], routed: list[int], *, received: int = 5) -> LayerLoad:
    return LayerLoad(
        name=name,
        selected_E=torch.tensor(selected),
        routed_E=torch.tensor(routed),
        computed_rows=sum(routed),
        all_to_all_bytes=100,
        between_nodes_bytes=60,
        traffic=Traffic(between_nodes=3, inside_node=2, received=received, assigned_remote=4),
    )


def local(*loads: LayerLoad, stop: bool = False) -> LocalStep:
    return LocalStep(
        loss_sum_nats=2 * math.log(2), aux_loss_sum=0.5, num_micro_batches=2, num_tokens=64, loads=loads, stop=stop
    )


def test_one_rank() -> None:
    loads = [load("blocks.1.moe.deepspeed_moe", [4, 0, 2, 2], [2, 0, 2, 2]), load("b", [2, 2, 2, 2], [2, 2, 2, 2])]
    metrics = reduce_step(local(*loads), torch.device("cpu"))
    assert metrics.loss_bits == pytest.approx(1.0)
    assert metrics.aux_loss == 0.25
    assert metrics.num_tokens == 64
    assert metrics.layers == ("blocks.1.moe", "b")
    assert metrics.selected_LE.tolist() == [[4, 0, 2, 2], [2, 2, 2, 2]]
    assert metrics.computed_rows == 14
    assert metrics.all_to_all_bytes == 200
    assert metrics.between_nodes_bytes == 120
    assert metrics.traffic == Traffic(between_nodes=6, inside_node=4, received=10, assigned_remote=8)
    assert metrics.traffic.redundancy == 0.25
    assert metrics.busiest_receiver == 1.0
    assert metrics.dropped_share == pytest.approx(2 / 16)
    # Loads 4, 0, 2, 2 have mean 2 and standard deviation sqrt(2); the other layer is even.
    assert metrics.load_cv == pytest.approx(math.sqrt(2) / 2 / 2)
    assert metrics.num_dead_experts == 1
    assert not metrics.stop


def test_a_model_without_moe_layers() -> None:
    metrics = reduce_step(local(), torch.device("cpu"))
    assert (metrics.dropped_share, metrics.load_cv, metrics.num_dead_experts) == (0.0, 0.0, 0)


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
        assert step.received_W.tolist() == [3, 9]
        assert step.busiest_receiver == 1.5
        assert step.loss_bits == pytest.approx(1.0)
