"""``xmoe train`` on two nodes of two ranks: the losses are those of flat dispatch, whichever way the rows go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs
import pytest

CONFIG = Path(__file__).resolve().parents[2] / "launch/configs/moe_cpu_2x2.json"

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]


def train(work: Path, *settings: str, name: str) -> list[dict[str, Any]]:
    """Lines of 20 training steps of the configuration, less its width, on four ranks."""
    small = [
        "train_micro_batch_size_per_gpu=2",
        "model.hidden_size=32",
        "model.num_layers=2",
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
    answers = jobs.run_on_ranks(work, "train", "--config", str(CONFIG), "--name", name, *overrides, world=4)
    assert answers == [(0, "")] * 4
    lines = [json.loads(line) for line in (work / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def test_the_losses_of_twenty_steps_are_those_of_flat_dispatch(tmp_path: Path) -> None:
    jobs.write_text(tmp_path / "text")
    hierarchical = train(tmp_path, name="hierarchical")
    flat = train(tmp_path, "xmoe.dispatch=flat", "xmoe.ranks_per_node=null", name="flat")
    assert len(hierarchical) == len(flat) == 20
    for one, other in zip(hierarchical, flat, strict=True):
        assert one["loss_bits_per_byte"] == pytest.approx(other["loss_bits_per_byte"], abs=1e-5)
        assert one["load_cv"] == pytest.approx(other["load_cv"], abs=1e-2)
    # Of four choices among two nodes some share a row: fewer bytes leave the ranks.
    assert sum(line["all_to_all_bytes"] for line in hierarchical) < sum(line["all_to_all_bytes"] for line in flat)
