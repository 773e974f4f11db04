"""Every launcher of ``xmoe.kernels.triton_kernels``, called once for each of its forms, on one small problem.

Problems are on the host, with numbers, or on the ``meta`` device, to be recorded and compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from route_problem import RouteProblem
from torch import Tensor

from xmoe.kernels import reference
from xmoe.kernels import triton_kernels as kernels
from xmoe.kernels.ragged import Stacked, TileSchedule, stack
from xmoe.kernels.reference_gating import GateRule


@dataclass(frozen=True)
class Problem:
    """T tokens of width D, K choices each, of which ``counts`` went to each expert and the rest were dropped.

    ``strided``  every tensor but schedules, weights and gradients to add to is a view with gaps, filled with garbage
    """

    tokens: int
    width: int
    expert_width: int
    top_k: int
    counts: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    block_m: int = 16
    strided: bool = False

    @property
    def experts(self) -> int:
        return len(self.counts)

    @property
    def assignments(self) -> int:
        return sum(self.counts)

    def floats(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return self._laid_out(torch.randn(sizes, device=self.device).to(dtype or self.dtype))

    def integers(self, values: Tensor) -> Tensor:
        return self._laid_out(values.to(torch.int32).to(self.device))

    def _laid_out(self, x: Tensor) -> Tensor:
        if not self.strided:
            return x
        buffer = torch.full((*x.shape, 2), float("nan") if x.is_floating_point() else 7, dtype=x.dtype)
        buffer[..., 0] = x
        return buffer[..., 0]

    @cached_property
    def _ids_TK(self) -> Tensor:
        flat = [expert for expert, count in enumerate(self.counts) for _ in range(count)]
        flat += [-1] * (self.tokens * self.top_k - len(flat))
        order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))
        return torch.tensor(flat)[order].view(self.tokens, self.top_k)

    @property
    def ids_TK(self) -> Tensor:
        return self.integers(self._ids_TK)

    @cached_property
    def _order(self) -> tuple[Tensor, Tensor]:
        return reference.sort_slots(self._ids_TK.int(), self.experts)

    @property
    def slot_ids_M(self) -> Tensor:
        return self.integers(self._order[0][: self.assignments])

    @property
    def places_TK(self) -> Tensor:
        return self.integers(self._order[1].view(self.tokens, self.top_k))

    @property
    def row_ids_M(self) -> Tensor:
        return self.integers(self._order[0][: self.assignments] // self.top_k)

    @property
    def schedule(self) -> TileSchedule:
        found = reference.tile_schedule(torch.tensor(self.counts), block_m=self.block_m, num_rows=self.assignments)
        tensors = {name: x.to(self.device) for name, x in vars(found).items() if isinstance(x, Tensor)}
        numbers = {name: x for name, x in vars(found).items() if not isinstance(x, Tensor)}
        return TileSchedule(**tensors, **numbers)

    def stacked(self, *sizes: int) -> Stacked:
        return stack(list(self.floats(self.experts, *sizes).contiguous().unbind()))

    def weights(self) -> Tensor:
        return self.floats(self.assignments, dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    """``kernels``  the kernels that ``run`` launches, in their order, without repeats"""

    name: str
    kernels: tuple[str, ...]
    run: Callable[[Problem], Any]


def _gather(p: Problem, *, weighted: bool) -> Any:
    return kernels.gather_rows(p.floats(p.tokens, p.width), p.slot_ids_M, p.top_k, p.weights() if weighted else None)


def _combine(p: Problem, *, weighted: bool) -> Any:
    weights = p.floats(p.tokens, p.top_k, dtype=torch.float32) if weighted else None
    return kernels.combine_rows(p.floats(p.assignments, p.width), p.places_TK, weights)


def _row_dot(p: Problem) -> Any:
    return kernels.row_dot(p.floats(p.assignments, p.width), p.floats(p.tokens, p.width), p.slot_ids_M, p.top_k)


def _segment_sums(p: Problem, *, gathered: bool) -> Any:
    rows = p.floats(p.tokens if gathered else p.assignments, p.width)
    more = {"row_ids_M": p.row_ids_M, "weights_M": p.weights()} if gathered else {}
    return kernels.segment_sums(rows, p.schedule.offsets_e1, **more)


def _activation(p: Problem, activation: str, *, backward: bool) -> Any:
    up = p.floats(p.assignments, p.expert_width)
    gate = p.floats(p.assignments, p.expert_width) if activation == "swiglu" else None
    if backward:
        d_hidden = p.floats(p.assignments, p.expert_width)
        return kernels.activation_backward(d_hidden, up, gate, p.weights(), activation)
    return kernels.activation_forward(up, gate, p.weights(), activation)


def _tile_schedule(p: Problem) -> Any:
    counts = torch.tensor(p.counts).to(p.device)
    return kernels.tile_schedule(counts, block_m=p.block_m, num_rows=p.assignments)


def _scores(p: Problem) -> Tensor:
    return p.floats(p.tokens, p.experts, dtype=torch.float32)


def _gate_forward(
    p: Problem, rule: dict[str, Any], *, bias: bool = False, used: bool = False, given: bool = False
) -> Any:
    return kernels.gate_forward(
        _scores(p),
        GateRule(top_k=p.top_k, **rule),
        bias_E=p.floats(p.experts, dtype=torch.float32) if bias else None,
        used_T=p.floats(p.tokens) > 0 if used else None,
        ids_TK=p.ids_TK if given else None,
    )


def _gate_backward(p: Problem, rule: dict[str, Any], *, used: bool = False) -> Any:
    return kernels.gate_backward(
        _scores(p),
        p.ids_TK,
        GateRule(top_k=p.top_k, **rule),
        grad_weights_TK=p.floats(p.tokens, p.top_k, dtype=torch.float32),
        grad_share_sums_BE=p.floats(1, p.experts, dtype=torch.float32),
        grad_z_sums_B=p.floats(1, dtype=torch.float32),
        used_T=p.floats(p.tokens) > 0 if used else None,
    )


def _forward(p: Problem, *, gathered: bool, bias: bool) -> Any:
    more: dict[str, Any] = {"row_ids_M": p.row_ids_M} if gathered else {}
    if bias:
        more |= {"bias": p.stacked(p.expert_width), "bias_scale_M": p.weights()}
    a = p.floats(p.tokens if gathered else p.assignments, p.width)
    return kernels.grouped_forward(a, p.stacked(p.expert_width, p.width), p.schedule, **more)


def _forward_activated(p: Problem, activation: str, *, bias: bool) -> Any:
    gated = activation == "swiglu"
    return kernels.grouped_forward_activated(
        p.floats(p.tokens, p.width),
        p.stacked(p.expert_width, p.width),
        p.stacked(p.expert_width, p.width) if gated else None,
        p.schedule,
        row_ids_M=p.row_ids_M,
        weights_M=p.weights(),
        activation=activation,
        up_bias=p.stacked(p.expert_width) if bias else None,
        gate_bias=p.stacked(p.expert_width) if bias and gated else None,
    )


def _dgrad(p: Problem, *, second: bool) -> Any:
    def part() -> tuple[Tensor, Stacked]:
        return p.floats(p.assignments, p.expert_width), p.stacked(p.expert_width, p.width)

    return kernels.grouped_dgrad(*part(), p.schedule, second=part() if second else None)


def _dgrad_activated(p: Problem, activation: str, *, bias: bool) -> Any:
    return kernels.grouped_dgrad_activated(
        p.floats(p.tokens, p.width),
        p.stacked(p.width, p.expert_width),
        p.schedule,
        row_ids_M=p.row_ids_M,
        up_MF=p.floats(p.assignments, p.expert_width),
        gate_MF=p.floats(p.assignments, p.expert_width) if activation == "swiglu" else None,
        weights_M=p.weights(),
        activation=activation,
        down_bias=p.stacked(p.width) if bias else None,
    )


def _wgrad(p: Problem, *, gathered: str | None, into: bool = False) -> Any:
    rows = {side: p.tokens if side == gathered else p.assignments for side in ("x", "d_out")}
    more: dict[str, Any] = {"row_ids_M": p.row_ids_M, "gathered": gathered} if gathered else {}
    if into:
        more["out"] = p.floats(p.experts, p.expert_width, p.width, dtype=torch.float32).contiguous()
    return kernels.grouped_wgrad(
        p.floats(rows["d_out"], p.expert_width), p.floats(rows["x"], p.width), p.schedule, **more
    )


def _route(p: Problem, step: str, *, two_hops: bool = True, per_gpu: bool = True) -> Any:
    """A step of a plan, of ranks with one expert each, two to a node; all of another node where they are odd."""
    ids_TK = p._ids_TK.int()
    repeats_TK = (ids_TK[:, :, None] == ids_TK[:, None]).tril(-1).any(2)  # no token takes an expert twice
    places = 2 if p.experts % 2 == 0 else p.experts
    nodes = tuple(rank // places for rank in range(p.experts))
    problem = RouteProblem(
        ids_TK=ids_TK.masked_fill(repeats_TK, -1),
        nodes=nodes,
        own_node=0 if nodes[-1] else 1,
        num_local=1,
        per_gpu=per_gpu,
        per_node=two_hops,
        place=lambda x: p._laid_out(x.to(p.device)),
    )
    return getattr(problem, step)(kernels)


_PLAN = ("_block_counts_kernel", "_block_offsets_kernel", "_place_slots_kernel")
_GATE = ("_gate_forward_kernel", "_gate_sums_kernel")
_SOFTMAX: dict[str, Any] = {"z_sums": True}
_SIGMOID: dict[str, Any] = {"score_function": "sigmoid", "scale": 2.5}

CASES = [
    Case("gather", ("_gather_rows_kernel",), lambda p: _gather(p, weighted=False)),
    Case("gather-weighted", ("_gather_rows_kernel",), lambda p: _gather(p, weighted=True)),
    Case("combine", ("_combine_rows_kernel",), lambda p: _combine(p, weighted=False)),
    Case("combine-weighted", ("_combine_rows_kernel",), lambda p: _combine(p, weighted=True)),
    Case("row-dot", ("_row_dot_kernel",), _row_dot),
    Case("segment-sums", ("_segment_sums_kernel",), lambda p: _segment_sums(p, gathered=False)),
    Case("segment-sums-gathered", ("_segment_sums_kernel",), lambda p: _segment_sums(p, gathered=True)),
    Case("count-ids", _PLAN[:2], lambda p: kernels.count_ids(p.ids_TK, p.experts)),
    Case("sort-slots", _PLAN, lambda p: kernels.sort_slots(p.ids_TK, p.experts)),
    Case("tile-schedule", ("_tile_schedule_kernel",), _tile_schedule),
    *[
        Case(step.replace("_", "-"), names, lambda p, step=step: _route(p, step))
        for step, names in {
            "ranks_of_slots": ("_slot_ranks_kernel",),
            "choose_pilots": ("_pilot_candidates_kernel", "_draw_pilots_kernel", "_follow_loads_kernel"),
            "share_rows": ("_share_rows_kernel",),
            "row_references": ("_row_references_kernel",),
            "route_message": ("_route_message_kernel",),
            "message_starts": ("_message_starts_kernel",),
            "message_sizes": ("_message_sizes_kernel",),
            "pack_references": ("_pack_references_kernel",),
            "take_assignments": ("_take_assignments_kernel",),
            "take_copies": ("_take_copies_kernel",),
        }.items()
    ],
    Case("share-rows-by-node", ("_share_rows_kernel",), lambda p: _route(p, "share_rows", per_gpu=False)),
    *[
        Case(f"{step}-one-hop", (f"_{step}_kernel",), lambda p, step=step: _route(p, step, two_hops=False))
        for step in ("row_references", "route_message", "pack_references", "take_assignments")
    ],
    *[
        Case(f"{name}-{activation}", (f"_{name}_kernel",), run)
        for name, backward in (("activation_forward", False), ("activation_backward", True))
        for activation in ("swiglu", "gelu")
        for run in [lambda p, a=activation, b=backward: _activation(p, a, backward=b)]
    ],
    Case("top-k-ids", ("_top_k_ids_kernel",), lambda p: kernels.top_k_ids(_scores(p), p.top_k)),
    Case("gate-softmax", _GATE, lambda p: _gate_forward(p, _SOFTMAX)),
    Case("gate-sigmoid-bias", _GATE, lambda p: _gate_forward(p, _SIGMOID, bias=True, used=True)),
    Case("gate-given", _GATE, lambda p: _gate_forward(p, _SOFTMAX, given=True)),
    Case("gate-backward", ("_gate_backward_kernel",), lambda p: _gate_backward(p, _SOFTMAX)),
    Case("gate-backward-sigmoid", ("_gate_backward_kernel",), lambda p: _gate_backward(p, _SIGMOID, used=True)),
    Case("forward", ("_grouped_forward_kernel",), lambda p: _forward(p, gathered=False, bias=False)),
    Case("forward-gathered-bias", ("_grouped_forward_kernel",), lambda p: _forward(p, gathered=True, bias=True)),
    *[
        Case(f"{name}-{activation}{'-bias' if bias else ''}", (f"_grouped_{name}_kernel",), run)
        for name, call in (("forward_activated", _forward_activated), ("dgrad_activated", _dgrad_activated))
        for activation, bias in (("swiglu", False), ("gelu", True))
        for run in [lambda p, c=call, a=activation, b=bias: c(p, a, bias=b)]
    ],
    Case("dgrad", ("_grouped_dgrad_kernel",), lambda p: _dgrad(p, second=False)),
    Case("dgrad-second", ("_grouped_dgrad_kernel",), lambda p: _dgrad(p, second=True)),
    Case("wgrad", ("_grouped_wgrad_kernel",), lambda p: _wgrad(p, gathered=None)),
    Case("wgrad-gathered-into", ("_grouped_wgrad_kernel",), lambda p: _wgrad(p, gathered="x", into=True)),
    Case("wgrad-gathered-d_out", ("_grouped_wgrad_kernel",), lambda p: _wgrad(p, gathered="d_out")),
]
