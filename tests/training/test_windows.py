"""Lines by window: what steps measured of each layer, summed or as a mean per step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from xmoe.metrics import Traffic
from xmoe.training.metrics_file import MetricsFile, read_lines
from xmoe.training.step_metrics import LayerStep, StepMetrics
from xmoe.training.windows import LayerWindows


def layer(name: str, received: list[int], *, between_nodes: int = 0, **seconds: Mapping[str, float]) -> LayerStep:
    return LayerStep(
        name=name,
        computed_rows=9,
        to_self_bytes=10,
        inside_node_bytes=20,
        between_nodes_bytes=30,
        traffic=Traffic(to_self=1, inside_node=2, between_nodes=between_nodes, assigned_remote=4),
        received_W=torch.tensor(received),
        stage_s=seconds.get("mean", {}),
        slowest_stage_s=seconds.get("slowest", {}),
    )


def step(*layers: LayerStep, selected: tuple[int, int] = (3, 1)) -> StepMetrics:
    selected_LE = torch.tensor([selected for _ in layers]).view(len(layers), 2)
    return StepMetrics(
        loss_nats=1.0,
        aux_loss=0.0,
        num_tokens=4,
        layers=layers,
        selected_LE=selected_LE,
        routed_LE=selected_LE,
        stop=False,
    )


def lines_of(path: Path, windows: list[list[StepMetrics]], *, last_step: int = 0) -> list[dict[str, Any]]:
    metrics = MetricsFile(path)
    written = LayerWindows(metrics, last_step=last_step)
    for window in windows:
        for measured in window:
            written.add(measured)
        last_step += len(window)
        written.write(last_step)
    metrics.close()
    return list(read_lines(path))


def test_rows_and_bytes_are_sums_and_times_means_per_step(tmp_path: Path) -> None:
    first = step(
        layer("a", [6, 2], between_nodes=2, mean={"experts": 1.0, "dispatch": 4.0}, slowest={"experts": 2.0}),
        layer("b", [0, 0]),
    )
    second = step(
        layer("a", [1, 7], between_nodes=1, mean={"experts": 3.0}, slowest={"experts": 4.0}), layer("b", [1, 1])
    )
    lines = lines_of(tmp_path / "m.jsonl", [[first, second]], last_step=10)
    place = {"step": 12, "first_step": 11}
    assert [(line["kind"], line["layer"]) for line in lines] == [
        (kind, name) for name in "ab" for kind in ("expert_load", "dispatch")
    ]
    assert lines[0] == {"kind": "expert_load", **place, "layer": "a", "selected": [6, 2]}
    assert lines[1] == {
        **{"kind": "dispatch", **place, "layer": "a"},
        **{"to_self_rows": 2, "inside_node_rows": 4, "between_nodes_rows": 3},
        **{"to_self_bytes": 20, "inside_node_bytes": 40, "between_nodes_bytes": 60},
        "redundancy": 1 - 3 / 8,
        # 6 and 7 rows, each over a mean of 4: another rank in each step, which a sum over steps would hide.
        "busiest_receiver": 13 / 8,
        "stage_s": {"experts": 2.0, "dispatch": 2.0},
        "slowest_stage_s": {"experts": 3.0},
    }
    assert lines[3]["busiest_receiver"] == 1.0
    assert "stage_s" not in lines[3]


def test_each_window_starts_anew_and_one_without_steps_is_none(tmp_path: Path) -> None:
    one = step(layer("a", [1, 1], mean={"experts": 1.0}, slowest={"experts": 1.0}))
    lines = lines_of(tmp_path / "m.jsonl", [[one, one, one], [], [one]])
    windows = [line for line in lines if line["kind"] == "dispatch"]
    assert [(line["first_step"], line["step"], line["to_self_rows"]) for line in windows] == [(1, 3, 3), (4, 4, 1)]
    assert [line["stage_s"]["experts"] for line in windows] == [pytest.approx(1.0)] * 2


def test_without_layers_and_on_other_ranks_nothing_is_written(tmp_path: Path) -> None:
    assert lines_of(tmp_path / "m.jsonl", [[step()]]) == []
    silent = LayerWindows(None, last_step=0)
    silent.add(step(layer("a", [1])))
    silent.write(1)
