"""Gating: from router logits to experts, weights, counts and the losses' sums in one launch.

A tile holds a few tokens and all their experts, so that softmax, selection and sums never leave the registers. Every
program writes its own counts and sums; a second kernel adds them in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gating_choice import experts_of_columns, find_experts, rank_experts, take_experts
from .gating_tiles import (
    EPS,
    Programs,
    check_logits,
    gate_config,
    load_logits,
    load_used,
    mask_bytes,
    power_of,
    program_tokens,
    softmax_parts,
)
from .launch import Cost, Launch, arch_of, launch
from .reference_gating import GateRule, Gating, check_gate
from .tuning import config_for


@triton.jit
def _score(x, SIGMOID: tl.constexpr, SOFTMAX: tl.constexpr):
    """``(scores, shares, largest, total)`` of each row, the last two of its softmax: None without ``SOFTMAX``.

    A sigmoid's scores are divided by their sum to be shares; a softmax's, which needs ``SOFTMAX``, are shares.

    Example: softmax of [0, 0, log 2] gives scores and shares [1/4, 1/4, 1/2], largest log 2, total 2.
    """
    largest, total = None, None
    if SIGMOID:
        scores = tl.sigmoid(x)
        shares = scores * (1.0 / tl.maximum(tl.sum(scores, 1), EPS))[:, None]
    if SOFTMAX:
        largest, powers, total = softmax_parts(x)
    if not SIGMOID:
        scores = powers * (1.0 / total)[:, None]
        shares = scores
    return scores, shares, largest, total


@triton.jit
def _weigh(
    logits,
    token,
    picked,
    choices,
    largest,
    total,
    num_experts,
    scale,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """``scale`` times the scores of the experts picked, 0 where none is; of sum ``scale`` in a row if ``NORMALIZE``.

    ``largest``, ``total``  of the rows' softmax, as :func:`_score` returns them; a sigmoid needs none

    Example: logits [[0, 0, log 2]], picked [[2, 0]]: scores 1/2 and 1/4, so weights 2/3 and 1/3 of scale 1.
    """
    # The logits of the chosen are in the cache: loading them is cheaper than finding them in the tile.
    places = (tl.cast(token, tl.int64) * num_experts)[:, None] + tl.maximum(picked, 0)
    x = tl.load(logits + places, mask=choices, other=0.0)
    scores = tl.sigmoid(x) if SIGMOID else power_of(x, largest) * (1.0 / total)[:, None]
    scores = tl.where(choices & (picked >= 0), scores, 0.0)
    factor = tl.full((picked.shape[0],), 1.0, tl.float32) * scale
    if NORMALIZE:
        factor = factor / tl.maximum(tl.sum(scores, 1), EPS)
    return scores * factor[:, None]


@triton.jit
def _gate_forward_kernel(
    logits,
    bias,
    used,
    ids_in,
    ids_out,
    weights,
    counts,
    shares,
    z,
    part_tokens,
    part_programs,
    num_experts,
    top_k,
    scale,
    num_limited,
    group_size,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILES: tl.constexpr,
):
    """A program decides for up to BLOCK_T * TILES tokens of one part; see :class:`Gating` for the equations.

    Column c of a tile is expert c. With groups whose size is no power of two, each starts at a multiple of
    ``WIDTH // GROUPS``. ``counts``, ``shares`` and ``z`` have a row for each program.

    Example: one program, logits [[0, 0, log 2]], top_k 2: experts 2 and 0 are taken; powers 1/2, 1/2, 1 of sum 2 give
    scores 1/4, 1/4, 1/2, so weights 1/2 and 1/4 over 3/4.
    """
    _part, first, end = program_tokens(part_tokens, part_programs, BLOCK_T, TILES)
    expert, valid = experts_of_columns(num_experts, group_size, GROUPS, PADDED, WIDTH)
    place = tl.arange(0, CHOICES)
    share_sums = tl.zeros((BLOCK_T, WIDTH), tl.float32)
    chosen_sums = tl.zeros((BLOCK_T, WIDTH), tl.int32)
    z_sums = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(first, end, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        inside = token < end
        counted = load_used(used, token, inside)
        x = load_logits(logits, token, inside, expert, valid, num_experts)
        scores, shared, largest, total = _score(x, SIGMOID, not SIGMOID or z is not None)
        share_sums += tl.where(counted[:, None], shared, 0.0)
        if z is not None:
            lse = largest + tl.log(total)
            z_sums += tl.where(counted, lse * lse, 0.0)

        slots = (tl.cast(token, tl.int64) * top_k)[:, None] + place[None, :]
        choices = inside[:, None] & (place < top_k)[None, :]
        if ids_in is None:
            ranks = rank_experts(x, scores, bias, expert, valid, num_limited, GROUP_SCORE, GROUPS, WIDTH)
            picked, chosen = take_experts(ranks, counted, top_k, group_size, GROUPS, PADDED, WIDTH, CHOICES)
            tl.store(ids_out + slots, picked, mask=choices)
        else:
            picked = tl.load(ids_in + slots, mask=choices, other=-1)
            chosen = find_experts(picked, expert, valid, top_k, WIDTH, CHOICES)
        chosen_sums += chosen
        weight = _weigh(logits, token, picked, choices, largest, total, num_experts, scale, SIGMOID, NORMALIZE)
        tl.store(weights + slots, weight, mask=choices)

    row = tl.cast(tl.program_id(0), tl.int64)
    tl.store(counts + row * num_experts + expert, tl.sum(chosen_sums, 0), mask=valid)
    tl.store(shares + row * num_experts + expert, tl.sum(share_sums, 0), mask=valid)
    if z is not None:
        tl.store(z + row, tl.sum(z_sums, 0))


@triton.jit
def _gate_sums_kernel(
    counts,
    shares,
    z,
    counts_out,
    shares_out,
    z_out,
    part_programs,
    num_experts,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Program (b, j) adds block j of experts over the rows of part b's programs, in an order that does not change.

    Example: 2 parts of 1 program each: every sum is its program's.
    """
    part = tl.program_id(0)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.arange(0, BLOCK_P)
    share_sums = tl.zeros((BLOCK_P, BLOCK_E), tl.float32)
    count_sums = tl.zeros((BLOCK_P, BLOCK_E), tl.int64)
    for start in range(0, part_programs, BLOCK_P):
        rows = tl.cast(part, tl.int64) * part_programs + start + row
        inside = start + row < part_programs
        places = rows[:, None] * num_experts + expert[None, :]
        mask = inside[:, None] & (expert < num_experts)[None, :]
        share_sums += tl.load(shares + places, mask=mask, other=0.0)
        count_sums += tl.load(counts + places, mask=mask, other=0)
    out = tl.cast(part, tl.int64) * num_experts + expert
    tl.store(shares_out + out, tl.sum(share_sums, 0), mask=expert < num_experts)
    tl.store(counts_out + out, tl.sum(count_sums, 0), mask=expert < num_experts)
    if z is not None:  # noqa: SIM102 (decided by the compiler, the other by the program)
        if tl.program_id(1) == 0:
            z_sums = tl.zeros((BLOCK_P,), tl.float32)
            for start in range(0, part_programs, BLOCK_P):
                rows = tl.cast(part, tl.int64) * part_programs + start + row
                z_sums += tl.load(z + rows, mask=start + row < part_programs, other=0.0)
            tl.store(z_out + part, tl.sum(z_sums, 0))


def gate_forward(
    logits_TE: Tensor,
    rule: GateRule,
    *,
    bias_E: Tensor | None = None,
    used_T: Tensor | None = None,
    ids_TK: Tensor | None = None,
    num_parts: int = 1,
) -> Gating:
    """Decides for every token, or weighs the decision ``ids_TK``, and sums; float32 logits. See the twin."""
    check_gate(logits_TE, rule, bias_E=bias_E, used_T=used_T, ids_TK=ids_TK, num_parts=num_parts)
    logits_TE = check_logits(logits_TE)
    num_tokens, num_experts = logits_TE.shape
    given = ids_TK is not None
    columns = _columns(num_experts, rule, given=given)
    biased = bias_E is not None and not given
    # A softmax, its bias and groups are the most that a tile has to hold at once.
    op = "gate_forward_held" if biased and rule.grouped else "gate_forward"
    dear = columns["PADDED"] or (biased and rule.score_function == "softmax")
    config = gate_config(op, logits_TE, columns=columns["WIDTH"], dear=dear)
    programs = Programs.of(num_tokens, num_parts, config)
    ids = (
        logits_TE.new_empty((num_tokens, rule.top_k), dtype=torch.int32)
        if ids_TK is None
        else ids_TK.int().contiguous()
    )
    weights_TK = logits_TE.new_empty((num_tokens, rule.top_k))
    counts_PE = logits_TE.new_empty((programs.total, num_experts), dtype=torch.int32)
    shares_PE = logits_TE.new_empty((programs.total, num_experts))
    z_P = logits_TE.new_empty((programs.total,)) if rule.z_sums else None
    launch(
        Launch(
            op=op,
            kernel=_gate_forward_kernel,
            grid=(programs.total,),
            arguments=dict(
                logits=logits_TE,
                bias=bias_E.float().contiguous() if bias_E is not None and not given else None,
                used=mask_bytes(used_T),
                ids_in=ids if given else None,
                ids_out=None if given else ids,
                weights=weights_TK,
                counts=counts_PE,
                shares=shares_PE,
                z=z_P,
                part_tokens=programs.part_tokens,
                part_programs=programs.each,
                num_experts=num_experts,
                top_k=rule.top_k,
                scale=rule.scale,
                num_limited=rule.num_limited,
                group_size=num_experts // rule.num_groups,
                SIGMOID=rule.score_function == "sigmoid",
                NORMALIZE=rule.normalize,
                CHOICES=triton.next_power_of_2(rule.top_k),
                **columns,
            ),
            config=config,
            cost=_forward_cost(logits_TE, rule, programs, bias=biased, mask=used_T is not None, given=given),
        )
    )
    return Gating(ids_TK=ids, weights_TK=weights_TK, **_sums(counts_PE, shares_PE, z_P, programs, num_parts))


def _columns(num_experts: int, rule: GateRule, *, given: bool) -> dict[str, Any]:
    """How experts lie in the columns of a tile: groups, where they matter, at powers of two."""
    if given or not rule.grouped:
        return dict(GROUP_SCORE="none", GROUPS=1, PADDED=False, WIDTH=triton.next_power_of_2(num_experts))
    size = num_experts // rule.num_groups
    groups, members = triton.next_power_of_2(rule.num_groups), triton.next_power_of_2(size)
    return dict(GROUP_SCORE=rule.group_score, GROUPS=groups, PADDED=members != size, WIDTH=groups * members)


def _forward_cost(
    logits_TE: Tensor, rule: GateRule, programs: Programs, *, bias: bool, mask: bool, given: bool
) -> Cost:
    """Every logit and mask byte once, the logits of the chosen (and ids, where given) again; about 8 FLOPs a logit."""
    num_tokens, num_experts = logits_TE.shape
    slots = num_tokens * rule.top_k
    return Cost(
        bytes_read=4 * logits_TE.numel()
        + 4 * slots * (1 + given)
        + (4 * programs.tiles * num_experts if bias else 0)
        + (num_tokens if mask else 0),
        bytes_written=4 * slots * (2 - given) + programs.total * (8 * num_experts + 4 * rule.z_sums),
        flops=8 * logits_TE.numel(),
    )


def _sums(
    counts_PE: Tensor, shares_PE: Tensor, z_P: Tensor | None, programs: Programs, num_parts: int
) -> dict[str, Tensor]:
    """The sums of :class:`Gating` over the programs of each part, by its fields' names; z's are 0 where not wanted."""
    num_experts = counts_PE.shape[1]
    counts_BE = counts_PE.new_empty((num_parts, num_experts), dtype=torch.int64)
    shares_BE = shares_PE.new_empty((num_parts, num_experts))
    z_B = shares_PE.new_zeros(num_parts) if z_P is None else shares_PE.new_empty(num_parts)
    config = config_for("gate_sums", arch=arch_of(shares_PE), dtype=shares_PE.dtype, width=num_experts)
    z_bytes = 0 if z_P is None else 4
    launch(
        Launch(
            op="gate_sums",
            kernel=_gate_sums_kernel,
            grid=(num_parts, triton.cdiv(num_experts, config.blocks["BLOCK_E"])),
            arguments=dict(
                counts=counts_PE,
                shares=shares_PE,
                z=z_P,
                counts_out=counts_BE,
                shares_out=shares_BE,
                z_out=z_B,
                part_programs=programs.each,
                num_experts=num_experts,
            ),
            config=config,
            cost=Cost(
                bytes_read=programs.total * (8 * num_experts + z_bytes),
                bytes_written=num_parts * (12 * num_experts + z_bytes),
                flops=2 * programs.total * num_experts,
            ),
        )
    )
    return dict(counts_BE=counts_BE, share_sums_BE=shares_BE, z_sums_B=z_B)
