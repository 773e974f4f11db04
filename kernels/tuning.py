"""Block sizes, warps and compiler options of every kernel, by architecture: the only place that tells chips apart."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from . import tuning_cache

logger = logging.getLogger(__name__)

INTERPRETER = "interpreter"
# Of MI250X (one of its two dies), MI300X, MI355X, A100 and H100; few in the interpreter, so that loops go round.
_COMPUTE_UNITS = {"gfx90a": 110, "gfx942": 304, "gfx950": 256, "sm_80": 108, "sm_90": 132, INTERPRETER: 3}
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

    ``width``  the row width, or the number of experts, that one program spans
    ``rows``   a number that changes from batch to batch, for the winner's bucket; ``sizes`` those that stay

    Nothing is timed here: winners are those that ``xmoe kernels tune`` left on disk for this very chip.
    """
    key = tuning_cache.Key(
        op=op,
        arch=arch,
        dtype=str(dtype).removeprefix("torch."),
        rows=tuning_cache.bucket(rows),
        sizes=(width, *sizes),
        triton=_triton_version(),
    )
    choice = _CHOICE.get()
    if choice.asked is not None:
        choice.asked.append(key)
    if op in choice.forced:
        return choice.forced[op]
    default = _ROW_OPS[op](arch, dtype, width)
    if choice.only_defaults or arch == INTERPRETER:
        return default
    return _winner(key, default)


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
    """The search's winner for ``key``, or ``default``; also where the winner is of an older kernel's parameters."""
    found = tuning_cache.find(key)
    if found is None:
        return default
    try:
        winner = Config(**found)
        if winner.blocks.keys() != default.blocks.keys():
            raise ValueError(f"its blocks are {sorted(winner.blocks)}, the kernel's {sorted(default.blocks)}")
    except (TypeError, ValueError, AttributeError) as error:
        _warn_once(f"ignoring the tuning result {key.path()}: {error}")
        return default
    return winner


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


@functools.cache
def _triton_version() -> str:
    try:
        import triton
    except ModuleNotFoundError:
        return "none"
    return str(triton.__version__)


def _gather(arch: str, dtype: torch.dtype, width: int) -> Config:
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_D": 16})
    return Config(blocks={"BLOCK_D": 2048 // dtype.itemsize * 2}, num_warps=4)


_ROW_OPS = {"gather": _gather}
