"""What every benchmark shares: result lines, versions, timing on a machine that others use too.

A result is data: ``metric``, ``value``, ``unit``, ``better`` (lower or higher), ``setting``, ``versions``. With
``--json`` each is one JSON object a line; without it the same appears as a table.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

FOREIGN_SHARE = 0.05  # a sample in which others used more than this share of the machine's CPU time is discarded


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measured figure. ``spread``: the least and the greatest of its rounds, where it has rounds."""

    metric: str
    value: float
    unit: str
    better: Literal["lower", "higher"]
    setting: Mapping[str, Any]
    spread: tuple[float, float] | None = None

    def as_json(self, used: Mapping[str, str | None]) -> str:
        fields = {name: value for name, value in self.__dict__.items() if value is not None}
        return json.dumps({**fields, "setting": dict(self.setting), "versions": dict(used)})


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of Python, the processor, this project's commit and the named packages (None where absent)."""
    found: dict[str, str | None] = {"python": platform.python_version(), "processor": _processor(), "xmoe": _commit()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return f"{names[0]} ({len(names)} cores)"
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def _commit() -> str:
    version = importlib.metadata.version("xmoe")
    try:
        folder = os.path.dirname(os.path.abspath(__file__))
        commit = subprocess.run(
            ["git", "-C", folder, "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
        return f"{version} ({commit.stdout.strip()})"
    except (OSError, subprocess.CalledProcessError):
        return version


def report(results: list[Result], *, as_json: bool, used: Mapping[str, str | None], title: str) -> None:
    """Prints the results, as JSON lines or as a table."""
    if as_json:
        for result in results:
            print(result.as_json(used))
        return
    table = Table(title=title)
    for heading in ("metric", "setting", "value", "unit", "better"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    for result in results:
        setting = ", ".join(f"{key}={value}" for key, value in result.setting.items())
        table.add_row(result.metric, setting, f"{result.value:.4g}", result.unit, result.better)
    console = Console()
    console.print(table)
    console.print(", ".join(f"{name} {version}" for name, version in used.items()))


# Colours that the colour-blind can tell apart (Okabe and Ito), the first for what others are compared with.
COLOURS = ("#000000", "#d55e00", "#e69f00", "#cc79a7", "#56b4e9", "#0072b2", "#009e73")
GREY = "#5b6472"
PICTURE_STYLE = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e5e8ec",
    "legend.frameon": False,
    "figure.titlesize": 12.5,
    "figure.titleweight": "bold",
}


def save_picture(figure: Any, path: Path, used: Mapping[str, str | None]) -> None:
    """Saves a figure with a line below it that says where, when and with which versions it was measured."""
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    stamp = ", ".join([f"Measured {today}", *(f"{name} {version}" for name, version in used.items())])
    stamp = textwrap.fill(stamp, width=int(15 * figure.get_figwidth()))
    figure.text(0.01, 0.0, stamp, ha="left", va="top", fontsize=7.5, color=GREY)
    figure.savefig(path, dpi=160, facecolor="white", bbox_inches="tight", pad_inches=0.15)


@dataclass
class Samples:
    """Times of one contestant; ``discarded`` samples were disturbed by other processes."""

    seconds: list[float] = field(default_factory=list)
    discarded: int = 0

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def interleaved(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2, max_rounds: int | None = None
) -> dict[str, Samples]:
    """Times each contestant ``rounds`` times, in turns, so that a slow phase of the machine meets all alike.

    A sample during which other processes used more than FOREIGN_SHARE of the CPU time is repeated later, until
    ``max_rounds`` (four times ``rounds``) have been tried; where too few clean ones came, disturbed ones count, and
    stay counted as discarded.
    """
    samples = {name: Samples() for name in contestants}
    disturbed: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(warmup):
        for run in contestants.values():
            run()
    for _ in range(max_rounds or 4 * rounds):
        wanted = [name for name in contestants if len(samples[name].seconds) < rounds]
        if not wanted:
            break
        for name in wanted:
            seconds, foreign = _timed(contestants[name])
            if foreign > FOREIGN_SHARE:
                samples[name].discarded += 1
                disturbed[name].append(seconds)
            else:
                samples[name].seconds.append(seconds)
    for name, found in samples.items():
        found.seconds += sorted(disturbed[name])[: max(rounds - len(found.seconds), 0)]
    return samples


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of one call, and the share of the machine's CPU time that other processes (or the host) used."""
    busy, own, started = _busy_s(), time.process_time(), time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    foreign_s = (_busy_s() - busy) - (time.process_time() - own)
    # The kernel counts in ticks: two of them on each core are noise.
    ticks_s = 2 * (os.cpu_count() or 1) / os.sysconf("SC_CLK_TCK")
    return seconds, max(foreign_s - ticks_s, 0.0) / (seconds * (os.cpu_count() or 1))


def _busy_s() -> float:
    """CPU seconds used on this machine since boot by anybody, those stolen by its host included."""
    try:
        with open("/proc/stat") as stat:
            ticks = [int(part) for part in stat.readline().split()[1:9]]
    except OSError:
        return time.process_time()
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def fail(message: str) -> None:
    """Ends the script with one line on standard error and status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
