"""The picture of bench_overlap.py: where the layer's time goes, and what one rank does while rows are under way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import COLOURS, GREY, PICTURE_STYLE, Result, save_picture
from overlap_trace import Span, Trace

_EXPERTS, _EXCHANGE, _SHARED, _WAIT, _OTHER = COLOURS[5], COLOURS[2], COLOURS[4], "#e5e8ec", COLOURS[3]
_LAYER = "#7f9bb3"
# Stages of the layer's clock by what a reader calls them; a wait lies within another stage and is drawn over it.
_KINDS = {"experts": "routed experts", "shared_experts": "shared experts"}
_LEGEND = {
    "routed experts": _EXPERTS,
    "shared experts": _SHARED,
    "routing, plans, copies and sums of rows": _OTHER,
    "whatever the layer computes": _LAYER,
    "waiting for rows": _WAIT,
    "an exchange under way": _EXCHANGE,
}
_LANE = 0.8


def draw(
    results: list[Result], traces: Mapping[tuple[str, int], Trace], path: Path, used: Mapping[str, str | None]
) -> None:
    """A column for each dispatcher: bars of the medians above, below one step of rank 0 in one and in most chunks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    found = {(each.setting["dispatch"], each.setting["chunks"], each.metric): each for each in results}
    setting = results[0].setting
    names = list(dict.fromkeys(name for name, _ in traces))
    chunks = sorted({number for _, number in traces})
    width, height = max(5.2 * len(names), 8.0), 7.6
    with pyplot.rc_context(PICTURE_STYLE):
        figure, axes = pyplot.subplots(
            2, len(names), figsize=(width, height), squeeze=False, sharex="row", sharey="row", height_ratios=[1, 1.15]
        )
        figure.subplots_adjust(
            left=1.35 / width,
            right=1 - 0.15 / width,
            top=1 - 1.15 / height,
            bottom=1.2 / height,
            hspace=0.36,
            wspace=0.08,
        )
        for bars, lines, name in zip(*axes, names, strict=True):
            _bars(bars, name, chunks, found)
            _timelines(lines, [(number, traces[name, number]) for number in dict.fromkeys((chunks[0], chunks[-1]))])
        handles = [Patch(color=colour, label=label) for label, colour in _LEGEND.items()]
        figure.legend(
            handles=handles,
            loc="upper center",
            bbox_to_anchor=(0.5, 0.62 / height),
            ncols=3,
            fontsize=9,
            handlelength=1.4,
        )
        figure.suptitle("A routed layer whose exchanges overlap with its experts", x=0.01, ha="left", y=0.995, va="top")
        figure.text(0.01, 1 - 0.36 / height, _subtitle(setting), ha="left", va="top", fontsize=9, color=GREY)
        save_picture(figure, path, used)
        pyplot.close(figure)


def _subtitle(setting: Mapping[str, Any]) -> str:
    ranks, link = setting["ranks_per_node"], setting["link_mbit_per_s"]
    cluster = f"emulated cluster of {setting['nodes']} nodes x {ranks} ranks, links of {link:g} Mbit/s"
    experts = f"F={setting['ffn']}, {setting['dtype']}"
    if setting["computing"] == "emulated":
        experts = f"experts sleep {setting['emulated_us']:g} us a row"
    sizes = f"E={setting['experts']}, k={setting['k']}, H={setting['hidden']}, {experts}"
    return (
        f"forward + backward, {cluster}; {sizes}, {setting['tokens']} tokens a rank\n"
        f"above: medians of {setting['rounds']} rounds, whiskers: all rounds; below: one step of rank 0, "
        "white: anything else"
    )


def _bars(axis: Any, name: str, chunks: list[int], found: Mapping[tuple[str, int, str], Result]) -> None:
    """Parts alone, one after the other; then the layer by chunks, its waiting apart."""

    def value(number: int, metric: str) -> float:
        return found[name, number, f"overlap.{metric}"].value

    labels = ["parts alone,\nadded up", *(f"{number} chunk{'s' * (number > 1)}" for number in chunks)]
    bottom = 0.0
    for part, colour in (("experts", _EXPERTS), ("exchanges", _EXCHANGE), ("shared", _SHARED)):
        seconds = value(1, f"{part}_alone")
        axis.bar(0, seconds, bottom=bottom, width=0.62, color=colour)
        bottom += seconds
    axis.text(0, bottom, f" {bottom:.2f}", ha="center", va="bottom")
    for place, number in enumerate(chunks, start=1):
        result = found[name, number, "overlap.time"]
        total, wait = result.value, min(value(number, "wait"), result.value)
        axis.bar(place, total - wait, width=0.62, color=_LAYER)
        axis.bar(place, wait, bottom=total - wait, width=0.62, color=_WAIT, edgecolor=GREY, linewidth=0.6)
        low, high = result.spread or (total, total)
        axis.errorbar(place, total, yerr=[[total - low], [high - total]], color=COLOURS[0], capsize=3, linewidth=1)
        speedup = found.get((name, number, "overlap.speedup_over_one_chunk"))
        label = f"{total:.2f}" + (f"\n({speedup.value:.2f}x)" if speedup is not None else "")
        axis.text(place, max(high, total), label, ha="center", va="bottom")
    if (name, 1, "overlap.ideal_time") in found:
        ideal = value(1, "ideal_time")
        axis.plot([0.6, len(chunks) + 0.4], [ideal, ideal], linestyle="--", color=COLOURS[1], linewidth=1.4)
        axis.text(len(chunks) + 0.42, ideal, "ideal", color=COLOURS[1], va="center", ha="left")
    axis.set_xticks(range(len(labels)), labels)
    axis.set_xlim(-0.5, len(chunks) + 0.85)
    axis.margins(y=0.25)
    axis.grid(visible=False, axis="x")
    axis.set_title(f'"{name}"', fontweight="bold")
    if axis.get_subplotspec().is_first_col():
        axis.set_ylabel("seconds of one layer")


def _timelines(axis: Any, traces: list[tuple[int, Trace]]) -> None:
    ticks: list[tuple[float, str]] = []
    for index, (number, trace) in enumerate(traces):
        own, wire = 2.6 * index, 2.6 * index + 1
        for span in trace.stages:
            colour = _colour(span)
            axis.broken_barh([_bar(span)], (own - _LANE / 2, _LANE), color=colour, linewidth=0)
        for span in (span for span in trace.stages if span.name.endswith("_wait")):
            axis.broken_barh([_bar(span)], (own - _LANE / 2, _LANE), facecolor=_WAIT, edgecolor=GREY, linewidth=0.3)
        for span in trace.exchanges:
            # Two at once, one of each chunk, look darker.
            axis.broken_barh([_bar(span)], (wire - _LANE / 2, _LANE), color=_EXCHANGE, alpha=0.6, linewidth=0)
        turn = max((span.end_s for span in trace.stages if "backward" not in span.name), default=0.0)
        axis.plot([turn, turn], [own - 0.6, wire + 0.6], color=COLOURS[0], linewidth=0.8, linestyle=":")
        axis.annotate("forward", (turn, own - 0.62), xytext=(-4, 0), textcoords="offset points", ha="right", fontsize=8)
        axis.annotate("backward", (turn, own - 0.62), xytext=(4, 0), textcoords="offset points", ha="left", fontsize=8)
        plural = f"{number} chunk{'s' * (number > 1)}"
        ticks += [(own, f"{plural}: rank 0"), (wire, "exchanges")]
    axis.set_yticks(*zip(*ticks, strict=True))
    axis.set_ylim(2.6 * len(traces) - 0.9, -1.0)
    axis.set_xlim(0, None)
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("seconds since the step began")


def _bar(span: Span) -> tuple[float, float]:
    return span.start_s, span.end_s - span.start_s


def _colour(span: Span) -> str:
    kind = _KINDS.get(span.name.removesuffix("_backward"))
    return _OTHER if kind is None else _LEGEND[kind]
