"""``xmoe kernels``: what the Triton kernels do on this machine's GPU, and which configurations suit it best."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from .kernels_report import report

if TYPE_CHECKING:
    from xmoe.kernels.bench import Case, Timing

kernels = typer.Typer(help="Time, tune and look into the Triton kernels.", no_args_is_help=True)
kernels.command()(report)

Tokens = Annotated[int, typer.Option(min=1, help="T, tokens on one GPU.")]
Width = Annotated[int, typer.Option(min=1, help="D, width of the model.")]
ExpertWidth = Annotated[int, typer.Option(min=1, help="F, width of one expert.")]
Experts = Annotated[int, typer.Option(min=1, help="Experts on one GPU.")]
TopK = Annotated[int, typer.Option(min=1, help="Experts of each token.")]
DType = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
Only = Annotated[list[str] | None, typer.Option("--only", help="This kernel alone; may be given several times.")]


@kernels.command()
def bench(
    tokens: Tokens = 8192,
    width: Width = 2048,
    expert_width: ExpertWidth = 1408,
    experts: Experts = 64,
    top_k: TopK = 6,
    dtype: DType = "bfloat16",
    only: Only = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line for each kernel.")] = False,
) -> None:
    """Time each kernel against torch on this machine's GPU, after checking that both agree."""
    from xmoe.kernels.bench import cases_of, find_device, time_case

    cases = cases_of(
        find_device("xmoe kernels bench"),
        num_tokens=tokens,
        width=width,
        expert_width=expert_width,
        num_experts=experts,
        top_k=top_k,
        dtype=dtype,
        only=only or (),
    )
    timings = []
    for case in cases:
        timings.append(time_case(case))
        if as_json:
            typer.echo(json.dumps(asdict(timings[-1])))
    if not as_json:
        Console().print(_timing_table(timings))


@kernels.command()
def tune(
    tokens: Tokens = 8192,
    width: Width = 2048,
    expert_width: ExpertWidth = 1408,
    experts: Experts = 64,
    top_k: TopK = 6,
    dtype: DType = "bfloat16",
    only: Only = None,
) -> None:
    """Search each kernel's configurations on this machine's GPU and keep the fastest for later runs."""
    from xmoe.kernels.bench import cases_of, find_device
    from xmoe.kernels.tuning_cache import cache_folder
    from xmoe.kernels.tuning_search import tune_case

    cases: list[Case] = cases_of(
        find_device("xmoe kernels tune"),
        num_tokens=tokens,
        width=width,
        expert_width=expert_width,
        num_experts=experts,
        top_k=top_k,
        dtype=dtype,
        only=only or (),
    )
    for case in cases:
        for line in tune_case(case):
            typer.echo(line)
    typer.echo(f"winners are in {cache_folder()}")


def _timing_table(timings: list[Timing]) -> Table:
    table = Table(title=timings[0].device if timings else None)
    for heading in ("kernel", "dtype", "ms", "torch ms", "speed-up", "TFLOP/s", "of peak", "GB/s", "of peak"):
        table.add_column(heading, justify="left" if heading in ("kernel", "dtype") else "right")
    for timing in timings:
        table.add_row(
            timing.kernel,
            timing.dtype,
            f"{timing.p50_ms:.3f}",
            f"{timing.torch_p50_ms:.3f}",
            f"{timing.torch_p50_ms / timing.p50_ms:.2f}",
            f"{timing.tflop_per_s:.1f}" if timing.tflop_per_s else "",
            _percent(timing.share_of_peak_flops) if timing.tflop_per_s else "",
            f"{timing.gb_per_s:.0f}",
            _percent(timing.share_of_peak_bandwidth),
        )
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
