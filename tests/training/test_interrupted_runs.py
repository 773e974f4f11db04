"""Signals and ``--resume``: four ranks under a real torchrun are interrupted in three ways.

One run is left alone. Another is interrupted and resumed three times; its losses must be the first one's. Starting
four ranks takes most of the time, so all tests share these two runs. The two signals have one handler (test_stop.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import pytest
from jobs import NUM_STEPS, STOP_S, Job

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One interruption: what it was, the launcher's and the ranks' exit codes, and how it went."""

    launcher_code: int
    exit_codes: list[str]
    stop_s: float
    output: str
    step: int
    newest_checkpoint: str
    sealed: bool


def lines(work: Path, kind: str) -> list[dict[str, Any]]:
    path = work / "runs/r/metrics.jsonl"
    # The last line may be half written while the run goes on.
    text = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in (json.loads(t) for t in text if t.endswith("\n")) if line["kind"] == kind]


def last_step(work: Path) -> int:
    return max((line["step"] for line in lines(work, "train")), default=0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.write_text(tmp_path_factory.mktemp("text") / "files")


def content(text: Path) -> dict[str, Any]:
    return jobs.run_file(data={"paths": [str(text)], "cache_dir": str(text.parent / "cache")}, run={"name": "r"})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    work = tmp_path_factory.mktemp("uninterrupted")
    (work / "run.json").write_text(json.dumps(content(text)))
    assert jobs.run_on_ranks(work, "train", "--config", "run.json") == [(0, "")] * 4
    return work


def term_launcher(job: Job) -> None:
    job.launcher.send_signal(signal.SIGTERM)


def term_one_rank(job: Job) -> None:
    os.kill(job.rank_pid(2), signal.SIGTERM)


def usr1_one_rank_twice(job: Job) -> None:
    os.kill(job.rank_pid(1), signal.SIGUSR1)
    time.sleep(0.3)
    # Late: the rank may be saving, or be gone.
    with contextlib.suppress(ProcessLookupError):
        os.kill(job.rank_pid(1), signal.SIGUSR1)


def kill_launcher(job: Job) -> None:
    job.launcher.kill()


WAYS = {
    "term-launcher": term_launcher,
    "term-one-rank": term_one_rank,
    "usr1-one-rank-twice": usr1_one_rank_twice,
    "launcher-dies": kill_launcher,
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, dict[str, Stage]]:
    work = tmp_path_factory.mktemp("interrupted")
    stages: dict[str, Stage] = {}
    for name, interrupt in WAYS.items():
        done = last_step(work)
        job = jobs.start(work, content(text), *(["--resume"] if done else []))
        job.wait_for(lambda: last_step(work) >= done + 4, what=f"step {done + 4}")  # noqa: B023
        started = time.monotonic()
        interrupt(job)
        code = job.wait(STOP_S + 15)
        newest = max((work / "runs/r/checkpoints").glob("step_*")).name
        stages[name] = Stage(
            launcher_code=code,
            exit_codes=job.exit_codes(),
            stop_s=time.monotonic() - started,
            output=job.text(),
            step=last_step(work),
            newest_checkpoint=newest,
            sealed=(work / "runs/r/checkpoints" / newest / "manifest.json").is_file(),
        )
    assert jobs.run_on_ranks(work, "train", "--config", "run.json", "--resume") == [(0, "")] * 4
    return work, stages


@pytest.mark.parametrize("way", WAYS)
def test_every_rank_saves_and_exits_0(interrupted: tuple[Path, dict[str, Stage]], way: str) -> None:
    stage = interrupted[1][way]
    assert stage.exit_codes == ["0"] * 4, stage.output
    assert stage.sealed, stage.output
    assert stage.newest_checkpoint == f"step_{stage.step:08d}"
    assert 0 < stage.step < NUM_STEPS
    assert stage.stop_s < STOP_S
    # torchrun's own traceback on SIGTERM names no file of ours.
    assert "/xmoe/" not in stage.output, stage.output


def test_the_launcher_reports_success_when_one_rank_was_signalled(
    interrupted: tuple[Path, dict[str, Stage]],
) -> None:
    stages = interrupted[1]
    assert stages["term-one-rank"].launcher_code == 0
    assert stages["usr1-one-rank-twice"].launcher_code == 0
    # torchrun's own answer to SIGTERM, whatever its ranks return.
    assert stages["term-launcher"].launcher_code != 0


def test_resumed_losses_equal_the_uninterrupted_ones(
    uninterrupted: Path, interrupted: tuple[Path, dict[str, Stage]]
) -> None:
    expected, found = lines(uninterrupted, "train"), lines(interrupted[0], "train")
    assert [line["step"] for line in found] == [line["step"] for line in expected] == list(range(1, NUM_STEPS + 1))
    for one, other in zip(expected, found, strict=True):
        assert other["loss_bits_per_byte"] == pytest.approx(one["loss_bits_per_byte"], abs=1e-6), one["step"]
        assert other["learning_rate"] == one["learning_rate"]
    assert expected[-1]["loss_bits_per_byte"] < expected[0]["loss_bits_per_byte"] - 0.5


def test_final_results_are_there_once_and_equal(
    uninterrupted: Path, interrupted: tuple[Path, dict[str, Stage]]
) -> None:
    expected, found = lines(uninterrupted, "final"), lines(interrupted[0], "final")
    assert [line["metric"] for line in found] == [
        "train.val_bits_per_byte",
        "train.bigram_bits_per_byte",
        "train.val_bits_without_routed_experts",
    ]
    for one, other in zip(expected, found, strict=True):
        assert other["value"] == pytest.approx(one["value"], abs=1e-6)
        assert other["unit"] == "bits/byte"
    for name in ("loss.png", "expert_load.png", "config.json"):
        assert (interrupted[0] / "runs/r" / name).stat().st_size > 0


@pytest.mark.parametrize("kind", ["expert_load", "dispatch"])
def test_windows_cover_each_step_once(interrupted: tuple[Path, dict[str, Stage]], kind: str) -> None:
    windows = [line for line in lines(interrupted[0], kind) if line["layer"] == "blocks.1.moe"]
    covered = [step for window in windows for step in range(window["first_step"], window["step"] + 1)]
    assert covered == list(range(1, NUM_STEPS + 1))
    # 4 ranks * 2 micro-batches * 2 sequences * 32 tokens * top-2, each step.
    num_rows = NUM_STEPS * 4 * 2 * 2 * 32 * 2
    if kind == "expert_load":
        assert sum(sum(window["selected"]) for window in windows) == num_rows
    else:
        links = ("to_self_rows", "inside_node_rows", "between_nodes_rows")
        assert sum(window[link] for window in windows for link in links) == num_rows
        assert not any("stage_s" in window for window in windows)
