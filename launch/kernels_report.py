"""``xmoe kernels report``: what the compiler makes of every kernel on every architecture. Needs no GPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

# xmoe.kernels.report.Row: nothing here may import it, or torch, before a command runs.
Row = Any

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_WIDTH = 220  # of tables that are not written to a terminal
_ORDER = ("GROUP_M", "GROUP_OUT", "NUM_XCD", "ADVANCE")
_BRIEF = {
    "num_warps": "w",
    "num_stages": "s",
    "matrix_instr_nonkdim": "mfma",
    "waves_per_eu": "waves",
    "use_in_thread_transpose": "transpose",
}


def report(
    arch: Annotated[str | None, typer.Option(help="Architectures, separated by commas; all without.")] = None,
    kernel: Annotated[str, typer.Option(help="Only kernels whose name, or whose case's name, has this in it.")] = "",
    dtype: Annotated[str | None, typer.Option(help="Dtypes, separated by commas; all without.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line for each figure.")] = False,
    dump: Annotated[Path | None, typer.Option(help="Write the assembly of every row into this folder.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write a heat map of the defaults to this PNG file.")] = None,
    all_candidates: Annotated[
        bool, typer.Option("--all-candidates", help="Compile every configuration that tuning would try.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Compilations at once.")] = 2,
) -> None:
    """Compile every kernel for every architecture and show registers, occupancy and the work of its hot loop."""
    # Read when kernels are defined: in the processes that compile, which inherit what stands here.
    os.environ.pop("TRITON_INTERPRET", None)
    # Its default changes from Triton 3.10 on; the configurations say the same.
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    from xmoe.kernels.report import find_tasks, violations

    tasks = find_tasks(
        arches=_split(arch),
        dtypes=[_SHORT.get(name, name) for name in _split(dtype)],
        kernel=kernel,
        all_candidates=all_candidates,
        dump=None if dump is None else str(dump),
    )
    rows = _compile(tasks, jobs=jobs)
    if as_json:
        _print_json(rows)
    else:
        _print_tables(rows)
    if picture is not None:
        from .kernels_picture import draw

        draw(rows, picture)
    wrong = [f"{row.label()} {finding}" for row in rows if row.default for finding in violations(row)]
    for sentence in wrong:
        typer.echo(sentence, err=True)
    if wrong:
        raise typer.Exit(1)


def _split(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def _compile(tasks: Sequence[Any], *, jobs: int) -> list[Row]:
    """Rows in the order of the tasks, with a bar on standard error while they come."""
    from xmoe.kernels.report import run

    found: dict[Any, list[Row]] = {}
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("compiling", total=len(tasks))
        for task, rows in run(tasks, jobs=jobs):
            found[task] = rows
            progress.advance(bar)
    return [row for task in tasks for row in found[task]]


def _print_json(rows: Sequence[Row]) -> None:
    used = _versions()
    for row in rows:
        for metric, value, unit, better in row.metrics():
            line = {"metric": metric, "value": value, "unit": unit, "better": better}
            typer.echo(json.dumps({**line, "setting": row.setting(), "versions": used}))


def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("xmoe", "torch", "triton")}
    return {"python": platform.python_version(), **packages}


def _print_tables(rows: Sequence[Row]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for arch in dict.fromkeys(row.arch for row in rows):
        console.print(_table(arch, [row for row in rows if row.arch == arch]))
    console.print(", ".join(f"{name} {version}" for name, version in _versions().items()))


def _table(arch: str, rows: Sequence[Row]) -> Table:
    is_amd = arch.startswith("gfx")
    table = Table(title=arch, caption="configuration: blocks, w warps, s stages, compiler options")
    for heading in ("kernel", "case", "dtype", "shape", "configuration"):
        table.add_column(heading, overflow="fold")
    registers = ("VGPR+AGPR", "SGPR") if is_amd else ("registers",)
    loop = ("MFMA", "share") if is_amd else ("mma",)
    for heading in (*registers, "spills", "scratch", "LDS KB", "waves", *loop, "loads", "stores"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*_names(row), *(_figures(row) if row.figures is not None else [Text("failed", style="red")]))
    return table


def _names(row: Row) -> list[str]:
    mark = "" if row.default else " (candidate)"
    return [row.kernel, row.case + mark, row.dtype, row.shape, configuration(row)]


def configuration(row: Row) -> str:
    """``128x128x32 w8 s2 mfma16 kpack2``: block sizes, warps, stages, options; not what only orders the tiles."""
    config = {name: value for name, value in row.config.items() if name not in _ORDER}
    blocks = "x".join(str(config.pop(name)) for name in list(config) if name.startswith("BLOCK_"))
    return " ".join([blocks, *(f"{_BRIEF.get(name, name.lower())}{value:d}" for name, value in config.items())]).strip()


def _figures(row: Row) -> list[str]:
    figures = row.figures
    assert figures is not None
    loop = figures.hot_loop
    cells = [f"{figures.vgprs - figures.agprs}+{figures.agprs}", str(figures.sgprs)]
    cells = cells if row.arch.startswith("gfx") else [str(figures.vgprs)]
    cells += [str(figures.spills), str(figures.scratch_bytes), f"{row.lds_bytes / 1024:.3g}", f"{row.waves:g}"]
    cells.append("" if loop is None else str(loop.matrix_instructions))
    if row.arch.startswith("gfx"):
        cells.append("" if row.mfma_share is None else f"{row.mfma_share:.0%}")
    loads = figures.loads if loop is None else loop.loads
    return [*cells, _widths(loads), _widths(figures.stores)]


def _widths(counts: Mapping[int, int]) -> str:
    """``8x16 2x4``: eight of 16 bytes and two of 4."""
    return " ".join(f"{counts[width]}x{width}" for width in sorted(counts, reverse=True))
