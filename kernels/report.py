"""What every kernel becomes on every architecture, found by compiling the launches of :mod:`.catalog`.

Rows come from worker processes, since compilers are slow and may end their process. Nothing here runs a kernel, so no
GPU is needed; a process whose kernels were defined for Triton's interpreter cannot compile them.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .assembly import Figures, read_amdgcn, read_ptx
from .assembly_ptx import read_resources
from .catalog import CASES, GEMM_OPS, SHAPES, Shape, case_named, op_of
from .compile import Compiled, compile_launch
from .launch import Launch, recording
from .occupancy import LIMITS, waves_per_simd
from .tuning import ARCHES, Config, asking, forcing, is_amd
from .tuning_search import candidates

GEMM_WAVES = 2
ROW_WAVES = 8


@dataclass(frozen=True, kw_only=True)
class Task:
    """One case to compile for one architecture and dtype.

    ``all_candidates``  the configurations that tuning would try as well, not the default alone
    ``dump``            folder to write the assembly to, or None
    """

    case: str
    arch: str
    dtype: str
    all_candidates: bool = False
    dump: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel, architecture, dtype and configuration.

    ``default``  whether this is the configuration that the shape gets without tuning
    ``figures``  what the compiler made of it, or None where ``error`` says why there is nothing
    ``waves``    on one SIMD at once, whole workgroups with their LDS (warps on a scheduler's quarter of an SM)
    """

    kernel: str
    case: str
    op: str
    arch: str
    dtype: str
    shape: str
    config: Mapping[str, int | bool]
    default: bool
    figures: Figures | None = None
    lds_bytes: int = 0
    waves: float = 0.0
    error: str = ""

    @property
    def mfma_share(self) -> float | None:
        """Of grouped GEMMs on gfx architectures; 0 where no loop multiplies matrices."""
        if self.op not in GEMM_OPS or not is_amd(self.arch) or self.figures is None:
            return None
        return self.figures.hot_loop.mfma_share if self.figures.hot_loop is not None else 0.0

    def setting(self) -> dict[str, Any]:
        """What the row is about, as ``--json`` writes it."""
        names = ("kernel", "op", "case", "arch", "dtype", "shape", "config", "default")
        return {name: getattr(self, name) for name in names}

    def metrics(self) -> list[tuple[str, float, str, str]]:
        """Name, value, unit and better direction of each figure that ``--json`` writes."""
        if self.figures is None:
            return []
        figures = [
            ("kernel.spills", self.figures.spills, "registers", "lower"),
            ("kernel.scratch_bytes", self.figures.scratch_bytes, "bytes", "lower"),
            ("kernel.lds_bytes", self.lds_bytes, "bytes", "lower"),
            ("kernel.waves_per_simd", self.waves, "waves", "higher"),
            ("kernel.load_bytes_per_lane", self.figures.load_bytes_per_lane, "bytes", "higher"),
        ]
        if self.mfma_share is not None:
            figures.append(("kernel.mfma_share", self.mfma_share, "share", "higher"))
        return figures

    def label(self) -> str:
        return f"{self.kernel} ({self.case}, {self.dtype}, {self.shape}) on {self.arch}"


def find_tasks(
    *,
    arches: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    kernel: str = "",
    all_candidates: bool = False,
    dump: str | None = None,
) -> list[Task]:
    """One task for each case, dtype and architecture; none named means all. ``kernel`` is part of a case's name, or
    of a kernel's that it launches.

    Raises ValueError for an unknown name.
    """
    known_dtypes = list(dict.fromkeys(dtype for case in CASES for dtype in case.dtypes))
    for given, name, known in ((arches, "arch", ARCHES), (dtypes, "dtype", known_dtypes)):
        if unknown := [each for each in given if each not in known]:
            raise ValueError(f"{name} ({', '.join(unknown)}) must be one or more of {', '.join(known)}")
    cases = [case for case in CASES if any(kernel in name for name in (case.name, *case.kernels()))]
    if not cases:
        raise ValueError(f"kernel ({kernel}) must be part of one of {', '.join(case.name for case in CASES)}")
    return [
        Task(case=case.name, arch=arch, dtype=dtype, all_candidates=all_candidates, dump=dump)
        for case in cases
        for dtype in case.dtypes
        if not dtypes or dtype in dtypes
        for arch in arches or ARCHES
    ]


def run(wanted: Sequence[Task], *, jobs: int) -> Iterator[tuple[Task, list[Row]]]:
    """Rows of every task as they are done. One whose compiler ends its process gives a row that says so."""
    for task, rows, died in over_processes(run_task, wanted, jobs=jobs):
        yield task, [_failed(task, "the compiler ended its process")] if died else rows


def over_processes(
    function: Callable[[Any], Any], items: Sequence[Any], *, jobs: int
) -> Iterator[tuple[Any, Any, bool]]:
    """``item, function(item), False`` of every item, as they are done; ``item, None, True`` where a process ended."""
    context = multiprocessing.get_context("spawn")
    lost = []
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = {pool.submit(function, item): item for item in items}
        for done in as_completed(waiting):
            try:
                yield waiting[done], done.result(), False
            except BrokenProcessPool:
                lost.append(waiting[done])
    # A dead worker breaks the pool for all that waited: each of them gets a pool of its own.
    for item in lost:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                yield item, pool.submit(function, item).result(), False
            except BrokenProcessPool:
                yield item, None, True


def run_task(task: Task) -> list[Row]:
    """Compiles a case in this process; launches that compile to the same code make one row."""
    rows: list[Row] = []
    seen: set[str] = set()
    for shape in SHAPES:
        with asking() as asked:
            rows += _rows(task, shape, forced={}, seen=seen)
        if task.all_candidates:
            for key in dict.fromkeys(asked):
                dtype, width = getattr(torch, key.dtype), key.sizes[0]
                for config in candidates(key.op, arch=task.arch, dtype=dtype, width=width):
                    rows += _rows(task, shape, forced={key.op: config}, seen=seen)
    return rows


def _rows(task: Task, shape: Shape, *, forced: Mapping[str, Config], seen: set[str]) -> list[Row]:
    """Rows of the launches of one case, those left out whose code has a row already."""
    case = case_named(task.case)
    with recording(task.arch) as calls, forcing(forced):
        case.run(case.inputs(task.dtype, shape))
    found = (_row(call, task, shape, default=not forced, seen=seen) for call in calls)
    return [row for row in found if row is not None]


def _row(call: Launch, task: Task, shape: Shape, *, default: bool, seen: set[str]) -> Row | None:
    row = Row(
        kernel=call.name,
        case=task.case,
        op=op_of(call),
        arch=task.arch,
        dtype=task.dtype,
        shape=str(shape),
        config=_flat(call.config),
        default=default,
    )
    try:
        compiled = compile_launch(call, task.arch)
        if compiled.metadata["hash"] in seen:
            return None
        seen.add(compiled.metadata["hash"])
        if task.dump is not None:
            _write(Path(task.dump), row, compiled, number=len(seen))
        figures = figures_of(compiled)
    except Exception as error:  # whatever a compiler pass raises is a finding about this kernel alone
        return dataclasses.replace(row, error=f"{type(error).__name__}: {error}")
    waves = waves_per_simd(
        task.arch, registers=figures.vgprs, lds_bytes=compiled.shared_bytes, num_warps=call.config.num_warps
    )
    return dataclasses.replace(row, figures=figures, lds_bytes=compiled.shared_bytes, waves=waves)


def figures_of(compiled: Compiled) -> Figures:
    if is_amd(compiled.arch):
        return read_amdgcn(compiled.assembly)
    registers, local_bytes = read_resources(compiled.binary)
    return read_ptx(compiled.assembly, registers=registers, local_bytes=local_bytes)


def violations(row: Row) -> list[str]:
    """What of a default configuration breaks a limit, as sentences."""
    if row.figures is None:
        return [f"does not compile: {' '.join(row.error.split())}"]
    figures, limit = row.figures, LIMITS[row.arch].workgroup_lds_bytes
    is_gemm = row.op in GEMM_OPS
    found = []
    if figures.spills:
        found.append(f"spills {figures.vgpr_spills} vector and {figures.sgpr_spills} scalar registers")
    if figures.scratch_bytes:
        found.append(f"uses {figures.scratch_bytes} bytes of scratch")
    if row.lds_bytes > limit:
        found.append(f"needs {row.lds_bytes} bytes of LDS, a workgroup has at most {limit}")
    if row.waves < minimum_waves(row):
        found.append(f"runs {row.waves:g} waves per SIMD, fewer than {minimum_waves(row)}")
    if is_gemm and is_amd(row.arch):
        if figures.hot_loop is None:
            found.append("has no loop with matrix instructions")
        elif figures.hot_loop.accvgpr_moves:
            found.append(f"moves {figures.hot_loop.accvgpr_moves} registers to and from AGPRs in the K loop")
    return found


def minimum_waves(row: Row) -> int:
    """Waves that hide the latency of memory: more in kernels that do nothing but move rows."""
    if row.op in GEMM_OPS:
        return GEMM_WAVES
    return ROW_WAVES if is_amd(row.arch) else 1


def _flat(config: Config) -> dict[str, int | bool]:
    return {
        **config.blocks,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **config.options,
        **config.knobs,
    }


def _write(folder: Path, row: Row, compiled: Compiled, *, number: int) -> None:
    """``FOLDER/ARCH/KERNEL-CASE-DTYPE-NUMBER.amdgcn`` (``.ptx``): the code that the row was read from."""
    place = (
        folder / row.arch / f"{row.kernel}-{row.case}-{row.dtype}-{number}.{'amdgcn' if is_amd(row.arch) else 'ptx'}"
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(compiled.assembly, encoding="utf-8")


def _failed(task: Task, error: str) -> Row:
    return Row(
        kernel=task.case,
        case=task.case,
        op="other",
        arch=task.arch,
        dtype=task.dtype,
        shape="",
        config={},
        default=True,
        error=error,
    )
