"""Signals and ``--resume``: four ranks are interrupted in four ways, twice under a real torchrun.

One run is left alone. Another is interrupted and resumed four times; its losses must be the first one's. Starting
four ranks takes most of the time, so all tests share these two runs. The two signals have one handler (test_stop.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import pytest
from jobs import NUM_STEPS, START_S, STOP_S

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One interruption: the ranks' exit codes, what was said, and what there is then."""

    exit_codes: list[str]
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


PidOf = Callable[[int], int]


def term(pid_of: PidOf) -> None:
    os.kill(pid_of(2), signal.SIGTERM)


def usr1_twice(pid_of: PidOf) -> None:
    os.kill(pid_of(1), signal.SIGUSR1)
    time.sleep(0.3)
    # Late: the rank may be saving, or be gone.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid_of(1), signal.SIGUSR1)


# One rank gets the signal, on preloaded ranks; torchrun gets it, and has its own way with ranks.
TO_A_RANK = {"term-one-rank": term, "usr1-one-rank-twice": usr1_twice}
TO_TORCHRUN = {"term-launcher": signal.SIGTERM, "launcher-dies": signal.SIGKILL}


def signal_a_rank(work: Path, send: Callable[[PidOf], None], *arguments: str) -> tuple[list[str], str]:
    """Exit codes, and what was said."""
    wanted = last_step(work) + 4

    def meanwhile(pid_of: PidOf) -> None:
        end = time.monotonic() + START_S
        while last_step(work) < wanted:
            assert time.monotonic() < end, f"no step {wanted}"
            time.sleep(0.02)
        send(pid_of)

    answers = jobs.run_on_ranks(work, "train", "--config", "run.json", *arguments, meanwhile=meanwhile)
    return [str(code) for code, _ in answers], "".join(said for _, said in answers)


def signal_torchrun(work: Path, number: int, *arguments: str) -> tuple[list[str], str]:
    """The same. torchrun exits with a failure of its own whatever its ranks return."""
    wanted = last_step(work) + 4
    job = jobs.start(work, None, *arguments)
    job.wait_for(lambda: last_step(work) >= wanted, what=f"step {wanted}")
    job.launcher.send_signal(number)
    assert job.wait(STOP_S) != 0
    return job.exit_codes(), job.text()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, dict[str, Stage]]:
    work = tmp_path_factory.mktemp("interrupted")
    (work / "run.json").write_text(json.dumps(content(text)))
    stages: dict[str, Stage] = {}
    ways = [(name, partial(signal_a_rank, work, send)) for name, send in TO_A_RANK.items()]
    ways += [(name, partial(signal_torchrun, work, number)) for name, number in TO_TORCHRUN.items()]
    for name, interrupt in ways:
        exit_codes, output = interrupt(*(["--resume"] if stages else []))
        newest = max((work / "runs/r/checkpoints").glob("step_*")).name
        stages[name] = Stage(
            exit_codes=exit_codes,
            output=output,
            step=last_step(work),
            newest_checkpoint=newest,
            sealed=(work / "runs/r/checkpoints" / newest / "manifest.json").is_file(),
        )
    assert jobs.run_on_ranks(work, "train", "--config", "run.json", "--resume") == [(0, "")] * 4
    return work, stages


@pytest.mark.parametrize("way", [*TO_A_RANK, *TO_TORCHRUN])
def test_every_rank_saves_and_exits_0(interrupted: tuple[Path, dict[str, Stage]], way: str) -> None:
    stage = interrupted[1][way]
    assert stage.exit_codes == ["0"] * 4, stage.output
    assert stage.sealed, stage.output
    assert stage.newest_checkpoint == f"step_{stage.step:08d}"
    assert 0 < stage.step < NUM_STEPS
    # torchrun's own traceback on SIGTERM names no file of ours.
    assert "/xmoe/" not in stage.output, stage.output


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
