"""PyTorch twins of the kernels: the CPU path, and the oracle each Triton kernel is compared with.

Same names, same signatures and same results as the kernels; plain tensor code, no autograd (the operators of
``xmoe.ops`` call forward and backward by name). Shape letters are those of ``xmoe/types.py``.

Accumulation is in at least float32 (``accumulator_dtype``), in an order fixed by the integers, so that two runs
agree bit by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from .host_threads import Segment, run_workers, worker_parts

aten = torch.ops.aten

Activation = Literal["swiglu", "gelu", "gelu_tanh", "relu"]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for float16, bfloat16 and float32; float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def top_k_ids(scores_TE: Tensor, top_k: int) -> Tensor:
    """Ids of the K largest scores of each row, largest first; of equal scores the lowest id wins.

    Returns int64 ``[T, K]``. ``torch.topk`` leaves the order of ties open, and with it the determinism of routing.

    Example: scores [[1, 3, 3, 0]], K=2 gives [[1, 2]].
    """
    remaining = scores_TE.clone()
    ids_TK = scores_TE.new_empty((scores_TE.shape[0], top_k), dtype=torch.int64)
    for choice in range(top_k):
        best_T1 = remaining.argmax(dim=1, keepdim=True)
        ids_TK[:, choice : choice + 1] = best_T1
        remaining.scatter_(1, best_T1, float("-inf"))
    return ids_TK


def experts_of_best_groups(scores_TE: Tensor, *, num_groups: int, num_limited: int, num_counted: int) -> Tensor:
    """bool ``[T, E]``: True for the experts of each token's ``num_limited`` best groups.

    Groups are ``num_groups`` equal runs of consecutive experts. A group's score is the sum of its ``num_counted``
    best experts' scores (of all, where it has fewer); of equal groups the lowest wins.

    Example: scores [[5, 0, 3, 3]], 2 groups, 1 limited: the second group at 2 counted, the first at 1.
    """
    num_tokens, num_experts = scores_TE.shape
    scores_TGe = scores_TE.view(num_tokens, num_groups, num_experts // num_groups)
    best_TGc = scores_TGe.topk(min(num_counted, scores_TGe.shape[2]), dim=2).values
    group_ids_TL = top_k_ids(best_TGc.sum(dim=2), num_limited)
    chosen_TG = torch.zeros((num_tokens, num_groups), dtype=torch.bool, device=scores_TE.device)
    chosen_TG.scatter_(1, group_ids_TL, True)
    return chosen_TG.repeat_interleave(num_experts // num_groups, dim=1)


def count_ids(ids: Tensor, num_bins: int) -> Tensor:
    """int64 ``[num_bins]``: how often each id occurs; negative ids are not counted.

    Example: ids [[2, 0], [2, -1]], 3 bins gives [1, 0, 2].
    """
    flat = ids.reshape(-1).long()
    counts = flat.new_zeros(num_bins + 1)
    counts.scatter_add_(0, torch.where(flat < 0, num_bins, flat), torch.ones_like(flat))
    return counts[:num_bins]


def sort_slots(ids_TK: Tensor, num_experts: int) -> Tensor:
    """int32 ``[T*K]``: slots in the order of their experts, ties by slot, dropped slots (-1) last.

    Example: ids [[1, 0], [-1, 1]] gives [1, 0, 3, 2].
    """
    flat = ids_TK.reshape(-1)
    key = torch.where(flat < 0, num_experts, flat).to(torch.int32)
    return key.argsort(stable=True).to(torch.int32)


def ranks_within_expert(ids: Tensor, priorities: Tensor, num_experts: int) -> Tensor:
    """int64, shaped like ``ids``: the place of each assignment among those of its expert, highest priority first.

    Equal priorities keep their order. Assignments of id -1 get places of their own that mean nothing.

    Example: ids [0, 1, 0, 0], priorities [.1, .5, .9, .1] gives [1, 0, 0, 2].
    """
    flat = ids.reshape(-1).long()
    key = torch.where(flat < 0, num_experts, flat)
    by_priority = priorities.reshape(-1).argsort(descending=True, stable=True)
    order = by_priority[key[by_priority].argsort(stable=True)]
    counts = count_ids(key, num_experts + 1)
    starts = counts.cumsum(0) - counts
    places = torch.empty_like(flat)
    places[order] = torch.arange(flat.numel(), device=flat.device) - starts[key[order]]
    return places.view(ids.shape)


def gather_rows(x_TD: Tensor, slot_ids_N: Tensor, top_k: int) -> Tensor:
    """``out[n] = x[slot_ids[n] // top_k]``, ``[N, D]`` in x's dtype.

    Example: x rows a, b, K=2, slots [3, 0] gives rows b, a.
    """
    return x_TD.index_select(0, slot_ids_N // top_k)


def combine_rows(rows_ND: Tensor, slot_ids_N: Tensor, num_tokens: int, *, top_k: int) -> Tensor:
    """``out[t] = sum of rows[n] over n with slot_ids[n] // top_k == t``, ``[T, D]`` in rows' dtype.

    Summed in the order of the slots in at least float32: each token is written once, nothing is atomic.

    Example: rows a, b, c of slots [2, 0, 1], K=2 gives rows b + c, a.
    """
    num_rows, width = rows_ND.shape
    row_of_slot = slot_ids_N.new_full((num_tokens * top_k,), num_rows, dtype=torch.int64)
    row_of_slot[slot_ids_N.long()] = torch.arange(num_rows, device=rows_ND.device)
    padded = torch.cat([rows_ND, rows_ND.new_zeros(1, width)])
    row_of_slot_TK = row_of_slot.view(num_tokens, top_k)
    total = rows_ND.new_zeros((num_tokens, width), dtype=accumulator_dtype(rows_ND.dtype))
    for choice in range(top_k):
        total += padded.index_select(0, row_of_slot_TK[:, choice])
    return total.to(rows_ND.dtype)


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Weights of the local experts, one list entry for each, as ``nn.Linear`` keeps them: ``[out, in]``.

    ``up``    of ``[F, D]``, ``down`` of ``[D, F]``, ``gate`` of ``[F, D]`` for swiglu and empty otherwise;
    biases ``[F]``, ``[D]``, ``[F]`` in lists of the same length, or empty lists where the experts have none.
    """

    up: Sequence[Tensor]
    down: Sequence[Tensor]
    gate: Sequence[Tensor] = ()
    up_bias: Sequence[Tensor] = ()
    down_bias: Sequence[Tensor] = ()
    gate_bias: Sequence[Tensor] = ()

    FIELDS = ("up", "down", "gate", "up_bias", "down_bias", "gate_bias")


def expert_mlp_forward(
    x_RD: Tensor,
    row_ids_M: Tensor,
    weights_M: Tensor,
    counts: Sequence[int],
    *,
    experts: ExpertWeights,
    activation: Activation,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The routed MLP of ragged rows, an expert at a time so that its rows and weights stay in cache.

        y[r] = sum over m with row_ids[m] == r of down_e(weights[m] * act(up_e(x[r])))      e the expert of m

    Assignments are sorted by expert, ``counts[e]`` of them for expert e; within one expert rows are distinct.
    Rows are gathered inside, and weights are applied before the down projection, so that neither permuted copies
    nor post-activations outlive the expert that uses them.

    Returns ``y_RD`` and what backward needs: the pre-activations ``up_MF`` and, for swiglu, ``gate_MF``.

    Example: one expert with up = down = [[2]] and relu, x = [[3]], row_ids [0], weights [.5]: up 6, y 6.
    """
    num_assignments, width = row_ids_M.numel(), experts.up[0].shape[0]
    up_MF = x_RD.new_empty((num_assignments, width))
    gate_MF = x_RD.new_empty((num_assignments, width)) if activation == "swiglu" else None

    def run(part: list[Segment], y_RD: Tensor, scratch: _Scratch) -> None:
        for expert, rows in part:
            ids, weight_N1 = row_ids_M[rows], weights_M[rows, None]
            x = torch.index_select(x_RD, 0, ids, out=scratch("x", rows))
            up = _linear(x, experts.up, experts.up_bias, expert, out=up_MF[rows])
            gate = None
            if gate_MF is not None:
                gate = _linear(x, experts.gate, experts.gate_bias, expert, out=gate_MF[rows])
            hidden = _activate(up, gate, activation, scratch, rows).mul_(weight_N1).to(x.dtype)
            y = torch.mm(hidden, experts.down[expert].t(), out=scratch("y", rows))
            if experts.down_bias:
                y.add_(experts.down_bias[expert] * weight_N1.to(y.dtype))
            y_RD.index_add_(0, ids, y.to(y_RD.dtype))

    y_RD = _over_experts(run, counts, x_RD, width, products=2 if gate_MF is None else 3)
    return y_RD.to(x_RD.dtype), up_MF, gate_MF


def expert_mlp_backward(
    grad_y_RD: Tensor,
    x_RD: Tensor,
    row_ids_M: Tensor,
    weights_M: Tensor,
    counts: Sequence[int],
    *,
    experts: ExpertWeights,
    activation: Activation,
    up_MF: Tensor,
    gate_MF: Tensor | None,
) -> tuple[Tensor, Tensor, ExpertWeights]:
    """Gradients of :func:`expert_mlp_forward`: of ``x_RD``, of ``weights_M`` and of every expert's weights.

    The activation is computed again from the pre-activations. An expert without rows gets exact zeros.
    """
    accumulator = accumulator_dtype(x_RD.dtype)
    grad_weights_M = torch.empty_like(weights_M)
    grads = {field: [torch.empty_like(w) for w in getattr(experts, field)] for field in ExpertWeights.FIELDS}
    for expert, count in enumerate(counts):
        if not count:
            for found in filter(None, grads.values()):
                found[expert].zero_()

    def run(part: list[Segment], grad_x_RD: Tensor, scratch: _Scratch) -> None:
        for expert, rows in part:
            ids, weight_N1 = row_ids_M[rows], weights_M[rows, None]
            x = torch.index_select(x_RD, 0, ids, out=scratch("x", rows))
            dy = torch.index_select(grad_y_RD, 0, ids, out=scratch("y", rows))
            up, gate = up_MF[rows], gate_MF[rows] if gate_MF is not None else None
            d_hidden = torch.mm(dy, experts.down[expert], out=scratch("d_hidden", rows))
            hidden, d_up, d_gate, d_weight = _activation_backward(
                d_hidden.to(accumulator), up, gate, weight_N1, activation, scratch, rows
            )
            torch.mm(dy.t(), hidden.to(dy.dtype), out=grads["down"][expert])
            if experts.down_bias:
                torch.sum(dy * weight_N1.to(dy.dtype), 0, out=grads["down_bias"][expert])
                d_weight += torch.mv(dy.to(accumulator), experts.down_bias[expert].to(accumulator))
            grad_weights_M[rows] = d_weight
            d_up = _linear_grads(d_up.to(x.dtype), x, expert, grads["up"], grads["up_bias"])
            dx = torch.mm(d_up, experts.up[expert], out=scratch("dx", rows))
            if d_gate is not None:
                d_gate = _linear_grads(d_gate.to(x.dtype), x, expert, grads["gate"], grads["gate_bias"])
                dx.addmm_(d_gate, experts.gate[expert])
            grad_x_RD.index_add_(0, ids, dx.to(grad_x_RD.dtype))

    grad_x_RD = _over_experts(run, counts, x_RD, up_MF.shape[1], products=4 if gate_MF is None else 6)
    return grad_x_RD.to(x_RD.dtype), grad_weights_M, ExpertWeights(**grads)


class _Scratch:
    """Buffers that a worker's experts use one after the other: allocated once, in cache while in use.

    ``x``, ``y`` and ``dx`` are rows of the model's width and dtype, ``d_hidden`` of the experts' width, all others of
    the experts' width in the accumulator's dtype.
    """

    def __init__(self, x_RD: Tensor, width: int, max_rows: int) -> None:
        self._x_RD, self._width, self._max_rows = x_RD, width, max_rows
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, rows: slice) -> Tensor:
        """The first rows of the buffer ``name``, as many as the slice has."""
        buffer = self._buffers.get(name)
        if buffer is None:
            width = self._x_RD.shape[1] if name in ("x", "y", "dx") else self._width
            dtype = self._x_RD.dtype
            dtype = dtype if name in ("x", "y", "dx", "d_hidden") else accumulator_dtype(dtype)
            buffer = self._buffers[name] = self._x_RD.new_empty((self._max_rows, width), dtype=dtype)
        return buffer[: rows.stop - rows.start]


def _over_experts(
    run: Callable[[list[Segment], Tensor, _Scratch], None],
    counts: Sequence[int],
    x_RD: Tensor,
    width: int,
    *,
    products: int,
) -> Tensor:
    """Calls ``run(experts and their rows, sum_RD, scratch)`` on one or more threads; returns the sum of their sums.

    ``products`` is the number of matrix products of each row.
    """
    ends = itertools.accumulate(counts)
    busy = [(i, slice(end - count, end)) for i, (count, end) in enumerate(zip(counts, ends, strict=True)) if count]
    parts = worker_parts(busy, like=x_RD, flops_per_row=2.0 * products * width * x_RD.shape[1])
    sums = [torch.zeros_like(x_RD, dtype=accumulator_dtype(x_RD.dtype)) for _ in parts]
    scratches = [_Scratch(x_RD, width, max(counts, default=0)) for _ in parts]
    run_workers([partial(run, *job) for job in zip(parts, sums, scratches, strict=True)])
    for other in sums[1:]:
        sums[0] += other
    return sums[0]


def _linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], expert: int, *, out: Tensor) -> Tensor:
    if biases:
        return torch.addmm(biases[expert], x, weights[expert].t(), out=out)
    return torch.mm(x, weights[expert].t(), out=out)


def _linear_grads(d_out: Tensor, x: Tensor, expert: int, grads: list[Tensor], bias_grads: list[Tensor]) -> Tensor:
    """Writes one linear layer's weight and bias gradient; returns ``d_out``."""
    torch.mm(d_out.t(), x, out=grads[expert])
    if bias_grads:
        torch.sum(d_out, 0, out=bias_grads[expert])
    return d_out


def _approximation(activation: Activation) -> str:
    return "tanh" if activation == "gelu_tanh" else "none"


def _activate(up: Tensor, gate: Tensor | None, activation: Activation, scratch: _Scratch, rows: slice) -> Tensor:
    """Post-activation in the accumulator's dtype, in a scratch buffer."""
    up = up.to(accumulator_dtype(up.dtype))
    out = scratch("hidden", rows)
    if gate is not None:
        return aten.silu.out(gate.to(up.dtype), out=out).mul_(up)
    if activation == "relu":
        return torch.clamp(up, min=0, out=out)
    return aten.gelu.out(up, approximate=_approximation(activation), out=out)


def _activation_backward(
    d_hidden: Tensor,
    up: Tensor,
    gate: Tensor | None,
    weight_N1: Tensor,
    activation: Activation,
    scratch: _Scratch,
    rows: slice,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """From the gradient of ``hidden = weight * act``: hidden itself, d_up, d_gate (or None) and d_weight ``[n]``.

    All in the accumulator's dtype and in scratch buffers; ``d_hidden`` is overwritten.
    """
    up = up.to(d_hidden.dtype)
    product = scratch("product", rows)
    if gate is None:
        hidden = _activate(up, None, activation, scratch, rows)
        d_weight = torch.mul(d_hidden, hidden, out=product).sum(1)
        d_hidden.mul_(weight_N1)
        if activation == "relu":
            d_hidden.masked_fill_(up <= 0, 0.0)
        else:
            approximate = _approximation(activation)
            aten.gelu_backward.grad_input(d_hidden, up, approximate=approximate, grad_input=d_hidden)
        return hidden.mul_(weight_N1), d_hidden, None, d_weight
    gate = gate.to(d_hidden.dtype)
    sigmoid = torch.sigmoid(gate, out=scratch("sigmoid", rows))
    silu = torch.mul(gate, sigmoid, out=scratch("silu", rows))
    hidden = torch.mul(silu, up, out=scratch("hidden", rows))
    d_weight = torch.mul(d_hidden, hidden, out=product).sum(1)
    d_hidden.mul_(weight_N1)
    # silu' = sigmoid + silu * (1 - sigmoid): one exponential for silu and its derivative.
    slope = torch.addcmul(silu, sigmoid, torch.sub(1.0, silu, out=product), out=sigmoid)
    d_gate = torch.mul(d_hidden, up, out=product).mul_(slope)
    return hidden.mul_(weight_N1), silu.mul_(d_hidden), d_gate, d_weight
