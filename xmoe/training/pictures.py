"""The pictures of a run, drawn from its metrics.jsonl alone: loss.png, expert_load.png and dispatch_stages.png."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import TwoSlopeNorm
from matplotlib.patches import Patch

from xmoe.files import replacing
from xmoe.metrics import STAGES

from .metrics_file import read_lines

_TRAIN, _VALIDATION, _BASELINE, _INK = "#9db8d9", "#c2410c", "#5b6472", "#1f2933"
# Exchanges are the warm colours.
_STAGE_COLOURS = dict(zip(STAGES, ["#a78bba", "#d9a441", "#d9703c", "#2f6db3", "#e8b08c", "#9db8d9"], strict=True))
_STYLE = {
    "font.size": 10,
    "axes.edgecolor": _BASELINE,
    "axes.labelcolor": _INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _BASELINE,
    "ytick.color": _BASELINE,
    "figure.dpi": 150,
}


def draw_all(metrics: Path, folder: Path) -> list[Path]:
    """Draws every picture that the metrics have data for, each replaced as a whole. Returns their paths."""
    lines = list(read_lines(metrics))
    with plt.rc_context(_STYLE):
        drawn = [
            draw_loss(lines, folder / "loss.png"),
            draw_expert_load(lines, folder / "expert_load.png"),
            draw_dispatch_stages(lines, folder / "dispatch_stages.png"),
        ]
    return [path for path in drawn if path is not None]


def _save(figure: Any, target: Path) -> Path:
    with replacing(target) as scratch:
        figure.savefig(scratch, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    return target


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Centred running mean; the window shrinks at both ends, so the curve has the length of ``values``."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - width // 2, 0), np.minimum(at + width // 2 + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def draw_loss(lines: Sequence[dict[str, Any]], target: Path) -> Path | None:
    """Training and validation loss over the steps, with the entropies of the held-out bytes as baselines."""
    train = [(line["step"], line["loss_bits_per_byte"]) for line in lines if line["kind"] == "train"]
    train = [(step, loss) for step, loss in train if loss is not None]
    if not train:
        return None
    steps, losses = np.array(train, dtype=float).T
    validation = [(line["step"], line["val_bits_per_byte"]) for line in lines if line["kind"] == "validation"]
    figure, axes = plt.subplots(figsize=(8, 4.6))
    axes.plot(steps, losses, color=_TRAIN, linewidth=0.7, alpha=0.7)
    axes.plot(steps, _smooth(losses, max(1, len(losses) // 40)), color="#2f6db3", linewidth=1.6, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), color=_VALIDATION, marker="o", markersize=4, label="validation")
        step, bits = validation[-1]
        axes.annotate(
            f"{bits:.2f}",
            (step, bits),
            xytext=(6, -2),
            textcoords="offset points",
            color=_VALIDATION,
            weight="bold",
        )
    _mark_ablation(axes, lines)
    axes.set_xlim(0, steps[-1] * 1.06)
    for line in (line for line in lines if line["kind"] == "baseline"):
        for key, name in (("unigram", "H(byte)"), ("bigram", "H(byte | previous byte)")):
            bits = line[f"{key}_bits_per_byte"]
            axes.axhline(bits, color=_BASELINE, linestyle=(0, (4, 3)), linewidth=1)
            # At the right: there the curves are far below.
            axes.text(
                0.995,
                bits,
                f"{name} = {bits:.2f}",
                transform=axes.get_yaxis_transform(),
                ha="right",
                va="bottom",
                color=_BASELINE,
            )
    axes.set_title("Loss on training and held-out text")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("bits per byte")
    axes.grid(axis="y", color="#e5e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="lower left")
    return _save(figure, target)


def _mark_ablation(axes: Any, lines: Sequence[dict[str, Any]]) -> None:
    """The validation loss with the routed experts' output zeroed, at the step where it was measured."""
    for line in lines:
        if line.get("metric") == "train.val_bits_without_routed_experts":
            axes.plot(line["step"], line["value"], "o", markersize=5, color=_VALIDATION, fillstyle="none")
            axes.annotate(
                f"without routed experts {line['value']:.2f}",
                (line["step"], line["value"]),
                xytext=(-8, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                color=_VALIDATION,
            )


def draw_expert_load(lines: Sequence[dict[str, Any]], target: Path) -> Path | None:
    """One heat map per MoE layer: each expert's load over the steps, in units of the mean load."""
    by_layer: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["kind"] == "expert_load":
            by_layer[line["layer"]].append(line)
    if not by_layer:
        return None
    columns = 2 if len(by_layer) in (2, 4) else min(3, len(by_layer))
    rows = -(-len(by_layer) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(4.3 * columns + 1, 3.1 * rows + 0.5),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=2.5)
    image = None
    for panel, (layer, windows) in zip(axes.flat, by_layer.items(), strict=False):
        load_EW = np.array([window["selected"] for window in windows], dtype=float).T
        load_EW /= np.maximum(load_EW.mean(axis=0), 1e-30)
        edges = [windows[0]["first_step"] - 1, *(window["step"] for window in windows)]
        image = panel.pcolormesh(
            edges, np.arange(len(load_EW) + 1) - 0.5, load_EW, cmap="RdBu_r", norm=norm, rasterized=True
        )
        spread = load_EW.std(axis=0)
        panel.set_title(f"{layer}   CV {spread[0]:.2f} → {spread[-1]:.2f}", fontsize=10)
        panel.spines[:].set_visible(False)
    for panel in axes.flat[len(by_layer) :]:
        panel.set_visible(False)
    for panel in axes[:, 0]:
        panel.set_ylabel("expert")
    for column in axes.T:
        lowest = [panel for panel in column if panel.get_visible()][-1]
        lowest.set_xlabel("optimizer step")
        lowest.tick_params(labelbottom=True)
    bar = figure.colorbar(image, ax=axes, extend="max", ticks=[0, 0.5, 1, 1.5, 2, 2.5], pad=0.02)
    bar.set_label("tokens, in units of the mean expert's")
    bar.outline.set_visible(False)
    figure.suptitle("Load of the routed experts, by layer", x=0.01, ha="left", weight="bold")
    return _save(figure, target)


def draw_dispatch_stages(lines: Sequence[dict[str, Any]], target: Path) -> Path | None:
    """One bar for forward and one for backward of each MoE layer: milliseconds a step by stage, waits hatched.

    Times are medians over the run's windows, so that a start, which warms up, or a hiccup does not show.
    """
    by_layer: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["kind"] == "dispatch" and "stage_s" in line:
            by_layer[line["layer"]].append(line)
    if not by_layer:
        return None
    figure, axes = plt.subplots(figsize=(9.5, 1.6 + 0.75 * len(by_layer)))
    drawn: set[str] = set()
    longest = 0.0
    for place, windows in enumerate(by_layer.values()):
        ms = _median_ms(windows, "stage_s")
        for suffix, y in (("", place - 0.19), ("_backward", place + 0.19)):
            end = _draw_bar(axes, ms, suffix, y, drawn)
            axes.annotate(
                f"{end:.3g} ms {'backward' if suffix else 'forward'}" if end else "",
                (end, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=_BASELINE,
            )
            longest = max(longest, end)
        axes.text(1.01, place, _beside(windows), transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set_yticks(range(len(by_layer)), list(by_layer))
    axes.tick_params(axis="y", length=0, labelcolor=_INK)
    axes.set_ylim(len(by_layer) - 0.4, -0.6)
    axes.set_xlim(0, 1.16 * longest or 1.0)
    axes.set_xlabel("milliseconds per optimizer step, mean over the ranks")
    axes.grid(axis="x", color="#e5e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.set_title("Where the MoE layers' time goes", pad=34)
    shown = [stage for stage in STAGES if stage in drawn]
    patches = [Patch(color=_STAGE_COLOURS[stage], label=stage.replace("_", " ")) for stage in shown]
    if "wait" in drawn:
        hatched = Patch(facecolor="white", edgecolor=_INK, hatch="////", linewidth=0)
        hatched.set_label("waiting for an exchange")
        patches.append(hatched)
    axes.legend(
        handles=patches,
        ncols=len(patches),
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.2,
        borderaxespad=0.3,
    )
    return _save(figure, target)


def _median_ms(windows: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    """Milliseconds a step by stage; a stage that a window lacks took no time there."""
    names = {name: None for window in windows for name in window[key]}
    return {name: 1e3 * float(np.median([window[key].get(name, 0.0) for window in windows])) for name in names}


def _draw_bar(axes: Any, ms: dict[str, float], suffix: str, y: float, drawn: set[str]) -> float:
    """Draws a bar of all stages with this suffix, and returns where it ends. ``drawn`` gets what there was of it."""
    # Backward goes through the stages the other way round.
    left = 0.0
    for stage in reversed(STAGES) if suffix else STAGES:
        length, wait = ms.get(stage + suffix, 0.0), ms.get(f"{stage}{suffix}_wait", 0.0)
        if not length:
            continue
        drawn.add(stage)
        axes.barh(y, length, left=left, height=0.34, color=_STAGE_COLOURS[stage])
        left += length
        # Medians of a stage and of its wait need not be of one window.
        if wait := min(wait, length):
            drawn.add("wait")
            axes.barh(y, -wait, left=left, height=0.34, color="none", edgecolor="white", hatch="////", linewidth=0)
    return left


def _beside(windows: Sequence[dict[str, Any]]) -> str:
    """What else the layer's windows say, beside its bars."""
    said = []
    if any(window["inside_node_rows"] + window["between_nodes_rows"] for window in windows):
        busiest = np.median([window["busiest_receiver"] for window in windows])
        said.append(f"busiest receiver: {busiest:.2f} times the mean")
    experts, slowest = (
        times.get("experts", 0.0) + times.get("experts_backward", 0.0)
        for times in (_median_ms(windows, "stage_s"), _median_ms(windows, "slowest_stage_s"))
    )
    if experts:
        said.append(f"slowest rank's experts: {slowest / experts:.2f} times the mean")
    if any(window["between_nodes_rows"] for window in windows):
        redundancy = np.median([window["redundancy"] for window in windows])
        said.append(f"{100 * redundancy:.0f} % of rows between nodes saved")
    return "\n".join(said)
