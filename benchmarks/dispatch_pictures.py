"""The pictures of bench_dispatch.py: what was measured against redundancy, a panel for each cluster and link.

Redundancy is the share of flat's rows between nodes that repeat a (token, node) pair: what one row per node saves. If
bytes between nodes were all that counts, one row per node would take the share 1 - redundancy of flat's time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import COLOURS, GREY, PICTURE_STYLE, Result, save_picture

ORDER = ("flat", "deepspeed", "autoep", "piper", "gpu", "node", "node+gpu")
MARKERS = ("s", "v", "^", "X", "D", "o", "P")
NAMES = {"deepspeed": "DeepSpeed, padded", "autoep": "AutoEP", "piper": "flat in phases (Piper)"}
_LINE = {"linestyle": "--", "color": GREY, "linewidth": 1.2}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One contestant in one case: ``low`` and ``high`` are the least and the greatest of the rounds."""

    redundancy: float
    value: float
    low: float
    high: float
    k: int


def case_key(result: Result) -> tuple[Any, ...]:
    """What results of one case have in common."""
    return tuple(value for key, value in result.setting.items() if key not in ("dispatch", "rounds"))


Lines = dict[str, list[Point]]
Panels = dict[tuple[Any, ...], Lines]


def panels_of(results: list[Result], metric: str) -> Panels:
    """Points of ``metric`` by cluster and link, then by contestant, from left to right."""
    flat = [result for result in results if result.setting.get("dispatch") == "flat"]
    redundancy = {
        case_key(found): 1 - 1 / found.value
        for found in flat
        if found.metric == "dispatch.inter_node_rows_over_lower_bound"
    }
    panels: Panels = defaultdict(lambda: defaultdict(list))
    for result in results:
        if result.metric == metric:
            setting, (low, high) = result.setting, result.spread or (result.value, result.value)
            panel = panels[setting["nodes"], setting["ranks_per_node"], setting["link_mbit_per_s"]]
            panel[setting["dispatch"]].append(
                Point(redundancy=redundancy[case_key(result)], value=result.value, low=low, high=high, k=setting["k"])
            )
    for lines in panels.values():
        for points in lines.values():
            points.sort(key=lambda point: point.redundancy)
    return panels


def draw_times(results: list[Result], path: Path, used: Mapping[str, str | None]) -> None:
    """Time over flat's, so that cases of different k share an axis."""
    flat_s = {
        case_key(result): result.value
        for result in results
        if result.metric == "dispatch.time" and result.setting["dispatch"] == "flat"
    }
    shares = [
        Result(
            metric="time over flat's",
            value=result.value / flat_s[case_key(result)],
            unit="ratio",
            better="lower",
            setting=result.setting,
            spread=tuple(bound / flat_s[case_key(result)] for bound in result.spread) if result.spread else None,
        )
        for result in results
        if result.metric == "dispatch.time"
    ]
    counts = [result for result in results if result.metric == "dispatch.inter_node_rows_over_lower_bound"]

    def finish(axis: Any, lowest: float, highest: float) -> None:
        axis.plot([0, 1], [1, 0], **_LINE, label="bytes between nodes alone: 1 $-$ redundancy")
        axis.set_ylim(0, 1.05 * highest)

    what = "Time of dispatch and combine, over flat's"
    _draw(
        panels_of(shares + counts, "time over flat's"), path, used, what=what, setting=results[0].setting, finish=finish
    )


def draw_speedups(results: list[Result], path: Path, used: Mapping[str, str | None]) -> None:
    """Speedup over flat, beside the bound 1 / (1 - redundancy)."""

    def finish(axis: Any, lowest: float, highest: float) -> None:
        xs = [step / 200 for step in range(200) if 1 / (1 - step / 200) <= highest * 1.15]
        axis.plot(xs, [1 / (1 - x) for x in xs], **_LINE, label="bytes between nodes alone: 1 / (1 $-$ redundancy)")
        axis.axhline(1, color=COLOURS[0], linewidth=1, label="flat")
        axis.set_ylim(min(lowest, 0.5), 1.05 * highest)

    what = "Speedup of dispatch and combine over flat"
    panels = panels_of(results, "dispatch.speedup_over_flat")
    _draw(panels, path, used, what=what, setting=results[0].setting, finish=finish)


def _draw(
    panels: Panels,
    path: Path,
    used: Mapping[str, str | None],
    *,
    what: str,
    setting: Mapping[str, Any],
    finish: Callable[[Any, float, float], None],
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = -(-len(panels) // columns)
    width, height = max(4.4 * columns, 8.2), 3.9 * rows + 1.9
    # Panels share their axes, so each is laid out for the points of all.
    points = [point for lines in panels.values() for points in lines.values() for point in points]
    right = min(1.0, max(point.redundancy for point in points) + 0.12)
    lowest, highest = min(point.low for point in points), max(point.high for point in points)
    with pyplot.rc_context(PICTURE_STYLE):
        figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, sharex=True, sharey=True)
        figure.subplots_adjust(
            left=0.75 / width,
            right=1 - 0.15 / width,
            top=1 - 0.95 / height,
            bottom=1.25 / height,
            wspace=0.1,
            hspace=0.2,
        )
        for axis, ((nodes, ranks, link), lines) in zip(axes.flat, panels.items(), strict=False):
            for name in sorted(lines, key=ORDER.index):
                _plot(axis, name, lines[name])
            axis.set_title(f"{nodes} nodes x {ranks} ranks, links of {link:g} Mbit/s", pad=14)
            axis.set_xlim(-0.03, right)
            finish(axis, lowest, highest)
            _mark_k(axis, lines)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for column in axes.T:
            [axis for axis in column if axis.get_visible()][-1].tick_params(labelbottom=True)
        for axis in axes[:, 0]:
            axis.set_ylabel(what.lower().replace(" of dispatch and combine", ""))
        about = "redundancy: share of flat's rows between nodes that one row per node saves"
        figure.text(0.5, 0.8 / height, about, ha="center")
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="upper center",
            bbox_to_anchor=(0.5, 0.75 / height),
            ncols=3 + (columns > 1),
            fontsize=9,
        )
        figure.suptitle(what, x=0.01, ha="left", y=1 - 0.05 / height, va="top")
        figure.text(0.01, 1 - 0.38 / height, _subtitle(setting), ha="left", va="top", fontsize=9, color=GREY)
        save_picture(figure, path, used)
        pyplot.close(figure)


def _subtitle(setting: Mapping[str, Any]) -> str:
    sizes = f"E={setting['E']}, H={setting['H']}, {setting['T']} tokens a rank, {setting['dtype']}"
    routing = f"Zipf routing ({setting['popularity']:g})" if setting["popularity"] else "uniform routing"
    return f"forward + backward, emulated cluster; {sizes}, {routing}; error bars: all rounds"


def _plot(axis: Any, name: str, points: list[Point]) -> None:
    index = ORDER.index(name)
    # Each contestant a little aside, or the bars of equal ones hide each other.
    aside = (index - 3) * 0.004
    below = [point.value - point.low for point in points]
    above = [point.high - point.value for point in points]
    axis.errorbar(
        [point.redundancy + aside for point in points],
        [point.value for point in points],
        yerr=[below, above],
        color=COLOURS[index],
        marker=MARKERS[index],
        markersize=5.5,
        linewidth=1.4,
        elinewidth=1,
        capsize=2,
        label=NAMES.get(name, name),
    )


def _mark_k(axis: Any, lines: Lines) -> None:
    """``k=...`` at the top, above the points of each k."""
    for points in list(lines.values())[:1]:
        for point in points:
            axis.annotate(
                f"k={point.k}",
                (point.redundancy, 1.01),
                xycoords=axis.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize=8,
                color=GREY,
            )
