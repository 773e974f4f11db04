"""Block sizes, warps and compiler options of every kernel, by architecture: the only place that tells chips apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

INTERPRETER = "interpreter"
ARCHES = ("gfx90a", "gfx942", "gfx950", "sm_80", "sm_90")


@dataclass(frozen=True, kw_only=True)
class Config:
    """How one kernel is compiled.

    ``blocks``   block sizes and other constexprs that do not change the result, by parameter name
    ``options``  compiler options beside warps and stages that the architecture's backend knows, such as
                 ``matrix_instr_nonkdim``, ``kpack`` and ``waves_per_eu``
    """

    blocks: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 2
    options: Mapping[str, int] = field(default_factory=dict)

    def compiler_options(self) -> dict[str, int | bool]:
        """Options as Triton takes them. Fused multiply-add is asked for by name: Triton's default changes."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True, **self.options}


def is_amd(arch: str) -> bool:
    return arch.startswith("gfx")


def config_for(op: str, *, arch: str, dtype: torch.dtype, width: int = 0) -> Config:
    """The configuration of kernel ``op``. ``width`` is the row width, or the number of experts, the kernel spans."""
    return _ROW_OPS[op](arch, dtype, width)


def _gather(arch: str, dtype: torch.dtype, width: int) -> Config:
    if arch == INTERPRETER:
        return Config(blocks={"BLOCK_D": 16})
    return Config(blocks={"BLOCK_D": 2048 // dtype.itemsize * 2}, num_warps=4)


_ROW_OPS = {"gather": _gather}
