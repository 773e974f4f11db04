"""The one way a Triton kernel is started: counted, described, and recordable where there is no device.

A launcher builds a :class:`Launch` (kernel, grid, every argument by name, compiler options, cost) and gives it to
:func:`launch`. On a device, and in Triton's interpreter, the kernel runs. Inside :func:`recording` nothing runs:
the launches are collected, with arguments that may be meta tensors, so that the very calls the layer makes can be
compiled for an architecture that this machine does not have.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .tuning import ARCHES, INTERPRETER, Config, is_amd, only_defaults

WAVE_SIZE, WARP_SIZE = 64, 32


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a launch moves and computes, for rooflines. ``bytes_read`` counts every element loaded, caches ignored."""

    bytes_read: int
    bytes_written: int
    flops: int = 0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch. ``arguments`` holds tensors, numbers and constexprs by the kernel's parameter names.

    ``op``    the name under which ``xmoe.kernels.tuning`` keeps the kernel's configurations
    ``grid``  programs along x, y and z; tokens and rows are counted along x, which alone is long
    """

    op: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    config: Config
    cost: Cost

    @property
    def name(self) -> str:
        """The kernel's name as users see it: ``gather_rows`` for ``_gather_rows_kernel``."""
        return str(self.kernel.__name__).removeprefix("_").removesuffix("_kernel")

    def keywords(self) -> dict[str, Any]:
        """Arguments, block sizes and compiler options, as Triton takes them."""
        return {**self.arguments, **self.config.blocks, **self.config.compiler_options()}


@dataclass
class _Recorder:
    arch: str
    launches: list[Launch] = field(default_factory=list)


_RECORDER: ContextVar[_Recorder | None] = ContextVar("xmoe_recorder", default=None)
_COUNTS: ContextVar[Counter[str] | None] = ContextVar("xmoe_launch_counts", default=None)


@contextlib.contextmanager
def recording(arch: str) -> Iterator[list[Launch]]:
    """Collects launches, with the defaults of ``arch``, instead of running them. ValueError for an unknown arch."""
    if arch not in ARCHES:
        raise ValueError(f"arch ({arch}) must be one of {', '.join(ARCHES)}")
    recorder = _Recorder(arch)
    token = _RECORDER.set(recorder)
    try:
        with only_defaults():
            yield recorder.launches
    finally:
        _RECORDER.reset(token)


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts launches by kernel name on this thread."""
    counts: Counter[str] = Counter()
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)


def interpreted() -> bool:
    """Whether Triton interprets kernels on the host: ``TRITON_INTERPRET=1``, read when kernels are defined."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on")


def arch_of(x: Tensor) -> str:
    """The architecture whose configurations a launch on ``x`` uses.

    That of :func:`recording` inside it, ``interpreter`` for host tensors, else the device's; a device that has no
    configurations takes those of the nearest older relative. Raises ValueError for host tensors without interpreter.
    """
    recorder = _RECORDER.get()
    if recorder is not None:
        return recorder.arch
    if x.device.type == "cpu":
        if not interpreted():
            raise ValueError('Triton kernels need a GPU: x is on "cpu", and TRITON_INTERPRET is not set')
        return INTERPRETER
    return device_arch(x.device)


def device_arch(device: torch.device) -> str:
    """``gfx90a``, ``sm_90``, ... of a GPU, or the nearest in :data:`~xmoe.kernels.tuning.ARCHES` below it."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        found = str(properties.gcnArchName).split(":")[0]
        family = [arch for arch in ARCHES if arch.startswith("gfx")]
    else:
        found = f"sm_{properties.major}{properties.minor}"
        family = [arch for arch in ARCHES if arch.startswith("sm_")]
    if found in family:
        return found
    # Of equal length, gfx and sm names order as their hardware does.
    older = [arch for arch in family if len(arch) < len(found) or (len(arch) == len(found) and arch < found)]
    return older[-1] if older else family[0]


def launch(call: Launch) -> None:
    """Runs the kernel, or records it inside :func:`recording`. A grid without programs runs nothing.

    The kernel runs on its tensors' device, whichever is current: Triton itself would take the current one. Raises
    ValueError for a grid larger than the device takes.
    """
    counts = _COUNTS.get()
    if counts is not None:
        counts[call.name] += 1
    recorder = _RECORDER.get()
    if recorder is not None:
        _check_grid(call, amd=is_amd(recorder.arch))
        recorder.launches.append(call)
    elif all(call.grid):
        if not interpreted():
            _check_grid(call, amd=torch.version.hip is not None)
        with torch.cuda.device_of(next(x for x in call.arguments.values() if isinstance(x, Tensor))):
            _run(call)


def _check_grid(call: Launch, *, amd: bool) -> None:
    """Raises ValueError where there are more programs along a dimension than a device takes.

    AMD's launch packet has 32 bits for the threads of a dimension; of more HIP says "invalid argument" and no word
    else. Along y and z CUDA's bound holds for every device, so that what runs on one runs on all.
    """
    threads = call.config.num_warps * (WAVE_SIZE if amd else WARP_SIZE)
    along_x = (2**32 - 1) // threads if amd else 2**31 - 1
    for axis, programs, limit in zip("xyz", call.grid, (along_x, 65535, 65535), strict=False):
        if programs > limit:
            raise ValueError(
                f"{call.name}: grid {call.grid} has {programs} programs of {threads} threads along {axis}, more than "
                f"the {limit} that an {'AMD' if amd else 'NVIDIA'} device takes"
            )


def _run(call: Launch) -> None:
    knobs = call.config.knobs
    if not knobs or interpreted():
        call.kernel[call.grid](**call.keywords())
        return
    variant = _variant(call.kernel, frozenset(knobs.items()))
    # A Triton whose kernels have no step of their own for compiling needs the knobs around the whole launch.
    with contextlib.nullcontext() if hasattr(variant, _COMPILE) else compiler_knobs(knobs):
        variant[call.grid](**call.keywords())


_COMPILE = "_do_compile"


@functools.cache
def _variant(kernel: Any, knobs: frozenset[tuple[str, bool]]) -> Any:
    """The kernel once more, for one setting of the knobs: Triton keeps compiled code by kernel, blind to knobs.

    Setting knobs takes longer than a launch, and other threads see them: they are set while it compiles alone.
    """
    import triton

    variant = triton.jit(
        kernel.fn,
        do_not_specialize=kernel.do_not_specialize,
        do_not_specialize_on_alignment=kernel.do_not_specialize_on_alignment,
    )
    compile_variant = getattr(variant, _COMPILE, None)

    def compile_with_knobs(*arguments: Any, **keywords: Any) -> Any:
        with compiler_knobs(dict(knobs)):
            return compile_variant(*arguments, **keywords)

    if compile_variant is not None:
        setattr(variant, _COMPILE, compile_with_knobs)
    return variant


@contextlib.contextmanager
def compiler_knobs(settings: Mapping[str, bool]) -> Iterator[None]:
    """Sets ``triton.knobs.amd`` inside. Raises ValueError for a knob that this Triton does not have."""
    if not settings:
        yield
        return
    from triton import knobs

    with knobs.amd.scope():
        for name, value in settings.items():
            if not hasattr(knobs.amd, name):
                raise ValueError(f"knobs ({name}) must be one of {', '.join(knobs.amd.knob_descriptors)}")
            setattr(knobs.amd, name, value)
        yield
