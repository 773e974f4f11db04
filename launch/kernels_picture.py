"""Heat map of ``xmoe kernels report``: waves and shares of matrix instructions, kernels by architectures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# xmoe.kernels.report.Row: nothing here may import it, or torch, before a command runs.
Row = Any

_NOTHING = "#e8e8e8"
_WRONG = "#c1272d"


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """One figure of each row; ``top`` is where the colours end."""

    title: str
    value: Callable[[Row], float | None]
    text: Callable[[float], str]
    top: float


_PANELS = (
    _Panel(title="waves per SIMD (warps per scheduler)", value=lambda row: row.waves, text="{:g}".format, top=16),
    _Panel(title="MFMA share of the K loop", value=lambda row: row.mfma_share, text="{:.0%}".format, top=1),
    _Panel(title="registers of a lane", value=lambda row: _figure(row, "vgprs"), text="{:.0f}".format, top=256),
    _Panel(
        title="bytes per lane and load",
        value=lambda row: _figure(row, "load_bytes_per_lane") or None,
        text="{:.0f}".format,
        top=16,
    ),
)


def _figure(row: Row, name: str) -> float | None:
    return None if row.figures is None else getattr(row.figures, name)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes the heat map of the default configurations to ``path``; a red frame marks those that break a limit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.default]
    arches = list(dict.fromkeys(row.arch for row in shown))
    names = list(dict.fromkeys(_name(row) for row in shown))
    figure = Figure(figsize=(4.2 + 0.72 * len(arches) * len(_PANELS), 1.6 + 0.27 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(_PANELS), sharey=True), _PANELS, strict=True):
        _draw_panel(axes, panel, shown, names, arches)
    figure.suptitle("xmoe kernels, default configurations, compiled without a GPU (grey: does not apply)")
    figure.savefig(path, dpi=130)


def _name(row: Row) -> str:
    return f"{row.case}  {row.dtype}" if row.kernel == row.case else f"{row.case}: {row.kernel}  {row.dtype}"


def _draw_panel(axes: Any, panel: _Panel, rows: Sequence[Row], names: Sequence[str], arches: Sequence[str]) -> None:
    from xmoe.kernels.report import violations

    cells: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        cells.setdefault((names.index(_name(row)), arches.index(row.arch)), []).append(row)
    axes.set_title(panel.title, fontsize=9)
    axes.set_xticks(range(len(arches)), arches, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    # The worst of several shapes, where a kernel compiles to different code for each.
    pick = max if panel.title.startswith("registers") else min
    grid = [[float("nan")] * len(arches) for _ in names]
    for (line, column), found in cells.items():
        values = [value for row in found if (value := panel.value(row)) is not None]
        if values:
            value = grid[line][column] = pick(values)
            dark = value > 0.55 * panel.top
            axes.text(column, line, panel.text(value), ha="center", va="center", fontsize=7, color="w" if dark else "k")
        if any(violations(row) for row in found):
            axes.add_patch(_frame(line, column))
    axes.set_facecolor(_NOTHING)
    axes.imshow(grid, aspect="auto", cmap="YlGnBu", vmin=0, vmax=panel.top)
    axes.set_xticks([column - 0.5 for column in range(1, len(arches))], minor=True)
    axes.set_yticks([line - 0.5 for line in range(1, len(names))], minor=True)
    axes.grid(which="minor", color="w", linewidth=0.8)
    axes.tick_params(which="both", length=0)


def _frame(line: int, column: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.46, line - 0.46), 0.92, 0.92, fill=False, edgecolor=_WRONG, linewidth=1.6, zorder=3)
