"""metrics.jsonl: what a resumed run keeps, and that a crash leaves a readable file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xmoe.files import replacing
from xmoe.training.metrics_file import MetricsFile, read_lines, trim_after


@pytest.fixture
def path(tmp_path: Path) -> Path:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write("baseline", step=0, bigram_bits_per_byte=3.5)
    for step in range(1, 7):
        metrics.write("train", step=step, loss_bits_per_byte=8.0 - step)
        if step % 3 == 0:
            for layer in "ab":
                metrics.write("dispatch", step=step, first_step=step - 2, layer=layer, stage_s={"experts": 0.5})
            metrics.write("validation", step=step, val_bits_per_byte=7.0)
    metrics.write("final", step=6, metric="train.val_bits_per_byte", value=7.0, unit="bits/byte")
    metrics.close()
    return tmp_path / "metrics.jsonl"


@pytest.mark.parametrize("step", [0, 1, 3, 6])
def test_trimming_keeps_each_step_up_to_the_resumed_one_once(path: Path, step: int) -> None:
    trim_after(path, step)
    kept = list(read_lines(path))
    assert [line["step"] for line in kept if line["kind"] == "train"] == list(range(1, step + 1))
    assert [line["step"] for line in kept if line["kind"] == "validation"] == [s for s in (3, 6) if s <= step]
    windows = [(line["step"], line["layer"]) for line in kept if line["kind"] == "dispatch"]
    assert windows == [(s, layer) for s in (3, 6) if s <= step for layer in "ab"]
    assert [line["kind"] for line in kept].count("baseline") == 1
    assert "final" not in [line["kind"] for line in kept]


def test_trimming_a_finished_run_makes_room_for_its_last_validation(path: Path) -> None:
    trim_after(path, 6, finished=True)
    assert [line["step"] for line in read_lines(path) if line["kind"] == "validation"] == [3]
    assert [line["step"] for line in read_lines(path) if line["kind"] == "dispatch"] == [3, 3, 6, 6]


def test_a_cut_last_line_is_dropped(path: Path) -> None:
    whole = len(list(read_lines(path)))
    with path.open("a") as stream:
        stream.write('{"kind": "train", "st')
    assert len(list(read_lines(path))) == whole
    trim_after(path, 6)
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_broken_line_in_the_middle_is_an_error_and_changes_nothing(path: Path) -> None:
    path.write_text("nonsense\n" + path.read_text())
    before = path.read_bytes()
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        trim_after(path, 3)
    assert path.read_bytes() == before


def test_values_that_are_not_finite_stay_json(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.write("train", step=1, grad_norm=float("nan"), loss_bits_per_byte=float("inf"))
    metrics.close()
    assert list(read_lines(tmp_path / "m.jsonl")) == [
        {"kind": "train", "step": 1, "grad_norm": None, "loss_bits_per_byte": None}
    ]


def test_no_file_is_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "m.jsonl")) == []
    assert trim_after(tmp_path / "m.jsonl", 3) == 0


def test_replacing_leaves_the_old_file_when_writing_fails(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    target.write_text("old")

    def fail_half_way() -> None:
        with replacing(target) as scratch:
            scratch.write_text("ne")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
