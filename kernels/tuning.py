"""Block sizes, warps and compiler options of every kernel, by architecture: the only place that tells chips apart."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from . import tuning_cache

logger = logging.getLogger(__name__)

INTERPRETER = "interpreter"
# Of MI250X (one of its two dies), MI300X, MI355X, A100 and H100; few in the interpreter, so that loops go round.
_COMPUTE_UNITS = {"gfx90a": 110, "gfx942": 304, "gfx950": 256, "sm_80": 108, "sm_90": 132, INTERPRETER: 3}
# Dies with an L2 cache of their own that one device spans.
_DIES = {"gfx942": 8, "gfx950": 8}
ARCHES = ("gfx90a", "gfx942", "gfx950", "sm_80", "sm_90")


@dataclass(frozen=True, kw_only=True)
class Config:
    """How one kernel is compiled.

    ``blocks``   block sizes and other constexprs that do not change the result, by parameter name
    ``options``  compiler options beside warps and stages that the architecture's backend knows, such as
                 ``matrix_instr_nonkdim``, ``kpack`` and ``waves_per_eu``
    ``knobs``    switches of ``triton.knobs.amd`` set while this configuration is compiled, such as
                 ``use_in_thread_transpose``; without effect on other hardware
    """

    blocks: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 2
    options: Mapping[str, int] = field(default_factory=dict)
    knobs: Mapping[str, bool] = field(default_factory=dict)

    def compiler_options(self) -> dict[str, int | bool]:
        """Options as Triton takes them. Fused multiply-add is asked for by name: Triton's default changes."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True, **self.options}


def is_amd(arch: str) -> bool:
    return arch.startswith("gfx")


def compute_units(arch: str) -> int:
    """Compute units (streaming multiprocessors) of the chip: of one die of an MI250X, of a whole MI300X."""
    return _COMPUTE_UNITS[arch]


def config_for(
    op: str, *, arch: str, dtype: torch.dtype, width: int = 0, rows: int = 0, sizes: tuple[int, ...] = ()
) -> Config:
    """The configuration of kernel ``op``: one forced by :func:`forcing`, else the search's winner, else the default.

    ``width``  the row width, or the number of experts or of one expert's matrices, that one program spans
    ``rows``   a number that changes from batch to batch, for the winner's bucket; ``sizes`` those that stay

    Nothing is timed here: winners are those that ``xmoe kernels tune`` left on disk for this very chip.
    """
    choice = _CHOICE.get()
    bucket = tuning_cache.bucket(rows)
    if choice.asked is not None:
        choice.asked.append(_key(op, arch, dtype, bucket, (width, *sizes)))
    if op in choice.forced:
        return choice.forced[op]
    if choice.only_defaults or arch == INTERPRETER:
        return _ROW_OPS[op](arch, dtype, width)
    return _kept(op, arch, dtype, bucket, (width, *sizes))


def _key(op: str, arch: str, dtype: torch.dtype, rows: int, sizes: tuple[int, ...]) -> tuning_cache.Key:
    name = str(dtype).removeprefix("torch.")
    return tuning_cache.Key(op=op, arch=arch, dtype=name, rows=rows, sizes=sizes, triton=triton_version())


@functools.cache
def _kept(op: str, arch: str, dtype: torch.dtype, rows: int, sizes: tuple[int, ...]) -> Config:
    """Looked for on disk once in a process: this runs before every launch."""
    return _winner(_key(op, arch, dtype, rows, sizes), _ROW_OPS[op](arch, dtype, sizes[0]))


def keep_winner(key: tuning_cache.Key, config: Config, *, seconds: float) -> None:
    """Keeps the search's winner on disk, for this process as well."""
    tuning_cache.write(key, asdict(config), seconds=seconds)
    forget_winners()


def forget_winners() -> None:
    """Looks on disk again."""
    _kept.cache_clear()


@dataclass(frozen=True, kw_only=True)
class _Choice:
    forced: Mapping[str, Config] = field(default_factory=dict)
    asked: list[tuning_cache.Key] | None = None
    only_defaults: bool = False


_NO_CHOICE = _Choice()
_CHOICE: ContextVar[_Choice] = ContextVar("xmoe_tuning_choice", default=_NO_CHOICE)


@contextlib.contextmanager
def _choosing(**changes: Any) -> Iterator[None]:
    token = _CHOICE.set(replace(_CHOICE.get(), **changes))
    try:
        yield
    finally:
        _CHOICE.reset(token)


def forcing(configs: Mapping[str, Config]) -> contextlib.AbstractContextManager[None]:
    """Inside, :func:`config_for` returns ``configs[op]`` for the ops named."""
    return _choosing(forced={**_CHOICE.get().forced, **configs})


def only_defaults() -> contextlib.AbstractContextManager[None]:
    """Inside, :func:`config_for` leaves the winners on this machine's disk alone."""
    return _choosing(only_defaults=True)


@contextlib.contextmanager
def asking() -> Iterator[list[tuning_cache.Key]]:
    """Collects what :func:`config_for` is asked for on this thread."""
    asked: list[tuning_cache.Key] = []
    with _choosing(asked=asked):
        yield asked


def _winner(key: tuning_cache.Key, default: Config) -> Config:
    """The search's winner for ``key`` or a neighbouring bucket, or ``default``.

    A winner of an older kernel, whose parameters had other names, is none.
    """
    found = tuning_cache.find_near(key)
    if found is None:
        return default
    try:
        winner = Config(**found)
        if winner.blocks.keys() != default.blocks.keys():
            raise ValueError(f"its blocks are {sorted(winner.blocks)}, the kernel's {sorted(default.blocks)}")
        numbers = {**winner.compiler_options(), **winner.blocks, **winner.knobs}
        if wrong := [name for name, value in numbers.items() if not isinstance(value, int)]:
            raise ValueError(f"{wrong[0]} ({numbers[wrong[0]]!r}) is no integer")
    except (TypeError, ValueError, AttributeError) as error:
        logger.warning("ignoring the tuning result %s: %s", key.path(), error)
        return default
    return winner


@functools.cache
def triton_version() -> str:
    try:
        import triton
    except ModuleNotFoundError:
        return "none"
    return str(triton.__version__)


def _row(arch: str, dtype: torch.dtype, width: int, *, block: str = "BLOCK_D", vectors: int, max_warps: int) -> Config:
    """Blocks of one row: ``vectors`` loads of 16 bytes a lane, in no more warps than the row fills."""
    lanes, values = 64 if is_amd(arch) else 32, 16 // dtype.itemsize
    of_warp = lanes * values * vectors
    size = max(lanes * values, min(1 << (width - 1).bit_length(), max_warps * of_warp))
    options = {"waves_per_eu": 8} if is_amd(arch) else {}
    return Config(blocks={block: size}, num_warps=max(1, size // of_warp), options=options)


def _gather(arch: str, dtype: torch.dtype, width: int) -> Config:
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_D": 16})
    return _row(arch, dtype, width, vectors=4, max_warps=4)


def _combine(arch: str, dtype: torch.dtype, width: int) -> Config:
    """One load a lane and row, ``GROUP_K`` rows in flight."""
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_D": 16, "GROUP_K": 2})
    row = _row(arch, dtype, width, vectors=1, max_warps=4)
    return replace(row, blocks={**row.blocks, "GROUP_K": 8})


def _row_dot(arch: str, dtype: torch.dtype, width: int) -> Config:
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_D": 16})
    return _row(arch, dtype, width, vectors=2, max_warps=4)


def _segment_sums(arch: str, dtype: torch.dtype, width: int) -> Config:
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_M": 16, "BLOCK_D": 16})
    return Config(blocks={"BLOCK_M": 64, "BLOCK_D": 128 // dtype.itemsize}, num_warps=4)


def _activation(arch: str, dtype: torch.dtype, width: int) -> Config:
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_F": 16})
    return _row(arch, dtype, width, block="BLOCK_F", vectors=1, max_warps=4)


def _plan(arch: str, dtype: torch.dtype, width: int) -> Config:
    """Slots of one block, sorted in registers: 4 a lane. A count for each of many experts takes more lanes."""
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_S": 16})
    num_warps = 16 if width > 1024 else 4 if is_amd(arch) and width <= 512 else 8
    return Config(blocks={"BLOCK_S": 1024}, num_warps=num_warps)


def _plan_offsets(arch: str, dtype: torch.dtype, width: int) -> Config:
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_B": 4, "BLOCK_E": 8})
    return Config(blocks={"BLOCK_B": 64, "BLOCK_E": 16}, num_warps=4)


def _tile_schedule(arch: str, dtype: torch.dtype, width: int) -> Config:
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_T": 4})
    return Config(blocks={"BLOCK_T": 256}, num_warps=4)


def _slot_ranks(arch: str, dtype: torch.dtype, width: int) -> Config:
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_E": 8, "BLOCK_S": 16})
    return Config(blocks={"BLOCK_E": 256, "BLOCK_S": 1024}, num_warps=4)


def _slot_tile(arch: str, dtype: torch.dtype, width: int) -> Config:
    """Tiles of tokens by choices, of which there are ``width``: 2 slots a lane."""
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_T": 16})
    return Config(blocks={"BLOCK_T": max(1, (512 if is_amd(arch) else 256) // width)}, num_warps=4)


def _pilot_weights(arch: str, dtype: torch.dtype, width: int) -> Config:
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_B": 2})
    return Config(blocks={"BLOCK_B": max(1, 512 // width)}, num_warps=4)


def _messages(arch: str, dtype: torch.dtype, width: int) -> Config:
    """Tiles of ranks by the columns of their messages."""
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_W": 2})
    return Config(blocks={"BLOCK_W": max(1, 512 // width)}, num_warps=min(16, max(4, width // 64)))


def _spans(arch: str, dtype: torch.dtype, width: int) -> Config:
    """Blocks of items that lie side by side."""
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_S": 8})
    return Config(blocks={"BLOCK_S": 512}, num_warps=4)


# BLOCK_ROWS and warps of 16-bit tiles of 128 x 128 on AMD; the gathered kernel's come second. Longer blocks need more
# than the 256 registers that let two waves share a SIMD, once the kernel also adds to an older gradient.
_WGRAD = {"gfx90a": ((32, 4), (32, 4)), "gfx942": ((64, 8), (32, 4)), "gfx950": ((64, 4), (64, 4))}


def _wgrad(arch: str, dtype: torch.dtype, width: int, *, gathered: bool = False) -> Config:
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_OUT": 16, "BLOCK_IN": 16, "BLOCK_ROWS": 16, "GROUP_OUT": 2, "NUM_XCD": 2})
    block_in, (block_rows, num_warps) = (128, _WGRAD[arch][gathered]) if is_amd(arch) else (64, (64, 8))
    if dtype.itemsize > 2:
        block_rows, num_warps = 16, 4 if arch == "gfx950" else 8
    order = {"GROUP_OUT": 8, "NUM_XCD": _DIES.get(arch, 1)}
    blocks = {"BLOCK_OUT": 128, "BLOCK_IN": block_in, "BLOCK_ROWS": block_rows, **order}
    options = {"matrix_instr_nonkdim": 16, "kpack": 1 if arch == "gfx950" else 2} if is_amd(arch) else {}
    return Config(blocks=blocks, num_warps=num_warps, num_stages=2 if is_amd(arch) else 3, options=options)


def _gate(arch: str, dtype: torch.dtype, width: int) -> Config:
    """Tiles of all experts with 2 elements a lane, 4 where that keeps a token in one wave: more of them spill."""
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_T": 8, "TILES": 2})
    wave = 64 if is_amd(arch) else 32
    num_warps = 4 if width <= 4 * wave else 8
    each = 4 if 2 * wave < width <= 4 * wave or width > 16 * wave else 2
    block = max(1, min(32, num_warps * wave * each // width))
    return Config(blocks={"BLOCK_T": block, "TILES": max(1, 32 // block)}, num_warps=num_warps)


def _gate_held(arch: str, dtype: torch.dtype, width: int) -> Config:
    """Held to 64 vector registers, which the compiler left alone passes by 8 in some forms of these kernels."""
    options = {"waves_per_eu": 8} if is_amd(arch) else {}
    return replace(_gate(arch, dtype, width), options=options)


def _gate_sums(arch: str, dtype: torch.dtype, width: int) -> Config:
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_P": 4, "BLOCK_E": 16})
    return Config(blocks={"BLOCK_P": 16, "BLOCK_E": 64 if is_amd(arch) else 32}, num_warps=4)


def _gemm(arch: str, dtype: torch.dtype, op: str, matrices: int) -> Config:
    """Grouped GEMMs along rows, by the number of matrices that a program multiplies by at once."""
    order = {"GROUP_M": 8, "NUM_XCD": _DIES.get(arch, 1), "ADVANCE": 0}
    if arch == INTERPRETER:
        order |= {"GROUP_M": 2, "NUM_XCD": 2}
        return Config(blocks={"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, **order})
    if dtype.itemsize > 2:
        block_m, block_n, block_k, num_warps = 64, 64, 16, 4
        if is_amd(arch) and "dgrad" in op:
            block_k, num_warps = 32, 8  # half the masks a lane: they are scalar registers, which spill
    elif not is_amd(arch):
        # Two sums, or the activation's backward, of 128 columns spill.
        wide = matrices == 1 and op != "grouped_dgrad_activated"
        block_m, block_n, block_k, num_warps = 128, 128 if wide else 64, 64, 8
    elif arch == "gfx950":
        # Steps as long as LDS and registers allow: MFMAs are fast here, and addresses cost the same at any length.
        block_m, block_n, block_k, num_warps = 128, 128, 64, 4
        if "activated" in op:
            block_k, num_warps = 128 // matrices, 8
    else:
        block_m, block_n, block_k, num_warps = 128, 128, 32 if "forward" in op else 64, 8
    # Copies from memory to LDS take addresses from vector registers alone: a scalar is no cheaper than to advance.
    # Of float32 they are four bytes wide, so that there loads go through registers.
    copies = arch == "gfx950" and dtype.itemsize == 2
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, **order}
    blocks["ADVANCE"] = int(copies or not is_amd(arch))
    return Config(
        blocks=blocks,
        num_warps=num_warps,
        num_stages=2 if is_amd(arch) else 3,
        options={"matrix_instr_nonkdim": 16, "kpack": 1 if arch == "gfx950" else 2} if is_amd(arch) else {},
        knobs={"use_async_copy": False} if arch == "gfx950" and not copies else {},
    )


def _forward(arch: str, dtype: torch.dtype, width: int) -> Config:
    return _gemm(arch, dtype, "grouped_forward", 1)


def _forward_activated(arch: str, dtype: torch.dtype, width: int) -> Config:
    return _gemm(arch, dtype, "grouped_forward_activated", width or 2)


def _dgrad(arch: str, dtype: torch.dtype, width: int) -> Config:
    return _gemm(arch, dtype, "grouped_dgrad", 1)


def _dgrad_activated(arch: str, dtype: torch.dtype, width: int) -> Config:
    return _gemm(arch, dtype, "grouped_dgrad_activated", 1)


_ROW_OPS = {
    "grouped_forward": _forward,
    "grouped_forward_activated": _forward_activated,
    "grouped_dgrad": _dgrad,
    "grouped_dgrad_activated": _dgrad_activated,
    "gate_forward": _gate,
    "gate_forward_held": _gate_held,
    "gate_backward": _gate,
    "gate_sums": _gate_sums,
    "top_k_ids": _gate,
    "gather": _gather,
    "combine": _combine,
    "row_dot": _row_dot,
    "segment_sums": _segment_sums,
    "activation_forward": _activation,
    "activation_backward": _activation,
    "plan": _plan,
    "plan_offsets": _plan_offsets,
    "tile_schedule": _tile_schedule,
    "slot_ranks": _slot_ranks,
    "pilots": _slot_tile,
    "pilot_weights": _pilot_weights,
    "share_rows": _slot_tile,
    "row_references": _slot_tile,
    "messages": _messages,
    "references": _spans,
    "arrivals": _spans,
    "grouped_wgrad": _wgrad,
    "gathered_wgrad": functools.partial(_wgrad, gathered=True),
}
