"""``xmoe train`` with hierarchical dispatch, and with TP and sequence-sharded MoE blocks: losses are those of flat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs
import pytest

CONFIGS = Path(__file__).resolve().parents[2] / "launch/configs"
STEPS = 20

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]


def train(work: Path, config: str, *settings: str, name: str, world: int = 4) -> list[dict[str, Any]]:
    """Lines of STEPS steps of the configuration, less its width, on as many ranks as hold its experts."""
    small = [
        "train_micro_batch_size_per_gpu=2",
        "model.hidden_size=32",
        "model.num_layers=2",
        f"model.ep_size={world}",
        "model.dense_ffn_size=32",
        "model.expert_ffn_size=16",
        "data.sequence_length=32",
        'data.paths=["text"]',
        'data.cache_dir="cache"',
        f"run.steps={STEPS}",
        f"run.eval_interval={STEPS}",
        "run.eval_sequences=4",
        "run.final_eval_sequences=4",
    ]
    overrides = [argument for setting in (*small, *settings) for argument in ("--set", setting)]
    answers = jobs.run_on_ranks(
        work, "train", "--config", str(CONFIGS / config), "--name", name, *overrides, world=world
    )
    assert answers == [(0, "")] * world
    return [json.loads(line) for line in (work / f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def of_kind(kind: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == kind]


def check_equal(lines: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    steps, other_steps = of_kind("train", lines), of_kind("train", others)
    assert len(steps) == len(other_steps) == STEPS
    for one, other in zip(steps, other_steps, strict=True):
        assert one["loss_bits_per_byte"] == pytest.approx(other["loss_bits_per_byte"], abs=1e-5)
        assert one["load_cv"] == pytest.approx(other["load_cv"], abs=1e-2)


def test_the_losses_are_those_of_flat_dispatch(tmp_path: Path) -> None:
    jobs.write_text(tmp_path / "text")
    config = "moe_cpu_2x2.json"
    hierarchical = train(tmp_path, config, name="hierarchical")
    plain = ["xmoe.dispatch=flat", "xmoe.ranks_per_node=null", "xmoe.stage_times=false"]
    flat = train(tmp_path, config, *plain, name="flat")
    check_equal(hierarchical, flat)
    # Of four choices among two nodes some share a row: fewer bytes leave the ranks.
    sent, sent_flat = (
        sum(line["all_to_all_bytes"] for line in of_kind("train", lines)) for lines in (hierarchical, flat)
    )
    assert sent < sent_flat
    check_dispatch_lines(hierarchical, row_bytes=32 * 4)
    assert (tmp_path / "runs/hierarchical/dispatch_stages.png").stat().st_size > 0
    assert not any("stage_s" in line for line in of_kind("dispatch", flat))
    assert not (tmp_path / "runs/flat/dispatch_stages.png").exists()


def check_dispatch_lines(lines: list[dict[str, Any]], *, row_bytes: int) -> None:
    """Every step of the one MoE layer has its line, which agrees with what the step says of all layers."""
    windows, steps = of_kind("dispatch", lines), of_kind("train", lines)
    assert [(line["first_step"], line["step"], line["layer"]) for line in windows] == [
        (step, step, "blocks.1.moe") for step in range(1, STEPS + 1)
    ]
    for window, step in zip(windows, steps, strict=True):
        assert window["inside_node_bytes"] + window["between_nodes_bytes"] == step["all_to_all_bytes"]
        assert window["between_nodes_bytes"] == step["between_nodes_bytes"]
        for link in ("to_self", "inside_node", "between_nodes"):
            assert window[f"{link}_bytes"] == 4 * window[f"{link}_rows"] * row_bytes
        assert window["redundancy"] == pytest.approx(step["redundancy"])
        assert window["busiest_receiver"] == pytest.approx(step["busiest_receiver"])
        stages = {"route", "plan", "dispatch", "experts", "combine", "shared_experts"}
        stages |= {"dispatch_backward", "experts_backward", "combine_backward"}
        waits = {f"{stage}_wait" for stage in ("plan", "dispatch", "combine", "dispatch_backward", "combine_backward")}
        for seconds in (window["stage_s"], window["slowest_stage_s"]):
            assert set(seconds) == stages | waits
            assert all(seconds[wait] <= seconds[wait.removesuffix("_wait")] for wait in waits)
        mean, slowest = window["stage_s"], window["slowest_stage_s"]
        assert all(mean[stage] <= slowest[stage] * (1 + 1e-9) for stage in stages | waits)


def test_the_losses_of_sharded_layers_are_those_of_one_rank_for_each_batch(tmp_path: Path) -> None:
    jobs.write_text(tmp_path / "text")
    config = "moe_cpu_tp2.json"
    sharded = train(tmp_path, config, name="sharded")
    # The same tokens of the same two data-parallel ranks, each with a rank of its own.
    single = train(tmp_path, config, "xmoe.sequence_shard=false", "model.tp_size=1", name="single", world=2)
    check_equal(sharded, single)
