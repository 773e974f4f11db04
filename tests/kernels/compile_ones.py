"""Compiles every launch of ``launcher_cases`` with all sizes 1, and prints what happened, one JSON line a case.

A process of its own: a process either interprets kernels or compiles them. Arguments: the architectures, which take
the cases in turn. What becomes of a 1 is decided before a kernel is lowered to any one of them; each architecture
meets constants in every family of kernels, since cases of a family follow each other.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.append(str(Path(__file__).parent))

from launcher_cases import CASES, Case, Problem

from xmoe.kernels.compile import compile_launch
from xmoe.kernels.launch import Cost, Launch, launch, recording
from xmoe.kernels.tuning import INTERPRETER, Config, config_for

ONES = Problem(tokens=1, width=1, expert_width=1, top_k=1, counts=(1,), dtype=torch.bfloat16, device="meta", block_m=16)


PLANTED = "planted"


@triton.jit
def _planted_kernel(out, size):
    """Passes in the interpreter; compiled with size 1, that is a constant without methods."""
    tl.store(out, size.to(tl.int64))


def _planted(problem: Problem) -> None:
    out, cost = torch.empty(1, dtype=torch.int64, device=problem.device), Cost(bytes_read=0, bytes_written=8)
    arguments = {"out": out, "size": problem.tokens}
    launch(Launch(op="", kernel=_planted_kernel, grid=(1,), arguments=arguments, config=Config(blocks={}), cost=cost))


def with_small_blocks(call: Launch) -> Launch:
    """What is specialised does not depend on the blocks, and small ones compile several times faster."""
    if not call.op:
        return call
    blocks = config_for(call.op, arch=INTERPRETER, dtype=ONES.dtype, width=1).blocks
    return replace(call, config=replace(call.config, blocks=blocks))


def compiled(case: Case, arch: str) -> dict[str, Any]:
    """The kernels of the case's launches, and the first error."""
    names, error = [], None
    try:
        with recording(arch) as calls:
            case.run(ONES)
        for call in calls:
            names.append(call.kernel.__name__)
            compile_launch(with_small_blocks(call), arch)
    except Exception as failure:
        cause = failure.__cause__ or failure.__context__ or failure
        error = f"{type(failure).__name__}: {failure}\n{type(cause).__name__}: {cause}"
    return {"arch": arch, "case": case.name, "kernels": names, "error": error}


def main(arches: list[str]) -> None:
    planted = Case(PLANTED, ("_planted_kernel",), _planted)
    for case, arch in [*zip(CASES, cycle(arches), strict=False), *((planted, arch) for arch in arches)]:
        print(json.dumps(compiled(case, arch)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
