"""Every kernel as the launches that the layer makes, for shapes of DeepSeek-V2-Lite and DeepSeek-V3.

A case calls public launchers on meta tensors, inside :func:`~xmoe.kernels.launch.recording`: signatures, block sizes
and alignments are those of real calls, and are written down nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from . import triton_kernels as kernels
from .launch import Launch, recording
from .ragged import Stacked, TileSchedule
from .reference_activation import Activation
from .reference_gating import GateRule
from .reference_route import RankMap, Routes
from .reference_route_messages import Inbox
from .tiles import tile_height
from .tuning import ARCHES

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
    """Meta tensors of one shape and dtype: M = T * K assignments, of rows that are the T tokens."""

    shape: Shape
    dtype: torch.dtype

    @property
    def assignments(self) -> int:
        return self.shape.tokens * self.shape.top_k

    def rows(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=self.dtype, device="meta")

    def numbers(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device="meta")

    def integers(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.int32, device="meta")

    def x_TD(self) -> Tensor:
        return self.rows(self.shape.tokens, self.shape.width)

    def assigned_MD(self) -> Tensor:
        return self.rows(self.assignments, self.shape.width)

    def assigned_MF(self) -> Tensor:
        return self.rows(self.assignments, self.shape.expert_width)

    def row_ids_M(self) -> Tensor:
        return self.integers(self.assignments)

    def weights_M(self) -> Tensor:
        return self.numbers(self.assignments)

    def scores_TE(self) -> Tensor:
        return self.numbers(self.shape.tokens, self.shape.experts)

    def stacked(self, *sizes: int) -> Stacked:
        first = self.rows(*sizes)
        return Stacked(first=first, stride=first.numel(), num_experts=self.shape.experts)

    def up(self) -> Stacked:
        return self.stacked(self.shape.expert_width, self.shape.width)

    def down(self) -> Stacked:
        return self.stacked(self.shape.width, self.shape.expert_width)

    def schedule(self, op: str, *, width: int = 0, inner: int = 0, matrices: int = 1) -> TileSchedule:
        """Rows cut as grouped GEMM ``op`` takes them."""
        experts, rows = self.shape.experts, self.assignments
        block_m = 1
        if width:
            sizes = dict(num_experts=experts, num_rows=rows, width=width, inner=inner, matrices=matrices)
            block_m = tile_height(op, self.x_TD(), **sizes)
        max_tiles = rows // block_m + experts
        return TileSchedule(
            offsets_e1=self.integers(experts + 1),
            tile_expert=self.integers(max_tiles),
            tile_row=self.integers(max_tiles),
            num_tiles=self.integers(1),
            max_tiles=max_tiles,
            num_rows=rows,
            block_m=block_m,
        )


def _gather(given: Inputs, *, weighted: bool) -> None:
    weights_N = given.weights_M() if weighted else None
    kernels.gather_rows(given.x_TD(), given.row_ids_M(), given.shape.top_k, weights_N)


def _combine(given: Inputs, *, weighted: bool) -> None:
    sizes = (given.shape.tokens, given.shape.top_k)
    kernels.combine_rows(given.assigned_MD(), given.integers(*sizes), given.numbers(*sizes) if weighted else None)


def _row_dot(given: Inputs) -> None:
    kernels.row_dot(given.assigned_MD(), given.x_TD(), given.row_ids_M(), given.shape.top_k)


def _segment_sums(given: Inputs, *, gathered: bool) -> None:
    offsets_e1 = given.integers(given.shape.experts + 1)
    if gathered:
        kernels.segment_sums(given.x_TD(), offsets_e1, row_ids_M=given.row_ids_M(), weights_M=given.weights_M())
    else:
        kernels.segment_sums(given.assigned_MF(), offsets_e1)


def _activation_forward(given: Inputs, activation: Activation) -> None:
    gate_MF = given.assigned_MF() if activation == "swiglu" else None
    kernels.activation_forward(given.assigned_MF(), gate_MF, given.weights_M(), activation)


def _activation_backward(given: Inputs, activation: Activation) -> None:
    gate_MF = given.assigned_MF() if activation == "swiglu" else None
    kernels.activation_backward(given.assigned_MF(), given.assigned_MF(), gate_MF, given.weights_M(), activation)


def _sort_slots(given: Inputs) -> None:
    kernels.sort_slots(given.integers(given.shape.tokens, given.shape.top_k), given.shape.experts)


def _tile_schedule(given: Inputs) -> None:
    counts_e = torch.empty(given.shape.experts, dtype=torch.int64, device="meta")
    kernels.tile_schedule(counts_e, block_m=128, num_rows=given.assignments)


def _ranks(given: Inputs, *, per_gpu: bool = True) -> RankMap:
    """Eight nodes of eight."""

    def ids(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.int64, device="meta")

    return RankMap(
        per_gpu=per_gpu,
        per_node=True,
        num_ranks=64,
        num_places=8,
        own_node=3,
        node_of_rank_W1=ids(65),
        place_of_rank_W1=ids(65),
        neighbours_WP=ids(64, 8),
    )


def _route(given: Inputs, *, per_gpu: bool) -> None:
    ranks, counts_E = _ranks(given, per_gpu=per_gpu), torch.empty(given.shape.experts, dtype=torch.int64, device="meta")
    places_S, top_k = given.integers(given.assignments), given.shape.top_k
    rank_KT = kernels.ranks_of_slots(places_S, counts_E, num_ranks=ranks.num_ranks, top_k=top_k)
    hop_KT = kernels.choose_pilots(rank_KT, ranks)
    routes = Routes(
        rank_KT=rank_KT,
        hop_KT=hop_KT,
        shared=kernels.share_rows(rank_KT, hop_KT, ranks),
        places_S=places_S,
        first_places_S=places_S,
        second_places_S=places_S,
    )
    num_local = given.shape.experts // ranks.num_ranks
    kernels.row_references(routes, kernels.message_starts(_message(given), num_places=8), ranks, num_local=num_local)


def _message(given: Inputs) -> Tensor:
    counts_E = torch.empty(given.shape.experts, dtype=torch.int64, device="meta")
    return kernels.route_message(given.integers(64), given.integers(64 * 8), counts_E, _ranks(given))


def _arrive(given: Inputs) -> None:
    message_WC, rows, copies = _message(given), given.shape.tokens, given.shape.tokens
    kernels.message_sizes(message_WC, message_WC, num_places=8)
    starts = kernels.message_starts(message_WC, num_places=8)
    references_N = given.integers(copies + given.assignments)
    begins_W2 = starts.references_W2
    kernels.pack_references(references_N, references_N[:copies], references_N[copies:], starts, begins_W2)
    inbox = Inbox(message_WC=message_WC, starts=starts, references_N=references_N, begins_W2=begins_W2)
    kernels.take_assignments(inbox, width=2, num_rows=rows + copies, num_assigned=given.assignments)
    kernels.take_copies(inbox, width=given.shape.top_k, num_first=rows, num_copies=copies)


def _rule(given: Inputs, *, sigmoid: bool) -> GateRule:
    """DeepSeek-V2's rule, or V3's with its groups."""
    if sigmoid:
        return GateRule(top_k=given.shape.top_k, score_function="sigmoid", scale=2.5, num_groups=8, num_limited=4)
    return GateRule(top_k=given.shape.top_k, normalize=False, z_sums=True)


def _gate_forward(given: Inputs, *, sigmoid: bool) -> None:
    bias_E = given.numbers(given.shape.experts) if sigmoid else None
    kernels.gate_forward(given.scores_TE(), _rule(given, sigmoid=sigmoid), bias_E=bias_E)


def _gate_backward(given: Inputs, *, sigmoid: bool) -> None:
    sizes = (given.shape.tokens, given.shape.top_k)
    kernels.gate_backward(
        given.scores_TE(),
        given.integers(*sizes),
        _rule(given, sigmoid=sigmoid),
        grad_weights_TK=given.numbers(*sizes),
        grad_share_sums_BE=given.numbers(1, given.shape.experts),
        grad_z_sums_B=given.numbers(1),
    )


def _forward(given: Inputs, *, bias: bool) -> None:
    kernels.grouped_forward(
        given.assigned_MF(),
        given.down(),
        given.schedule("grouped_forward", width=given.shape.width, inner=given.shape.expert_width),
        bias=given.stacked(given.shape.width) if bias else None,
        bias_scale_M=given.weights_M() if bias else None,
    )


def _forward_activated(given: Inputs, activation: Activation, *, bias: bool) -> None:
    gated, width = activation == "swiglu", given.shape.expert_width
    kernels.grouped_forward_activated(
        given.x_TD(),
        given.up(),
        given.up() if gated else None,
        given.schedule("grouped_forward_activated", width=width, inner=given.shape.width, matrices=1 + gated),
        row_ids_M=given.row_ids_M(),
        weights_M=given.weights_M(),
        activation=activation,
        up_bias=given.stacked(width) if bias else None,
        gate_bias=given.stacked(width) if bias and gated else None,
    )


def _dgrad(given: Inputs, *, second: bool) -> None:
    schedule = given.schedule("grouped_dgrad", width=given.shape.width, inner=given.shape.expert_width)
    pair = (given.assigned_MF(), given.up()) if second else None
    kernels.grouped_dgrad(given.assigned_MF(), given.up(), schedule, second=pair)


def _dgrad_activated(given: Inputs, activation: Activation, *, bias: bool) -> None:
    kernels.grouped_dgrad_activated(
        given.x_TD(),
        given.down(),
        given.schedule("grouped_dgrad_activated", width=given.shape.expert_width, inner=given.shape.width),
        row_ids_M=given.row_ids_M(),
        up_MF=given.assigned_MF(),
        gate_MF=given.assigned_MF() if activation == "swiglu" else None,
        weights_M=given.weights_M(),
        activation=activation,
        down_bias=given.stacked(given.shape.width) if bias else None,
    )


def _wgrad(given: Inputs, *, gathered: Literal["x", "d_out"] | None, accumulate: bool = False) -> None:
    d_out, x = given.assigned_MF(), given.assigned_MD()
    if gathered == "x":
        x = given.x_TD()
    elif gathered == "d_out":
        d_out, x = given.x_TD(), given.assigned_MF()
    kernels.grouped_wgrad(
        d_out,
        x,
        given.schedule("grouped_wgrad"),
        row_ids_M=given.row_ids_M() if gathered else None,
        gathered=gathered or "x",
        out=given.numbers(given.shape.experts, d_out.shape[1], x.shape[1]) if accumulate else None,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """``run`` calls one launcher; ``dtypes`` are the model's, or the one that the launcher knows."""

    name: str
    run: Callable[[Inputs], None]
    dtypes: tuple[str, ...] = FLOATS

    def inputs(self, dtype: str, shape: Shape) -> Inputs:
        return Inputs(shape=shape, dtype=getattr(torch, dtype))

    def kernels(self) -> list[str]:
        """Names of the kernels that it launches, in their order."""
        with recording(ARCHES[0]) as calls:
            self.run(self.inputs(self.dtypes[0], SHAPES[0]))
        return list(dict.fromkeys(call.name for call in calls))


def _cases() -> Iterator[Case]:
    for name, weighted in (("", False), ("_weighted", True)):
        yield Case(name=f"gather{name}", run=partial(_gather, weighted=weighted))
        yield Case(name=f"combine{name}", run=partial(_combine, weighted=weighted))
    yield Case(name="row_dot", run=_row_dot)
    yield Case(name="segment_sums", run=partial(_segment_sums, gathered=False))
    yield Case(name="segment_sums_gathered", run=partial(_segment_sums, gathered=True))
    for activation in ("swiglu", "gelu"):
        yield Case(name=f"activation_forward_{activation}", run=partial(_activation_forward, activation=activation))
        yield Case(name=f"activation_backward_{activation}", run=partial(_activation_backward, activation=activation))
    for activation, bias in (("swiglu", False), ("gelu", True)):
        yield Case(name=f"forward_{activation}", run=partial(_forward_activated, activation=activation, bias=bias))
        yield Case(name=f"dgrad_{activation}", run=partial(_dgrad_activated, activation=activation, bias=bias))
    yield Case(name="forward", run=partial(_forward, bias=False))
    yield Case(name="forward_bias", run=partial(_forward, bias=True))
    yield Case(name="dgrad", run=partial(_dgrad, second=False))
    yield Case(name="dgrad_two", run=partial(_dgrad, second=True))
    yield Case(name="wgrad", run=partial(_wgrad, gathered=None))
    yield Case(name="wgrad_accumulate", run=partial(_wgrad, gathered=None, accumulate=True))
    yield Case(name="wgrad_gather_x", run=partial(_wgrad, gathered="x"))
    yield Case(name="wgrad_gather_d_out", run=partial(_wgrad, gathered="d_out"))
    yield Case(name="wgrad_gather_x_accumulate", run=partial(_wgrad, gathered="x", accumulate=True))
    yield Case(name="sort_slots", run=_sort_slots, dtypes=("int32",))
    yield Case(name="route_by_gpu", run=partial(_route, per_gpu=True), dtypes=("int32",))
    yield Case(name="route_by_node", run=partial(_route, per_gpu=False), dtypes=("int32",))
    yield Case(name="arrive", run=_arrive, dtypes=("int32",))
    yield Case(name="tile_schedule", run=_tile_schedule, dtypes=("int32",))
    for name, sigmoid in (("softmax", False), ("sigmoid_groups", True)):
        yield Case(name=f"gate_{name}", run=partial(_gate_forward, sigmoid=sigmoid), dtypes=("float32",))
        yield Case(name=f"gate_backward_{name}", run=partial(_gate_backward, sigmoid=sigmoid), dtypes=("float32",))
    yield Case(name="top_k_ids", run=_top_k_ids, dtypes=("float32",))


def _top_k_ids(given: Inputs) -> None:
    kernels.top_k_ids(given.scores_TE(), given.shape.top_k)


CASES = tuple(_cases())


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
