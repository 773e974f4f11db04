"""What a user sees: plain lines, the live panel, the table and the pictures."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from xmoe.training import pictures
from xmoe.training.display import Display, PatientConsole, StepView
from xmoe.training.metrics_file import MetricsFile
from xmoe.training.pictures import draw_all

VIEW = StepView(
    loss_bits_per_byte=2.5,
    loss_bits_per_token=5.0,
    aux_loss=1.0,
    grad_norm=0.5,
    learning_rate=1e-3,
    tokens_per_s=12345.6,
    effective_tflops_per_s=0.0432,
    nominal_tflops_per_s=0.0456,
    dropped_share=0.125,
    load_cv=0.31,
    dead_experts=3,
    all_to_all_bytes=7_500_000,
    between_nodes_bytes=2_500_000,
    redundancy=0.25,
    busiest_receiver=1.5,
)
SHOWN = [
    "2.500 bits/byte",
    "12,346 tokens/s",
    "0.0432 TFLOP/s",
    "0.0456 TFLOP/s",
    "12.5 %",
    "0.31",
    "3",
    "7.5 MB",
    "2.5 between nodes",
]


def show(*, terminal: bool, num_steps: int = 80, active: bool = True) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100, highlight=False, soft_wrap=True)
    display = Display(active=active, num_steps=num_steps, console=console)
    with display.running(first_step=0):
        for step in range(1, num_steps + 1):
            display.step(step, VIEW)
        display.validation(num_steps, 2.75)
        display.step(num_steps, VIEW)
        display.say("saved [here]")
    display.summary("done", [("validation loss", "2.750 bits/byte")])
    return stream.getvalue()


def test_plain_lines_are_few_and_complete() -> None:
    lines = show(terminal=False).splitlines()
    steps = [line for line in lines if line.startswith("step") and "validation" not in line]
    assert len(steps) == 1 + 40 + 1
    assert all(value in steps[-1] for value in SHOWN)
    assert "step 80/80  validation 2.750 bits/byte" in lines
    assert "saved [here]" in lines
    assert "\x1b" not in "".join(lines)


def test_a_terminal_gets_a_live_panel() -> None:
    output = show(terminal=True, num_steps=3)
    assert all(value in output for value in [*SHOWN, "2.750 bits/byte", "saved [here]", "3/3"])
    assert "[dim]" not in output


def test_other_ranks_are_silent() -> None:
    assert show(terminal=False, active=False) == ""


def test_a_console_that_goes_away_stops_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    display = Display(active=True, num_steps=1, console=PatientConsole(file=Gone()))
    display.say("unheard")
    display.step(1, VIEW)
    display.summary("unseen", [("a", "b")])


@pytest.mark.parametrize("num_layers", [0, 1, 3, 5])
def test_pictures_are_drawn_from_the_metrics_file(tmp_path: Path, num_layers: int) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write("baseline", step=0, unigram_bits_per_byte=4.7, bigram_bits_per_byte=3.5)
    for step in range(1, 31):
        metrics.write("train", step=step, loss_bits_per_byte=None if step == 7 else 8 / step)
        if step % 10 == 0:
            metrics.write("validation", step=step, val_bits_per_byte=9 / step)
            for layer in range(num_layers):
                loads = {"layer": f"blocks.{layer}.moe", "selected": [step, 0, 5, 20]}
                metrics.write("expert_load", step=step, first_step=step - 9, **loads)
    metrics.write("final", step=30, metric="train.val_bits_without_routed_experts", value=3.0, unit="bits/byte")
    metrics.close()
    drawn = draw_all(tmp_path / "metrics.jsonl", tmp_path)
    assert [path.name for path in drawn] == ["loss.png", "expert_load.png"][: 2 if num_layers else 1]
    for path in drawn:
        image = matplotlib.image.imread(path)
        assert image.shape[0] > 300
        assert image.std() > 0.05
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["metrics.jsonl", *(p.name for p in drawn)])


def write_window(metrics: MetricsFile, step: int, layer: str, **seconds: dict[str, float]) -> None:
    rows = {"to_self_rows": 5, "inside_node_rows": 5, "between_nodes_rows": 5, "redundancy": 0.5}
    place = {"step": step, "first_step": step, "layer": layer}
    metrics.write("dispatch", **place, **rows, busiest_receiver=1.25, **seconds)


@pytest.mark.parametrize("num_layers", [1, 4])
def test_stages_are_drawn_where_they_were_timed(
    tmp_path: Path, num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    save = pictures._save
    monkeypatch.setattr(pictures, "_save", lambda figure, target: figures.append(figure) or save(figure, target))
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for layer in range(num_layers):
        write_window(metrics, 1, f"blocks.{layer}.moe", stage_s={"experts": 99.0}, slowest_stage_s={"experts": 99.0})
        for step in (2, 3):
            seconds = {"dispatch": 0.02, "dispatch_wait": 0.015, "experts": 0.01, "experts_backward": 0.03}
            write_window(metrics, step, f"blocks.{layer}.moe", stage_s=seconds, slowest_stage_s={"experts": 0.08})
    metrics.close()
    drawn = draw_all(tmp_path / "metrics.jsonl", tmp_path)
    assert [path.name for path in drawn] == ["dispatch_stages.png"]
    image = matplotlib.image.imread(drawn[0])
    assert image.shape[0] > 250
    assert image.std() > 0.05
    (axes,) = figures[0].axes
    said = [text.get_text() for text in axes.texts]
    # The first window's 99 seconds are not in the medians: 20 + 10 ms forward, 30 ms backward.
    assert said.count("30 ms forward") == said.count("30 ms backward") == num_layers
    beside = "busiest receiver: 1.25 times the mean\nslowest rank's experts: 2.00 times the mean\n"
    assert said.count(f"{beside}50 % of rows between nodes saved") == num_layers
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"blocks.{n}.moe" for n in range(num_layers)]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["dispatch", "experts", "waiting for an exchange"]
    hatched = [(bar.get_x(), bar.get_width()) for bar in axes.patches if bar.get_hatch()]
    assert hatched == [pytest.approx((20, -15))] * num_layers  # the last 15 of the 20 ms of dispatch


def test_stages_without_times_are_no_picture(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    write_window(metrics, 1, "blocks.0.moe")
    metrics.close()
    assert draw_all(tmp_path / "metrics.jsonl", tmp_path) == []


def test_no_metrics_no_pictures(tmp_path: Path) -> None:
    assert draw_all(tmp_path / "metrics.jsonl", tmp_path) == []
