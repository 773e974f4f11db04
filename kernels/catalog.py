"""Every kernel as the launches that the layer makes, for shapes of DeepSeek-V2-Lite and DeepSeek-V3.

A case calls public launchers on meta tensors, inside :func:`~xmoe.kernels.launch.recording`: signatures, block sizes
and alignments are those of real calls, and are written down nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import triton_kernels as kernels
from .launch import Launch

FLOATS = ("bfloat16", "float16", "float32")
GEMM_OPS = ("fused_forward", "plain_forward", "dgrad", "wgrad", "gathered_wgrad")
_OPS = {
    "grouped_forward_activated": "fused_forward",
    "grouped_forward": "plain_forward",
    "grouped_dgrad": "dgrad",
    "grouped_dgrad_activated": "dgrad",
    "gather_rows": "row",
    "combine_rows": "row",
    "row_dot": "row",
    "segment_sums": "row",
    "activation_forward": "row",
    "activation_backward": "row",
}


def op_of(call: Launch) -> str:
    """The kind of work a launch does: one of :data:`GEMM_OPS`, ``row``, or ``other`` (gating and plan)."""
    if call.name == "grouped_wgrad":
        return "wgrad" if call.arguments["row_ids"] is None else "gathered_wgrad"
    return _OPS.get(call.name, "other")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """T tokens of width D, whose K experts of width F are chosen among E."""

    tokens: int
    width: int
    expert_width: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        return f"T{self.tokens} D{self.width} F{self.expert_width} E{self.experts} K{self.top_k}"


SHAPES = (
    Shape(tokens=4096, width=2048, expert_width=1408, experts=64, top_k=6),
    Shape(tokens=4096, width=7168, expert_width=2048, experts=256, top_k=8),
)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Meta tensors of one shape and dtype."""

    shape: Shape
    dtype: torch.dtype

    @property
    def slots(self) -> int:
        return self.shape.tokens * self.shape.top_k

    def rows(self, count: int, width: int) -> Tensor:
        return torch.empty((count, width), dtype=self.dtype, device="meta")

    def integers(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.int32, device="meta")

    def weights(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device="meta")


@dataclass(frozen=True, kw_only=True)
class Case:
    """``run`` calls one launcher; ``dtypes`` are the model's, or the one that the launcher knows."""

    name: str
    run: Callable[[Inputs], object]
    dtypes: tuple[str, ...] = FLOATS

    def inputs(self, dtype: str, shape: Shape) -> Inputs:
        return Inputs(shape=shape, dtype=getattr(torch, dtype))


def _gather(given: Inputs) -> None:
    shape = given.shape
    kernels.gather_rows(given.rows(shape.tokens, shape.width), given.integers(given.slots), shape.top_k)


CASES = (Case(name="gather", run=_gather),)


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
