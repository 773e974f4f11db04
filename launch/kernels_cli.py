"""``xmoe kernels``: what the Triton kernels do on this machine's GPU, and which configurations suit it best."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from xmoe import __version__
from xmoe.config import ConfigError

from .kernels_report import report

kernels = typer.Typer(help="Time, tune and look into the Triton kernels.", no_args_is_help=True)
kernels.command()(report)

# Of the table with the longest kernel's name: a narrower terminal, or a file, wraps lines and loses no digits.
_TABLE_WIDTH = 110

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
    from xmoe.kernels.bench import as_line, time_case

    sizes = dict(num_tokens=tokens, width=width, expert_width=expert_width, num_experts=experts, top_k=top_k)
    timings = []
    for case in _cases("xmoe kernels bench", sizes, dtype, only):
        timings.append(time_case(case))
        if as_json:
            typer.echo(as_line(timings[-1], xmoe=__version__))
    if not as_json:
        console = Console()
        console.width = max(console.width, _TABLE_WIDTH)
        console.print(_timing_table(timings))


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
    from xmoe.kernels.bench import tune_case
    from xmoe.kernels.tuning_cache import cache_folder

    sizes = dict(num_tokens=tokens, width=width, expert_width=expert_width, num_experts=experts, top_k=top_k)
    try:
        for case in _cases("xmoe kernels tune", sizes, dtype, only):
            for winner in tune_case(case):
                typer.echo(_winner_line(case, winner))
    except OSError as error:
        raise ConfigError("XMOE_CACHE_DIR", str(cache_folder()), f"winners cannot be kept there: {error}") from error
    typer.echo(f"winners are in {cache_folder()}")


def _cases(command: str, sizes: dict[str, int], dtype: str, only: list[str] | None) -> Iterator[Any]:
    """The cases on this machine's GPU. ValueError where there is none."""
    from xmoe.kernels.bench import find_device

    device = find_device(command)
    from xmoe.kernels.bench_cases import Shape, cases_of

    return cases_of(Shape(**sizes), dtype=dtype, device=device, only=only or ())


def _winner_line(case: Any, winner: Any) -> str:
    best, default = winner.found, winner.default_seconds
    gain = "the default does not run" if default is None else f"{default / best.seconds:.2f} times the default's speed"
    blocks = " ".join(f"{name}={size}" for name, size in best.config.blocks.items())
    more = " ".join(f"{name}={value}" for name, value in {**best.config.options, **best.config.knobs}.items())
    return (
        f"{case.kernel} {winner.key.op} {winner.key.dtype} rows<={winner.key.rows or 'any'}: "
        f"{best.seconds * 1e3:.3f} ms, {gain}, of {winner.num_candidates}: "
        f"{blocks} warps={best.config.num_warps} stages={best.config.num_stages} {more}".rstrip()
    )


def _timing_table(timings: list[Any]) -> Table:
    table = Table(title=f"{timings[0].device}, {timings[0].arch}" if timings else None)
    for heading in ("kernel", "dtype", "ms", "torch ms", "speed-up", "TFLOP/s", "of peak", "GB/s", "of peak"):
        left = heading in ("kernel", "dtype")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for timing in timings:
        baseline = timing.torch_p50_ms
        table.add_row(
            timing.kernel,
            timing.dtype,
            f"{timing.p50_ms:.3f}",
            f"{baseline:.3f}" if baseline is not None else "",
            f"{baseline / timing.p50_ms:.2f}" if baseline is not None else "",
            f"{timing.tflop_per_s:.1f}" if timing.flops else "",
            _percent(timing.share_of_peak_flops),
            f"{timing.gb_per_s:.0f}",
            _percent(timing.share_of_peak_bandwidth),
        )
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
