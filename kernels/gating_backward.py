"""Gating, backward: from the gradients of weights and sums to that of the logits, in one pass over them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gating_tiles import (
    EPS,
    Programs,
    check_logits,
    gate_config,
    load_logits,
    load_used,
    mask_bytes,
    program_tokens,
    softmax_parts,
)
from .launch import Cost, Launch, launch
from .reference_gating import GateRule, check_gate


@triton.jit
def _gate_backward_kernel(
    logits,
    ids,
    used,
    grad_weights,
    grad_shares,
    grad_z,
    out,
    part_tokens,
    part_programs,
    num_experts,
    top_k,
    scale,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    Z_SUMS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILES: tl.constexpr,
):
    """A program writes the gradient of the logits of up to BLOCK_T * TILES tokens of one part.

    A token's choices are brought back to the columns of their experts, where scores are computed again: the sum of
    the chosen scores and all gradients then need no index.

    Example: softmax scores [1/2, 1/2], top_k 1, not normalised, gradient 1 of expert 0's weight: [1/4, -1/4].
    """
    part, first, end = program_tokens(part_tokens, part_programs, BLOCK_T, TILES)
    expert, place = tl.arange(0, WIDTH), tl.arange(0, CHOICES)
    valid = expert < num_experts
    grad_share = tl.load(grad_shares + tl.cast(part, tl.int64) * num_experts + expert, mask=valid, other=0.0)
    if Z_SUMS:
        z_slope = 2.0 * tl.load(grad_z + part)
    for start in range(first, end, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        inside = token < end
        counted = load_used(used, token, inside)
        slots = (tl.cast(token, tl.int64) * top_k)[:, None] + place[None, :]
        choices = inside[:, None] & (place < top_k)[None, :]
        picked = tl.cast(tl.load(ids + slots, mask=choices, other=-1), tl.int32)
        weights = tl.load(grad_weights + slots, mask=choices, other=0.0)
        upstream = tl.zeros((BLOCK_T, WIDTH), tl.float32)
        chosen = tl.zeros((BLOCK_T, WIDTH), tl.int32)
        for choice in range(top_k):
            found = tl.max(tl.where(place[None, :] == choice, picked, -1), 1)
            weight = tl.sum(tl.where(place[None, :] == choice, weights, 0.0), 1)
            hit = expert[None, :] == found[:, None]
            upstream = tl.where(hit, weight[:, None], upstream)
            chosen = tl.where(hit, 1, chosen)

        x = load_logits(logits, token, inside, expert, valid, num_experts)
        if not SIGMOID or Z_SUMS:
            largest, powers, total = softmax_parts(x)
            softmax = powers / total[:, None]
        grad = tl.where(counted[:, None], grad_share[None, :], 0.0)
        if SIGMOID:
            scores = tl.sigmoid(x)
            share_total = tl.sum(scores, 1)
            inner = tl.sum(grad * scores, 1) / tl.maximum(share_total, EPS)
            grad = (grad - tl.where(share_total > EPS, inner, 0.0)[:, None]) / tl.maximum(share_total, EPS)[:, None]
        else:
            scores = softmax

        upstream *= scale
        if NORMALIZE:
            raw_total = tl.sum(tl.where(chosen != 0, scores, 0.0), 1)
            divisor = tl.maximum(raw_total, EPS)
            inner = tl.where(raw_total > EPS, tl.sum(upstream * scores, 1) / divisor, 0.0)
            upstream = tl.where(chosen != 0, upstream - inner[:, None], 0.0) / divisor[:, None]
        grad += upstream

        grad = grad * scores * (1.0 - scores) if SIGMOID else scores * (grad - tl.sum(scores * grad, 1)[:, None])
        if Z_SUMS:
            slope = z_slope * (largest + tl.log(total))
            grad += softmax * tl.where(counted, slope, 0.0)[:, None]
        places = tl.cast(token, tl.int64)[:, None] * num_experts + expert[None, :]
        tl.store(out + places, grad, mask=inside[:, None] & valid[None, :])


def gate_backward(
    logits_TE: Tensor,
    ids_TK: Tensor,
    rule: GateRule,
    *,
    grad_weights_TK: Tensor,
    grad_share_sums_BE: Tensor,
    grad_z_sums_B: Tensor,
    used_T: Tensor | None = None,
) -> Tensor:
    """Gradient of the logits, from those of the weights and of both sums; float32 logits. See the twin."""
    num_parts = grad_share_sums_BE.shape[0]
    check_gate(logits_TE, rule, bias_E=None, used_T=used_T, ids_TK=ids_TK, num_parts=num_parts)
    logits_TE = check_logits(logits_TE)
    num_tokens, num_experts = logits_TE.shape
    width = triton.next_power_of_2(num_experts)
    config = gate_config("gate_backward", logits_TE, columns=width)
    programs = Programs.of(num_tokens, num_parts, config)
    grad_TE = torch.empty_like(logits_TE)
    mask, slots = mask_bytes(used_T), num_tokens * rule.top_k
    z_bytes = 4 * programs.total if rule.z_sums else 0
    launch(
        Launch(
            op="gate_backward",
            kernel=_gate_backward_kernel,
            grid=(programs.total,),
            arguments=dict(
                logits=logits_TE,
                ids=ids_TK.contiguous(),
                used=mask,
                grad_weights=grad_weights_TK.contiguous(),
                grad_shares=grad_share_sums_BE.contiguous(),
                grad_z=grad_z_sums_B.contiguous(),
                out=grad_TE,
                part_tokens=programs.part_tokens,
                part_programs=programs.each,
                num_experts=num_experts,
                top_k=rule.top_k,
                scale=rule.scale,
                SIGMOID=rule.score_function == "sigmoid",
                NORMALIZE=rule.normalize,
                Z_SUMS=rule.z_sums,
                WIDTH=width,
                CHOICES=triton.next_power_of_2(rule.top_k),
            ),
            config=config,
            cost=Cost(
                bytes_read=4 * logits_TE.numel()
                + slots * (ids_TK.element_size() + 4)
                + programs.total * 4 * num_experts
                + z_bytes
                + (0 if mask is None else num_tokens),
                bytes_written=4 * logits_TE.numel(),
                flops=12 * logits_TE.numel(),
            ),
        )
    )
    return grad_TE
