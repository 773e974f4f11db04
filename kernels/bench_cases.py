"""What ``xmoe kernels bench`` and ``tune`` run: every kernel on the rows of one routed batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from . import reference
from . import triton_kernels as kernels
from .bench import Case
from .ragged import Stacked, TileSchedule, stack
from .reference_gating import GateRule
from .route_bench import ROUTE_CASES
from .tiles import tile_height

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_RULE = {"score_function": "sigmoid", "scale": 2.5}
# Any: weight gradients look at the experts' offsets alone.
_BLOCK_M = 128


@dataclass(frozen=True, kw_only=True)
class Shape:
    """T tokens of width D on one device, each routed to K of its E experts of width F (swiglu)."""

    num_tokens: int
    width: int
    expert_width: int
    num_experts: int
    top_k: int


class Problem:
    """Random numbers of one shape, the same in every run; made when first asked for."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._random = torch.Generator(device).manual_seed(0)
        self._schedules: dict[int, TileSchedule] = {}

    def floats(self, *sizes: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        found = torch.randn(sizes, generator=self._random, device=self.device)
        return found.mul_(scale).to(dtype or self.dtype)

    @cached_property
    def logits_TE(self) -> Tensor:
        return self.floats(self.shape.num_tokens, self.shape.num_experts, dtype=torch.float32)

    @cached_property
    def ids_TK(self) -> Tensor:
        return self.logits_TE.topk(self.shape.top_k, dim=1).indices.to(torch.int32)

    @cached_property
    def counts_e(self) -> Tensor:
        return reference.count_ids(self.ids_TK, self.shape.num_experts)

    @cached_property
    def _order(self) -> tuple[Tensor, Tensor]:
        return reference.sort_slots(self.ids_TK, self.shape.num_experts)

    @property
    def slot_ids_M(self) -> Tensor:
        return self._order[0]

    @property
    def places_TK(self) -> Tensor:
        return self._order[1].view(self.shape.num_tokens, self.shape.top_k)

    @cached_property
    def row_ids_M(self) -> Tensor:
        return self.slot_ids_M // self.shape.top_k

    @property
    def num_rows(self) -> int:
        return self.shape.num_tokens * self.shape.top_k

    @cached_property
    def weights_M(self) -> Tensor:
        return self.floats(self.num_rows, dtype=torch.float32).sigmoid_()

    @cached_property
    def x_TD(self) -> Tensor:
        return self.floats(self.shape.num_tokens, self.shape.width)

    @cached_property
    def rows_MD(self) -> Tensor:
        return self.floats(self.num_rows, self.shape.width)

    @cached_property
    def up_MF(self) -> Tensor:
        return self.floats(self.num_rows, self.shape.expert_width)

    @cached_property
    def gate_MF(self) -> Tensor:
        return self.floats(self.num_rows, self.shape.expert_width)

    def _weights(self, out: int, into: int) -> Tensor:
        return self.floats(self.shape.num_experts, out, into, scale=1 / math.sqrt(into))

    @cached_property
    def up_eFD(self) -> Tensor:
        return self._weights(self.shape.expert_width, self.shape.width)

    @cached_property
    def gate_eFD(self) -> Tensor:
        return self._weights(self.shape.expert_width, self.shape.width)

    @cached_property
    def down_eDF(self) -> Tensor:
        return self._weights(self.shape.width, self.shape.expert_width)

    @cached_property
    def ends_e(self) -> Tensor:
        return self.counts_e.cumsum(0).to(torch.int32)

    def schedule(self, block_m: int = _BLOCK_M) -> TileSchedule:
        if block_m not in self._schedules:
            found = reference.tile_schedule(self.counts_e, block_m=block_m, num_rows=self.num_rows)
            self._schedules[block_m] = found
        return self._schedules[block_m]

    def tiles_of(self, op: str, *, width: int, inner: int, matrices: int = 1) -> TileSchedule:
        """The schedule of the tile height that ``op`` is configured for just now."""
        sizes = dict(num_experts=self.shape.num_experts, num_rows=self.num_rows, width=width, inner=inner)
        return self.schedule(tile_height(op, self.x_TD, **sizes, matrices=matrices))

    def case(self, kernel: str, run: Callable[[], Any], reference: Callable[[], Any], **more: Any) -> Case:
        more = {"dtype": self.dtype, "baseline": reference, **more}
        return Case(kernel=kernel, shape=asdict(self.shape), device=self.device, run=run, reference=reference, **more)


def cases_of(shape: Shape, *, dtype: str, device: torch.device, only: Sequence[str] = ()) -> Iterator[Case]:
    """One case for each kernel, or for those named in ``only``; each makes its tensors when its turn comes.

    Raises ValueError for an unknown dtype or kernel, and for more experts a token than there are.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype ({dtype}) must be one of {', '.join(_DTYPES)}")
    if shape.top_k > shape.num_experts:
        raise ValueError(f"top_k ({shape.top_k}) must not exceed the number of experts ({shape.num_experts})")
    if unknown := [name for name in only if name not in CASES]:
        raise ValueError(f"kernel {unknown[0]} is not one of {', '.join(CASES)}")
    problem = Problem(shape, _DTYPES[dtype], device)
    return (make(problem) for name, make in CASES.items() if not only or name in only)


def _twin_case(name: str, arguments: Callable[[Problem], tuple[Any, ...]], **more: Any) -> Callable[[Problem], Case]:
    """A kernel whose twin is what torch's own operators make of it."""

    def make(p: Problem) -> Case:
        given = arguments(p)
        tensors = [x for x in given if isinstance(x, Tensor)]
        run, twin = getattr(kernels, name), getattr(reference, name)
        return p.case(name, lambda: run(*given), lambda: twin(*given), inputs=tensors, **more)

    return make


def _combine(p: Problem) -> Case:
    shape = (p.shape.num_tokens, p.shape.top_k, p.shape.width)

    def by_index() -> Tensor:
        rows = p.rows_MD.index_select(0, p.places_TK.flatten()).view(shape)
        return rows.sum(dim=1, dtype=torch.float32).to(p.dtype)

    return p.case(
        "combine_rows",
        lambda: kernels.combine_rows(p.rows_MD, p.places_TK),
        lambda: reference.combine_rows(p.rows_MD, p.places_TK),
        baseline=by_index,
        inputs=[p.rows_MD, p.places_TK],
    )


def _tile_schedule(p: Problem) -> Case:
    sizes = dict(block_m=_BLOCK_M, num_rows=p.num_rows)
    num_tiles = int(p.schedule().num_tiles)

    def compared(found: TileSchedule) -> tuple[Tensor, ...]:
        return found.offsets_e1, found.num_tiles, found.tile_expert[:num_tiles], found.tile_row[:num_tiles]

    return p.case(
        "tile_schedule",
        lambda: kernels.tile_schedule(p.counts_e, **sizes),
        lambda: reference.tile_schedule(p.counts_e, **sizes),
        dtype=torch.int32,
        inputs=[p.counts_e],
        compared=compared,
    )


def _gate_backward(p: Problem) -> Case:
    rule = GateRule(top_k=p.shape.top_k, **_RULE)
    grads = dict(
        grad_weights_TK=p.floats(p.shape.num_tokens, p.shape.top_k, dtype=torch.float32),
        grad_share_sums_BE=p.floats(1, p.shape.num_experts, dtype=torch.float32),
        grad_z_sums_B=p.floats(1, dtype=torch.float32),
    )
    return p.case(
        "gate_backward",
        lambda: kernels.gate_backward(p.logits_TE, p.ids_TK, rule, **grads),
        lambda: reference.gate_backward(p.logits_TE, p.ids_TK, rule, **grads),
        dtype=torch.float32,
        inputs=[p.logits_TE, p.ids_TK, *grads.values()],
    )


def _grouped(p: Problem, rows: Tensor, weights: Tensor) -> Tensor:
    """torch's grouped GEMM: rows of each expert times its ``[in, out]`` matrix, or both sides ragged along the sum."""
    return torch.nn.functional.grouped_mm(rows, weights, offs=p.ends_e)


def _stacked(weights: Tensor) -> Stacked:
    return stack(list(weights.unbind()))


def _forward(p: Problem) -> Case:
    sizes = dict(width=p.shape.width, inner=p.shape.expert_width)
    down = _stacked(p.down_eDF)

    def call(side: Any) -> Tensor:
        return side.grouped_forward(p.up_MF, down, p.tiles_of("grouped_forward", **sizes))

    return p.case(
        "grouped_forward",
        lambda: call(kernels),
        lambda: call(reference),
        baseline=lambda: _grouped(p, p.up_MF, p.down_eDF.transpose(1, 2)),
        inputs=[p.up_MF, p.down_eDF],
    )


def _forward_activated(p: Problem) -> Case:
    sizes = dict(width=p.shape.expert_width, inner=p.shape.width, matrices=2)
    matrices = _stacked(p.up_eFD), _stacked(p.gate_eFD)

    def call(side: Any) -> Any:
        schedule = p.tiles_of("grouped_forward_activated", **sizes)
        more = dict(row_ids_M=p.row_ids_M, weights_M=p.weights_M, activation="swiglu")
        return side.grouped_forward_activated(p.x_TD, *matrices, schedule, **more)

    def by_index() -> Any:
        x = p.x_TD.index_select(0, p.row_ids_M)
        up, gate = (_grouped(p, x, weights.transpose(1, 2)) for weights in (p.up_eFD, p.gate_eFD))
        return torch.nn.functional.silu(gate) * up * p.weights_M[:, None].to(p.dtype), up, gate

    inputs = [p.x_TD, p.up_eFD, p.gate_eFD, p.row_ids_M, p.weights_M]
    name = "grouped_forward_activated"
    return p.case(name, lambda: call(kernels), lambda: call(reference), baseline=by_index, inputs=inputs)


def _dgrad(p: Problem) -> Case:
    sizes = dict(width=p.shape.width, inner=p.shape.expert_width)
    up, gate = _stacked(p.up_eFD), _stacked(p.gate_eFD)

    def call(side: Any) -> Tensor:
        return side.grouped_dgrad(p.up_MF, up, p.tiles_of("grouped_dgrad", **sizes), second=(p.gate_MF, gate))

    return p.case(
        "grouped_dgrad",
        lambda: call(kernels),
        lambda: call(reference),
        baseline=lambda: _grouped(p, p.up_MF, p.up_eFD) + _grouped(p, p.gate_MF, p.gate_eFD),
        inputs=[p.up_MF, p.gate_MF, p.up_eFD, p.gate_eFD],
    )


def _dgrad_activated(p: Problem) -> Case:
    sizes = dict(width=p.shape.expert_width, inner=p.shape.width)
    down = _stacked(p.down_eDF)

    def call(side: Any) -> Any:
        schedule = p.tiles_of("grouped_dgrad_activated", **sizes)
        kept = dict(row_ids_M=p.row_ids_M, up_MF=p.up_MF, gate_MF=p.gate_MF, weights_M=p.weights_M)
        return side.grouped_dgrad_activated(p.x_TD, down, schedule, **kept, activation="swiglu")

    def by_index() -> Any:
        d_hidden = _grouped(p, p.x_TD.index_select(0, p.row_ids_M), p.down_eDF)
        return reference.activation_backward(d_hidden, p.up_MF, p.gate_MF, p.weights_M, "swiglu")

    inputs = [p.x_TD, p.down_eDF, p.row_ids_M, p.up_MF, p.gate_MF, p.weights_M]
    name = "grouped_dgrad_activated"
    return p.case(name, lambda: call(kernels), lambda: call(reference), baseline=by_index, inputs=inputs)


def _wgrad(p: Problem) -> Case:
    def call(side: Any) -> Tensor:
        return side.grouped_wgrad(p.up_MF, p.rows_MD, p.schedule())

    return p.case(
        "grouped_wgrad",
        lambda: call(kernels),
        lambda: call(reference),
        baseline=lambda: _grouped(p, p.up_MF.t(), p.rows_MD),
        inputs=[p.up_MF, p.rows_MD],
    )


def _gathered_wgrad(p: Problem) -> Case:
    def call(side: Any) -> Tensor:
        return side.grouped_wgrad(p.up_MF, p.x_TD, p.schedule(), row_ids_M=p.row_ids_M)

    return p.case(
        "gathered_wgrad",
        lambda: call(kernels),
        lambda: call(reference),
        baseline=lambda: _grouped(p, p.up_MF.t(), p.x_TD.index_select(0, p.row_ids_M)),
        inputs=[p.up_MF, p.x_TD, p.row_ids_M],
    )


CASES: dict[str, Callable[[Problem], Case]] = {
    "gate_forward": _twin_case(
        "gate_forward", lambda p: (p.logits_TE, GateRule(top_k=p.shape.top_k, **_RULE)), dtype=torch.float32
    ),
    "gate_backward": _gate_backward,
    "count_ids": _twin_case("count_ids", lambda p: (p.ids_TK, p.shape.num_experts), dtype=torch.int32),
    "sort_slots": _twin_case("sort_slots", lambda p: (p.ids_TK, p.shape.num_experts), dtype=torch.int32),
    "sort_and_count": _twin_case("sort_and_count", lambda p: (p.ids_TK, p.shape.num_experts), dtype=torch.int32),
    **ROUTE_CASES,
    "tile_schedule": _tile_schedule,
    "gather_rows": _twin_case("gather_rows", lambda p: (p.x_TD, p.slot_ids_M, p.shape.top_k)),
    "combine_rows": _combine,
    "row_dot": _twin_case("row_dot", lambda p: (p.rows_MD, p.x_TD, p.slot_ids_M, p.shape.top_k)),
    "segment_sums": _twin_case("segment_sums", lambda p: (p.rows_MD, p.schedule().offsets_e1)),
    "activation_forward": _twin_case("activation_forward", lambda p: (p.up_MF, p.gate_MF, p.weights_M, "swiglu")),
    "activation_backward": _twin_case(
        "activation_backward", lambda p: (p.up_MF.flip(0), p.up_MF, p.gate_MF, p.weights_M, "swiglu")
    ),
    "grouped_forward": _forward,
    "grouped_forward_activated": _forward_activated,
    "grouped_dgrad": _dgrad,
    "grouped_dgrad_activated": _dgrad_activated,
    "grouped_wgrad": _wgrad,
    "gathered_wgrad": _gathered_wgrad,
}
