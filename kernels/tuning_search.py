"""The search for the fastest configuration of a kernel on the device at hand: candidates, pruning, measuring.

Only ``xmoe kernels tune`` calls this; training takes what it finds on disk (:mod:`xmoe.kernels.tuning_cache`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from . import tuning_cache
from .occupancy import LIMITS
from .tuning import INTERPRETER, Config, config_for, forcing, is_amd, keep_winner, only_defaults

logger = logging.getLogger(__name__)

LDS_BYTES = {arch: limits.workgroup_lds_bytes for arch, limits in LIMITS.items()}
# Warps of a compute unit that give each of its four schedulers (SIMDs) two.
_WARPS_OF_TWO_A_SIMD = 8
# fp32 sums a lane may hold: half of its registers, of 256 on AMD with two waves a SIMD and of 255 on NVIDIA.
_MAX_SUMS_A_LANE = 128
ROUNDS = 7


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """How the blocks of a grouped GEMM are called and what one step of its sums holds in LDS.

    ``tile``   its two blocks of the result; ``step`` the block of the sum
    ``paired`` whether one block of the first side is multiplied with several of the second, of as many matrices as the
               ``width`` of its configuration says: 2 in a gated expert's forward
    ``turned`` whether an operand's rows run across the sum: loads that in-thread transposition speeds up
    """

    tile: tuple[str, str] = ("BLOCK_M", "BLOCK_N")
    step: str = "BLOCK_K"
    paired: bool = False
    turned: bool = True

    def seconds(self, width: int) -> int:
        """Blocks of the second side that meet one of the first."""
        return max(1, width) if self.paired else 1


_WGRAD = Gemm(tile=("BLOCK_OUT", "BLOCK_IN"), step="BLOCK_ROWS")
GEMMS = {
    "grouped_forward": Gemm(turned=False),
    "grouped_forward_activated": Gemm(paired=True, turned=False),
    "grouped_dgrad": Gemm(),
    "grouped_dgrad_activated": Gemm(),
    "grouped_wgrad": _WGRAD,
    "gathered_wgrad": _WGRAD,
}


def candidates(op: str, *, arch: str, dtype: torch.dtype, width: int = 0) -> list[Config]:
    """Configurations worth timing, the default first; none twice, none that :func:`fits` refuses.

    The default is always there: a search never ends with something slower. The interpreter has nothing else.
    """
    with only_defaults():
        default = config_for(op, arch=arch, dtype=dtype, width=width)
    found = [default]
    if arch == INTERPRETER:
        return found
    variants = _gemm_variants(op, arch, dtype, default) if op in GEMMS else _row_variants(arch, default)
    for config in variants:
        if config not in found and fits(op, config, arch=arch, dtype=dtype, width=width):
            found.append(config)
    return found


def _gemm_variants(op: str, arch: str, dtype: torch.dtype, default: Config) -> Iterator[Config]:
    """All shapes of tiles, then compiler options of the default's shape, one at a time."""
    gemm = GEMMS[op]
    steps = (32, 64, 128) if dtype.itemsize == 2 else (16, 32)
    # Triton does this on gfx942 by itself; on gfx90a it is the faster code wherever it is right.
    transposes = gemm.turned and arch == "gfx90a"
    knob_sets = ({}, {"use_in_thread_transpose": True}) if transposes else ({},)
    stages = (default.num_stages,) if arch in ("gfx90a", "gfx942") else (2, 3, 4)
    for first, second, step, warps, depth, knobs in itertools.product(
        (64, 128), (64, 128, 256), steps, (4, 8), stages, knob_sets
    ):
        blocks = {**default.blocks, gemm.tile[0]: first, gemm.tile[1]: second, gemm.step: step}
        yield replace(default, blocks=blocks, num_warps=warps, num_stages=depth, knobs={**default.knobs, **knobs})
    if is_amd(arch):
        for name, value in (("matrix_instr_nonkdim", 32), ("kpack", 1), ("waves_per_eu", 2)):
            if name != "kpack" or arch != "gfx950":
                yield replace(default, options={**default.options, name: value})
    for order in [name for name in ("GROUP_M", "GROUP_OUT") if name in default.blocks]:
        for height in (4, 16):
            yield replace(default, blocks={**default.blocks, order: height})
    if "ADVANCE" in default.blocks:
        yield replace(default, blocks={**default.blocks, "ADVANCE": 1 - default.blocks["ADVANCE"]})


def _row_variants(arch: str, default: Config) -> Iterator[Config]:
    """Half and twice each block and the warps."""
    scaled = [name for name in default.blocks if name.startswith(("BLOCK_", "TILES"))]
    wave = 64 if is_amd(arch) else 32
    for name in scaled or [""]:
        for shift, warps in itertools.product((-1, 0, 1), (1, 2, 4, 8)):
            blocks = dict(default.blocks)
            if name:
                blocks[name] = blocks[name] << shift if shift >= 0 else blocks[name] >> 1
            if all(blocks.values()) and (name != "BLOCK_D" or blocks[name] >= wave):
                yield replace(default, blocks=blocks, num_warps=warps)


def lds_bytes(op: str, config: Config, *, arch: str, dtype: torch.dtype, width: int = 0) -> int:
    """LDS (shared memory) that the operands of one grouped GEMM's workgroup take; 0 for other kernels.

    Both operands of a step lie there once for each stage that is loaded ahead. All but gfx950 and sm_90 hold the
    newest stage in registers, sm_90 too in float32, which it multiplies without its asynchronous instructions. gfx950
    pads rows by a thirty-second where it copies from memory to LDS; if told not to, it is like the others.
    """
    gemm = GEMMS.get(op)
    if gemm is None:
        return 0
    first, second = (config.blocks[name] for name in gemm.tile)
    step_bytes = (first + gemm.seconds(width) * second) * config.blocks[gemm.step] * dtype.itemsize
    copies = arch == "gfx950" and config.knobs.get("use_async_copy", True)
    in_registers = not copies and (arch != "sm_90" or dtype.itemsize == 4)
    stages = config.num_stages - in_registers
    found = step_bytes * max(1, stages)
    return found + found // 32 if copies else found


def fits(op: str, config: Config, *, arch: str, dtype: torch.dtype, width: int = 0) -> bool:
    """Whether enough workgroups for two warps a SIMD fit in LDS, and the sums in half of the registers."""
    gemm = GEMMS.get(op)
    if gemm is None:
        return True
    workgroups = -(-_WARPS_OF_TWO_A_SIMD // config.num_warps)
    first, second = (config.blocks[name] for name in gemm.tile)
    lanes = config.num_warps * (64 if is_amd(arch) else 32)
    return (
        workgroups * lds_bytes(op, config, arch=arch, dtype=dtype, width=width) <= LDS_BYTES[arch]
        and first * second * gemm.seconds(width) <= _MAX_SUMS_A_LANE * lanes
    )


@dataclass(frozen=True, kw_only=True)
class Found:
    """One configuration and its median time."""

    config: Config
    seconds: float


def search(
    configs: Iterable[Config],
    measure: Callable[[Config], float],
    *,
    check: Callable[[Config], object],
    rounds: int = ROUNDS,
) -> list[Found]:
    """The configurations that run, fastest first: the median of ``rounds`` rounds that time each once in turn.

    Interleaved, so that a clock that falls as the chip warms up meets all of them alike. ``check`` compiles and runs
    each once before: one that raises there (the compiler's errors, too few resources, a wrong result) is left out
    with a log line. Raises ValueError when none is left.
    """
    times: list[tuple[Config, list[float]]] = []
    for config in configs:
        try:
            check(config)
        except Exception as error:
            logger.warning("skipping %s: %s: %s", config, type(error).__name__, str(error).splitlines()[:1])
        else:
            times.append((config, []))
    for _ in range(rounds):
        for config, seconds in times:
            seconds.append(measure(config))
    if not times:
        raise ValueError("no configuration runs on this device")
    found = [Found(config=config, seconds=median(seconds)) for config, seconds in times]
    return sorted(found, key=lambda one: one.seconds)


@dataclass(frozen=True, kw_only=True)
class Winner:
    """What :func:`tune` kept for one kernel; ``default_seconds`` is None where the default does not run."""

    key: tuning_cache.Key
    found: Found
    default_seconds: float | None
    num_candidates: int


def tune(
    keys: Sequence[tuning_cache.Key],
    measure: Callable[[], float],
    *,
    check: Callable[[], object],
    rounds: int = ROUNDS,
) -> Iterator[Winner]:
    """Searches each of ``keys``, which ``measure``'s launches ask for, and keeps the winners on disk.

    ``measure`` runs and times the launches, ``check`` runs them and raises where their result is wrong: a compiler
    switch that is faster and wrong must not win. Kernels other than the one searched keep what they have.
    """
    for key in dict.fromkeys(keys):
        configs = candidates(key.op, arch=key.arch, dtype=getattr(torch, key.dtype), width=key.sizes[0])

        def with_config(run: Callable[[], Any], config: Config, *, op: str = key.op) -> Any:
            with forcing({op: config}):
                return run()

        results = search(configs, partial(with_config, measure), check=partial(with_config, check), rounds=rounds)
        of_default = [one.seconds for one in results if one.config == configs[0]]
        keep_winner(key, results[0].config, seconds=results[0].seconds)
        yield Winner(
            key=key,
            found=results[0],
            default_seconds=of_default[0] if of_default else None,
            num_candidates=len(configs),
        )
