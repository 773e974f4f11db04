"""The same run in other ways gives the same losses: activation checkpointing, ZeRO stages, expert parallelism."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jobs
import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]


def losses(work: Path, name: str, *settings: str, world: int = 2) -> list[dict[str, Any]]:
    overrides = [argument for setting in settings for argument in ("--set", setting)]
    answers = jobs.run_on_ranks(work, "train", "--config", "run.json", "--name", name, *overrides, world=world)
    assert answers == [(0, "")] * world
    lines = [json.loads(line) for line in (work / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def selections(work: Path, name: str) -> list[list[int]]:
    lines = [json.loads(line) for line in (work / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [line["selected"] for line in lines if line["kind"] == "expert_load"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("modes")
    jobs.write_text(work / "text")
    data = {"paths": ["text"], "cache_dir": "cache"}
    content = jobs.run_file(data=data, model={"ep_size": 2}, run={"steps": 4}, xmoe={"input_jitter": 0.0})
    (work / "run.json").write_text(json.dumps(content))
    return work


@pytest.fixture(scope="module")
def plain(work: Path) -> list[dict[str, Any]]:
    return losses(work, "plain")


@pytest.mark.parametrize(
    ("checkpointing", "other"),
    [
        ("reentrant", "zero_optimization.stage=0"),
        ("non_reentrant", "zero_optimization.stage=2"),
        ("deepspeed", "model.ep_size=1"),
    ],
)
def test_equal_losses_norms_and_loads(work: Path, plain: list[dict[str, Any]], checkpointing: str, other: str) -> None:
    found = losses(work, checkpointing, f"model.activation_checkpointing={checkpointing}", other)
    for one, other in zip(plain, found, strict=True):
        assert other["loss_bits_per_byte"] == pytest.approx(one["loss_bits_per_byte"], abs=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        assert other["load_cv"] == pytest.approx(one["load_cv"], abs=1e-9)
        assert other["effective_tflops_per_s"] == pytest.approx(other["nominal_tflops_per_s"])


def check_two_ranks_for_each_batch(found: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    for one, other in zip(plain, found, strict=True):
        assert other["loss_bits_per_byte"] == pytest.approx(one["loss_bits_per_byte"], abs=1e-6)
        assert other["aux_loss"] == pytest.approx(one["aux_loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        assert other["load_cv"] == pytest.approx(one["load_cv"], abs=1e-9)
        assert other["effective_tflops_per_s"] == pytest.approx(other["nominal_tflops_per_s"])


def test_two_ranks_for_each_batch_have_the_losses_of_one(work: Path, plain: list[dict[str, Any]]) -> None:
    settings = ["model.tp_size=2", "model.ep_size=4", "xmoe.sequence_shard=false"]
    check_two_ranks_for_each_batch(losses(work, "whole", *settings, world=4), plain)
    assert selections(work, "whole") == selections(work, "plain") != []


def test_two_ranks_that_share_each_batch_have_the_losses_of_one_and_resume(
    work: Path, plain: list[dict[str, Any]]
) -> None:
    settings = ["model.tp_size=2", "model.ep_size=2", "xmoe.sequence_shard=true", "run.save_interval=2"]
    whole = losses(work, "saved", *settings, world=4)
    check_two_ranks_for_each_batch(whole, plain)
    assert selections(work, "saved") == selections(work, "plain")
    shutil.rmtree(work / "runs/saved/checkpoints/step_00000004")
    overrides = [argument for setting in settings for argument in ("--set", setting)]
    command = ["train", "--config", "run.json", "--name", "saved", "--resume", *overrides]
    assert jobs.run_on_ranks(work, *command, world=4) == [(0, "")] * 4
    lines = [json.loads(line) for line in (work / "runs/saved/metrics.jsonl").read_text().splitlines()]
    again = [line for line in lines if line["kind"] == "train"]
    assert [line["loss_bits_per_byte"] for line in again] == [line["loss_bits_per_byte"] for line in whole]


def test_dropped_rows_are_reported_and_not_counted_as_work(work: Path) -> None:
    for step in losses(work, "capacity", "model.capacity_factor=1.0"):
        assert 0 < step["dropped_share"] < 0.5
        assert step["effective_tflops_per_s"] < step["nominal_tflops_per_s"]
