"""What the compiler made of a kernel: registers, spills, and the work of its hot loop, read from the assembly.

Triton reports none of this. LLVM's own figure of occupancy leaves LDS and whole workgroups out (``occupancy.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import assembly_amdgcn, assembly_ptx
from .control_flow import Instruction, Program, data_loads, find_loops

UNIT = 16 * 16 * 16  # multiply-adds
_FEW_BYTES = 0.25


@dataclass(frozen=True, kw_only=True)
class HotLoop:
    """One turn of the loop that the matrix instructions run in.

    ``matrix_instructions``  MFMA, mma or wgmma instructions
    ``matrix_units``         their work in 16x16x16 multiply-adds, which instructions of different sizes share
    ``vector_instructions``  all other ``v_`` instructions (gfx architectures)
    ``accvgpr_moves``        of those, the moves between VGPRs and AGPRs
    ``loads``                loads of operands from global memory: how many of each width in bytes per lane
    """

    matrix_instructions: int
    matrix_units: float
    vector_instructions: int
    accvgpr_moves: int
    loads: Mapping[int, int]

    @property
    def mfma_share(self) -> float:
        """``W / (W + V)``: the part of the vector unit's instructions that multiplies matrices, W in units."""
        return self.matrix_units / (self.matrix_units + self.vector_instructions)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one compiled kernel. ``vgprs`` is every vector register of a lane, AGPRs included; for sm architectures the
    registers of a thread.

    ``scratch_bytes``  of one lane; ``loads``, ``stores``: how many of each width in bytes per lane, addresses of other
                       loads left out
    """

    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    loads: Mapping[int, int]
    stores: Mapping[int, int]
    hot_loop: HotLoop | None

    @property
    def spills(self) -> int:
        return self.vgpr_spills + self.sgpr_spills

    @property
    def load_bytes_per_lane(self) -> int:
        """Width of the loads that bring the data: of the hot loop's operands, or of a whole kernel without one."""
        return common_width(self.loads if self.hot_loop is None else self.hot_loop.loads)

    @property
    def store_bytes_per_lane(self) -> int:
        return common_width(self.stores)


def common_width(counts: Mapping[int, int]) -> int:
    """The narrowest width that matters: narrower accesses move less than a quarter of the bytes. 0 without any.

    Example: a row's two loads of 16 bytes and its one weight of 4 give 16; four of 16 and eight of 4 give 4.
    """
    total = sum(width * count for width, count in counts.items())
    narrower = 0
    for width in sorted(counts):
        narrower += width * counts[width]
        if narrower >= _FEW_BYTES * total:
            return width
    return 0


def read_amdgcn(text: str) -> Figures:
    """Figures of the one kernel in amdgcn ``text``."""
    numbers = assembly_amdgcn.read_metadata(text)
    return Figures(
        vgprs=numbers["vgpr_count"],
        agprs=numbers["agpr_count"],
        sgprs=numbers["sgpr_count"],
        vgpr_spills=numbers["vgpr_spill_count"],
        sgpr_spills=numbers["sgpr_spill_count"],
        scratch_bytes=numbers["private_segment_fixed_size"],
        **_code_figures(assembly_amdgcn.read_program(text)),
    )


def read_ptx(text: str, *, registers: int, local_bytes: int) -> Figures:
    """Figures of the one kernel in PTX ``text``, which leaves registers to the assembler: they are given.

    No kernel here has a local array, so that local memory is spilled registers, of four bytes each.
    """
    return Figures(
        vgprs=registers,
        agprs=0,
        sgprs=0,
        vgpr_spills=local_bytes // 4,
        sgpr_spills=0,
        scratch_bytes=local_bytes,
        **_code_figures(assembly_ptx.read_program(text)),
    )


def _code_figures(program: Program) -> dict[str, Any]:
    accesses = [item.access for item in program.instructions if item.access is not None]
    loop = _hottest(program)
    return {
        "loads": dict(Counter(data_loads(program.instructions, loops=False))),
        "stores": dict(Counter(access.bytes_per_lane for access in accesses if access.kind == "store")),
        "hot_loop": loop,
    }


def _hottest(program: Program) -> HotLoop | None:
    """Figures of the loop that the matrix instructions run in: the innermost, of several the one with most work.

    Prologue and epilogue of a pipelined loop lie outside. Of loops with equal work (the two products of one sum) the
    one with more other vector instructions counts.
    """
    code = program.instructions
    loops = [loop for loop in find_loops(program) if any(code[index].multiply_adds for index in loop.members)]
    innermost = [loop for loop in loops if not any(other.members < loop.members for other in loops)]
    figures = [_loop_figures([code[index] for index in sorted(loop.members)]) for loop in innermost]
    return max(figures, key=lambda loop: (loop.matrix_units, loop.vector_instructions), default=None)


def _loop_figures(loop: Sequence[Instruction]) -> HotLoop:
    matrix = [item for item in loop if item.multiply_adds]
    return HotLoop(
        matrix_instructions=len(matrix),
        matrix_units=sum(item.multiply_adds for item in matrix) / UNIT,
        vector_instructions=sum(item.mnemonic.startswith("v_") and not item.multiply_adds for item in loop),
        accvgpr_moves=sum(item.mnemonic.startswith("v_accvgpr_") for item in loop),
        loads=dict(Counter(data_loads(loop, loops=True))),
    )
