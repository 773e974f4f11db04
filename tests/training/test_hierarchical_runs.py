"""``xmoe train`` with hierarchical dispatch, and with TP and sequence-sharded MoE blocks: losses are those of flat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs
import pytest

CONFIGS = Path(__file__).resolve().parents[2] / "launch/configs"

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]


def train(work: Path, config: str, *settings: str, name: str, world: int = 4) -> list[dict[str, Any]]:
    """Lines of 20 training steps of the configuration, less its width, on as many ranks as hold its experts."""
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
        "run.steps=20",
        "run.eval_interval=20",
        "run.eval_sequences=4",
        "run.final_eval_sequences=4",
    ]
    overrides = [argument for setting in (*small, *settings) for argument in ("--set", setting)]
    answers = jobs.run_on_ranks(
        work, "train", "--config", str(CONFIGS / config), "--name", name, *overrides, world=world
    )
    assert answers == [(0, "")] * world
    lines = [json.loads(line) for line in (work / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def check_equal(lines: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    assert len(lines) == len(others) == 20
    for one, other in zip(lines, others, strict=True):
        assert one["loss_bits_per_byte"] == pytest.approx(other["loss_bits_per_byte"], abs=1e-5)
        assert one["load_cv"] == pytest.approx(other["load_cv"], abs=1e-2)


def test_the_losses_of_twenty_steps_are_those_of_flat_dispatch(tmp_path: Path) -> None:
    jobs.write_text(tmp_path / "text")
    config = "moe_cpu_2x2.json"
    hierarchical = train(tmp_path, config, name="hierarchical")
    flat = train(tmp_path, config, "xmoe.dispatch=flat", "xmoe.ranks_per_node=null", name="flat")
    check_equal(hierarchical, flat)
    # Of four choices among two nodes some share a row: fewer bytes leave the ranks.
    assert sum(line["all_to_all_bytes"] for line in hierarchical) < sum(line["all_to_all_bytes"] for line in flat)


def test_the_losses_of_twenty_sharded_steps_are_those_of_the_whole_layer(tmp_path: Path) -> None:
    jobs.write_text(tmp_path / "text")
    config = "moe_cpu_tp2.json"
    sharded = train(tmp_path, config, name="sharded")
    whole = train(tmp_path, config, "xmoe.sequence_shard=false", name="whole")
    check_equal(sharded, whole)
    # The same tokens of the same two data-parallel ranks, each with a rank of its own.
    single = train(tmp_path, config, "xmoe.sequence_shard=false", "model.tp_size=1", name="single", world=2)
    check_equal(sharded, single)
