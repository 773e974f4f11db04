"""``xmoe bench``: what the machine at hand can do, beyond one GPU."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from xmoe import __version__
from xmoe.config import ConfigError
from xmoe.links import FILE_VARIABLE, links_path, write_links

from .env import find_place

bench = typer.Typer(help="Measure the machine at hand.", no_args_is_help=True)


@bench.callback()
def _options() -> None:
    """Keeps ``links`` a sub-command: typer runs a lone command without its name."""


@bench.command()
def links(
    out: Annotated[
        Path | None,
        typer.Option(help=f"Keep the figures in this file; {FILE_VARIABLE} names it to later jobs on any nodes."),
    ] = None,
    max_mib: Annotated[int, typer.Option(min=1, max=1024, help="The most that one rank sends at once, in MiB.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Times each size is measured; less where it takes long.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line for each measurement.")] = False,
) -> None:
    """Measure latency and bandwidth inside a node and between nodes; start it once per rank, as training.

    The figures are kept for jobs on these hosts, or in --out.
    """
    place = find_place(os.environ)
    if place.world_size == 1:
        raise ConfigError(
            "xmoe bench links", "1 rank", "has no links: start at least two ranks with torchrun, srun or mpiexec"
        )
    place.export(os.environ)
    import torch
    import torch.distributed as dist

    from xmoe.groups import raise_together
    from xmoe.link_bench import measure_links

    device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=timedelta(minutes=5))
    try:
        report = measure_links(device, max_bytes=max_mib * 2**20, rounds=rounds)
        path, error = _keep(report, out, torch=torch.__version__) if place.rank == 0 else (None, None)
        raise_together(error)
        if path is not None:
            _show(report, path, as_json=as_json)
    finally:
        dist.destroy_process_group()


def _keep(report: Any, out: Path | None, **versions: str) -> tuple[Path | None, ConfigError | None]:
    """Writes what dispatch will meet: the all-to-alls. Returns the file, or the error of one that cannot be written."""
    intra_node = report.fit_of("all-to-all", "intra-node")
    inter_node = report.fit_of("all-to-all", "inter-node")
    try:
        path = out or links_path(report.hosts, report.setting.ranks_per_node)
        write_links(
            path,
            intra_node=intra_node and intra_node.link,
            inter_node=inter_node and inter_node.link,
            hosts=report.hosts,
            setting={**_setting(report), "xmoe": __version__, **versions},
        )
    except ConfigError as error:
        return None, error
    except OSError as error:
        return None, ConfigError("--out", str(path), f"cannot be written ({error.strerror}); name a writable file")
    return path, None


def _setting(report: Any) -> dict[str, object]:
    return {"nodes": len(report.hosts), **vars(report.setting)}


def _show(report: Any, path: Path, *, as_json: bool) -> None:
    if as_json:
        for found in report.measurements:
            line = {
                "pattern": found.pattern,
                "link": found.link_class,
                "latency_us": found.fit.link.latency_s * 1e6,
                "bandwidth_gb_per_s": found.fit.link.bandwidth_bytes_per_s / 1e9,
                "relative_error": found.fit.relative_error,
                "points": [vars(point) for point in found.points],
                "setting": _setting(report),
                "file": str(path),
            }
            typer.echo(json.dumps(line))
        return
    setting = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in list(_setting(report).items())[:2])
    table = Table(title=f"{setting}, {report.setting.backend}, {report.setting.device}")
    for heading in ("pattern", "links", "latency us", "GB/s", "fit error"):
        table.add_column(heading, justify="left" if heading in ("pattern", "links") else "right", no_wrap=True)
    for found in report.measurements:
        link = found.fit.link
        table.add_row(
            found.pattern,
            found.link_class,
            f"{link.latency_s * 1e6:.2f}",
            f"{link.bandwidth_bytes_per_s / 1e9:.3g}",
            f"{found.fit.relative_error:.0%}",
        )
    Console().print(table)
    typer.echo(f"kept in {path}")
