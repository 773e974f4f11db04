"""Mistakes that show only where four ranks meet: one error, the same on every rank, and nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jobs
import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    jobs.write_text(tmp_path / "text")
    write(tmp_path)
    return tmp_path


def write(work: Path, *, bad_rank: int | None = None, **sections: dict[str, Any]) -> None:
    """work/run0.json to run3.json; ``sections`` change one of them, or all."""
    data = {"paths": ["text"], "cache_dir": "cache"}
    for rank in range(jobs.WORLD):
        good = {"data": data, "run": {"name": "r", "steps": 2}}
        bad = {name: good.get(name, {}) | values for name, values in sections.items()}
        changed = bad if bad_rank in (None, rank) else {}
        (work / f"run{rank}.json").write_text(json.dumps(jobs.run_file(**(good | changed))))


def train(work: Path, *arguments: str) -> list[tuple[int, str]]:
    return jobs.run_on_ranks(work, "train", "--config", "run%RANK%.json", *arguments)


def fails_alike(work: Path, message: str, *arguments: str) -> str:
    """Trains, and checks that every rank said the same one line, ended with 2, and changed no file."""
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*")}
    answers = train(work, *arguments)
    assert [code for code, _ in answers] == [2] * 4, answers
    assert len({text for _, text in answers}) == 1, answers
    text = answers[0][1]
    assert message in text
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*")} == before
    return text


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"top_k": 9}}, "model.top_k is 9: must be at most num_experts (8)"),
        ({"model": {"colour": 1}}, "model.colour is 1: unknown key"),
        ({"run": {"steps": "two"}}, "run.steps is 'two'"),
        ({"run": {"seed": 5}}, "--config is 'other settings on rank 2 than on rank 0'"),
    ],
    ids=["too-many", "unknown", "wrong-type", "other-than-rank-0"],
)
def test_a_mistake_on_one_rank(work: Path, sections: dict[str, dict[str, Any]], message: str) -> None:
    write(work, bad_rank=2, **sections)
    fails_alike(work, message)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"paths": ["nowhere"]}}, "data.paths[0] is 'nowhere': no such file or folder"),
        ({"data": {"sequence_length": 100000}}, "data.sequence_length is 100000: the "),
        ({"model": {"ep_size": 8}}, "model.ep_size is 8: must divide the number of ranks (4)"),
        (
            {"model": {"ep_size": 3, "tp_size": 3, "num_experts": 9}},
            "model.ep_size is 3: must divide the number of ranks",
        ),
        ({"model": {"ep_size": 2, "tp_size": 4}}, "model.ep_size is 2: must be a multiple of tp_size (4)"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3"),
        ({"train_micro_batch_size_per_gpu": 0}, "refused by DeepSpeed: Train batch size: 0 has to be"),
    ],
    ids=["missing-path", "short-text", "ep-size", "sizes-of-3", "tp-size", "zero-3", "micro-batch"],
)
def test_a_mistake_on_all_ranks(work: Path, sections: dict[str, Any], message: str) -> None:
    for rank in range(jobs.WORLD):
        content = json.loads((work / f"run{rank}.json").read_text())
        for name, values in sections.items():
            content[name] = content[name] | values if isinstance(values, dict) else values
        (work / f"run{rank}.json").write_text(json.dumps(content))
    fails_alike(work, message)


def test_resuming_nothing(work: Path) -> None:
    assert "start without --resume" in fails_alike(work, "holds no complete checkpoint", "--resume")


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("trained")
    jobs.write_text(work / "text")
    write(work)
    assert [code for code, _ in train(work)] == [0] * 4
    return work


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained_once, tmp_path / "trained")


def test_checkpoints_that_cannot_be_resumed(trained: Path) -> None:
    work = trained
    fails_alike(work, "runs/r already holds a run; continue it with --resume, replace it with --overwrite")
    fails_alike(
        work,
        "model.hidden_size is 16 there and 32 here; model.top_k is 2 there and 1 here",
        *("--resume", "--set", "model.hidden_size=32", "--set", "model.top_k=1"),
    )
    fails_alike(work, "run.steps is 1: runs/r/checkpoints/step_00000002 has more", "--resume", "--steps", "1")
    checkpoint = work / "runs/r/checkpoints/step_00000002"
    for path in checkpoint.glob("zero_pp_rank_3_*"):
        path.write_bytes(path.read_bytes()[:100])
    fails_alike(work, "zero_pp_rank_3_mp_rank_00_optim_states.pt has 100 bytes instead of", "--resume")
    (work / "text/another.txt").write_text("a new file changes the data\n" * 50)
    fails_alike(work, "data.text is ", "--resume")


def test_overwriting_starts_anew(trained: Path) -> None:
    work = trained
    first = (work / "runs/r/metrics.jsonl").read_text()
    (work / "runs/r/checkpoints/step_00000009").mkdir()
    (work / "runs/r/notes.txt").write_text("mine")
    assert [code for code, _ in train(work, "--overwrite")] == [0] * 4
    steps = [json.loads(line).get("step") for line in first.splitlines()]
    again = [json.loads(line).get("step") for line in (work / "runs/r/metrics.jsonl").read_text().splitlines()]
    assert again == steps
    assert [path.name for path in (work / "runs/r/checkpoints").glob("step_*")] == ["step_00000002"]
    assert (work / "runs/r/notes.txt").read_text() == "mine"
