"""PyTorch twins of the gating kernels: from router logits to a routing decision, its weights and its sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ScoreFunction = Literal["softmax", "sigmoid"]
GroupScore = Literal["top2_sum", "max"]


@dataclass(frozen=True, kw_only=True)
class GateRule:
    """How logits become a decision and weights.

    ``num_groups`` equal runs of consecutive experts form groups, of which a token takes its ``num_limited`` best:
    by the sum of their two best experts, or by the best one. ``z_sums``: whether those are wanted.
    """

    top_k: int
    score_function: ScoreFunction = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_limited: int = 1
    group_score: GroupScore = "top2_sum"
    z_sums: bool = False

    @property
    def grouped(self) -> bool:
        return self.num_limited < self.num_groups

    @property
    def num_counted(self) -> int:
        """How many experts' scores make a group's."""
        return 2 if self.group_score == "top2_sum" else 1


@dataclass(frozen=True, kw_only=True)
class Gating:
    """The decision about T tokens, which lie in B equal parts (sequences) of consecutive tokens.

    With ``s = score_function(logits)`` and ``s' = s / max(sum over experts of s, eps)`` (for softmax, s itself):

    ``ids_TK``         int32; experts of each token, best first; -1 for tokens not used (or as given)
    ``weights_TK``     ``scale * s[t, ids[t, k]] / (max(sum over kept k of s[t, ids[t, k]], eps) if normalize else 1)``;
                       0 where the id is -1
    ``counts_BE``      int64; how often part b's ids name expert e
    ``share_sums_BE``  sum over used tokens t of part b of ``s'[t, e]``
    ``z_sums_B``       sum over used tokens t of part b of ``logsumexp(logits[t])^2``; zeros if not wanted
    """

    ids_TK: Tensor
    weights_TK: Tensor
    counts_BE: Tensor
    share_sums_BE: Tensor
    z_sums_B: Tensor


def top_k_ids(scores_TE: Tensor, top_k: int) -> Tensor:
    """Ids of the K largest scores of each row, largest first; of equal scores the lowest id wins.

    Returns int64 ``[T, K]``. ``torch.topk`` leaves the order of ties open, and with it the determinism of routing.

    Example: scores [[1, 3, 3, 0]], K=2 gives [[1, 2]].
    """
    check_top_k(top_k, scores_TE.shape[1])
    if scores_TE.is_cpu and top_k > 4:
        # One partial sort is then faster than a pass for each choice. Where neighbours among the K + 1 best are in
        # no order (equal, or not numbers), their row is done again.
        best, ids = scores_TE.topk(min(top_k + 1, scores_TE.shape[1]), dim=1)
        tied = (~(best[:, 1:] < best[:, :-1]).all(dim=1)).nonzero().squeeze(1)
        ids[tied, :top_k] = _best_by_passes(scores_TE[tied], top_k)
        return ids[:, :top_k].contiguous()
    return _best_by_passes(scores_TE, top_k)


def _best_by_passes(scores_TE: Tensor, top_k: int) -> Tensor:
    remaining = scores_TE.clone()
    ids_TK = scores_TE.new_empty((scores_TE.shape[0], top_k), dtype=torch.int64)
    for choice in range(top_k):
        best_T1 = remaining.argmax(dim=1, keepdim=True)
        ids_TK[:, choice : choice + 1] = best_T1
        if choice + 1 < top_k:
            remaining.scatter_(1, best_T1, float("-inf"))
    return ids_TK


def experts_of_best_groups(scores_TE: Tensor, *, num_groups: int, num_limited: int, num_counted: int) -> Tensor:
    """bool ``[T, E]``: True for the experts of each token's ``num_limited`` best groups.

    Groups are ``num_groups`` equal runs of consecutive experts. A group's score is the sum of its ``num_counted``
    best experts' scores (of all, where it has fewer); of equal groups the lowest wins.

    Example: scores [[5, 0, 3, 3]], 2 groups, 1 limited: the second group at 2 counted, the first at 1.
    """
    group_TG = group_scores(scores_TE, num_groups=num_groups, num_counted=num_counted)
    return experts_of_groups(top_k_ids(group_TG, num_limited), num_groups=num_groups, num_experts=scores_TE.shape[1])


def group_scores(scores_TE: Tensor, *, num_groups: int, num_counted: int) -> Tensor:
    """``[T, G]``: the sum of each group's ``num_counted`` best experts' scores, of all where it has fewer."""
    num_tokens, num_experts = scores_TE.shape
    scores_TGe = scores_TE.view(num_tokens, num_groups, num_experts // num_groups)
    return scores_TGe.topk(min(num_counted, scores_TGe.shape[2]), dim=2).values.sum(dim=2)


def experts_of_groups(group_ids_TL: Tensor, *, num_groups: int, num_experts: int) -> Tensor:
    """bool ``[T, E]``: True for the experts of the groups named.

    Example: groups [[1]] of 2, 4 experts gives [[False, False, True, True]].
    """
    chosen_TG = torch.zeros((group_ids_TL.shape[0], num_groups), dtype=torch.bool, device=group_ids_TL.device)
    chosen_TG.scatter_(1, group_ids_TL, True)
    return chosen_TG.repeat_interleave(num_experts // num_groups, dim=1)


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raises ValueError where no token can have as many different experts."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be in 1..{num_experts}, the number of experts")


def check_gate(
    logits_TE: Tensor,
    rule: GateRule,
    *,
    bias_E: Tensor | None,
    used_T: Tensor | None,
    ids_TK: Tensor | None,
    num_parts: int,
) -> None:
    """Raises ValueError, with both numbers, where the shapes do not fit each other or the rule."""
    num_tokens, num_experts = logits_TE.shape
    check_top_k(rule.top_k, num_experts)
    if num_experts % rule.num_groups:
        raise ValueError(f"num_groups ({rule.num_groups}) does not divide the number of experts ({num_experts})")
    held = rule.num_limited * (num_experts // rule.num_groups)
    if not rule.top_k <= held <= num_experts:
        raise ValueError(f"num_limited ({rule.num_limited}) groups hold {held} experts, top_k is {rule.top_k}")
    if bias_E is not None and bias_E.shape != (num_experts,):
        raise ValueError(f"the bias has shape {tuple(bias_E.shape)}, but there are {num_experts} experts")
    if used_T is not None and used_T.shape != (num_tokens,):
        raise ValueError(f"the mask has shape {tuple(used_T.shape)}, but there are {num_tokens} tokens")
    if ids_TK is not None and ids_TK.shape != (num_tokens, rule.top_k):
        raise ValueError(f"ids have shape {tuple(ids_TK.shape)}, expected {(num_tokens, rule.top_k)}")
    if num_tokens % max(num_parts, 1):
        raise ValueError(f"{num_tokens} tokens do not lie in {num_parts} equal parts")


def gate_forward(
    logits_TE: Tensor,
    rule: GateRule,
    *,
    bias_E: Tensor | None = None,
    used_T: Tensor | None = None,
    ids_TK: Tensor | None = None,
    num_parts: int = 1,
) -> Gating:
    """Decides for every token, or weighs the decision ``ids_TK`` (int, -1 for none), and sums for the losses.

    Experts are ranked by logits, which order them as scores do and still where scores round to equal numbers; with
    a bias, by scores plus bias. ``used_T`` (bool): the others take no expert, unless ids are given, and are in no sum.

    Example: logits [[0, 0, log 2]], K=2 gives ids [[2, 0]], weights [[2/3, 1/3]], counts [[1, 0, 1]] and share sums
    [[1/4, 1/4, 1/2]].
    """
    check_gate(logits_TE, rule, bias_E=bias_E, used_T=used_T, ids_TK=ids_TK, num_parts=num_parts)
    num_tokens, num_experts = logits_TE.shape
    scores_TE = _scores(logits_TE, rule)
    if ids_TK is None:
        ids_TK = _choose(logits_TE, scores_TE, rule, bias_E=bias_E)
        if used_T is not None:
            ids_TK.masked_fill_(~used_T[:, None], -1)
    raw_TK, divisor_T1 = _raw_and_divisor(scores_TE, ids_TK, rule)
    part = num_tokens // max(num_parts, 1)
    bins = torch.where(ids_TK < 0, num_experts, ids_TK).long().view(num_parts, part * rule.top_k)
    counts = bins.new_zeros(num_parts, num_experts + 1).scatter_add_(1, bins, torch.ones_like(bins))
    factor_T = _share_factor(scores_TE, rule, used_T)
    z_T = _softmax_and_lse(logits_TE, scores_TE, rule)[1].square() if rule.z_sums else logits_TE.new_zeros(num_tokens)
    if used_T is not None:
        z_T = z_T * used_T
    return Gating(
        ids_TK=ids_TK.to(torch.int32),
        weights_TK=raw_TK.mul_(rule.scale / divisor_T1),
        counts_BE=counts[:, :num_experts],
        share_sums_BE=torch.bmm(
            factor_T.view(num_parts, 1, part), scores_TE.view(num_parts, part, num_experts)
        ).squeeze(1),
        z_sums_B=z_T.view(num_parts, part).sum(1),
    )


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
    """Gradient of the logits, from those of the weights and of both sums. ``ids_TK`` of any integer type.

    Everything else is computed again from the logits. Where a sum was clamped to eps it is a constant.
    """
    num_parts = grad_share_sums_BE.shape[0]
    check_gate(logits_TE, rule, bias_E=None, used_T=used_T, ids_TK=ids_TK, num_parts=num_parts)
    part = logits_TE.shape[0] // max(num_parts, 1)
    scores_TE = _scores(logits_TE, rule)
    factor_T = _share_factor(scores_TE, rule, used_T)
    grad_TE = (factor_T.view(num_parts, part, 1) * grad_share_sums_BE[:, None]).view_as(logits_TE)
    if rule.score_function == "sigmoid":
        total_T1 = scores_TE.sum(dim=1, keepdim=True)
        eps = torch.finfo(scores_TE.dtype).eps
        inner_T1 = (grad_TE * scores_TE).sum(dim=1, keepdim=True) / total_T1.clamp(min=eps)
        grad_TE -= inner_T1.masked_fill_(total_T1 <= eps, 0.0)
    raw_TK, divisor_T1 = _raw_and_divisor(scores_TE, ids_TK, rule)
    grad_raw_TK = grad_weights_TK * (rule.scale / divisor_T1)
    if rule.normalize:
        shared_T1 = (grad_raw_TK * raw_TK).sum(dim=1, keepdim=True) / divisor_T1
        grad_raw_TK -= shared_T1.masked_fill_(divisor_T1 <= torch.finfo(divisor_T1.dtype).eps, 0.0)
    grad_raw_TK.masked_fill_(ids_TK < 0, 0.0)
    # A token's ids differ, but for -1 (clamped to 0, adding 0): at most one term is not 0, so any order will do.
    grad_TE.scatter_add_(1, ids_TK.clamp(min=0).long(), grad_raw_TK)
    grad_TE = _scores_backward(grad_TE, scores_TE, rule)
    if rule.z_sums:
        softmax_TE, lse_T = _softmax_and_lse(logits_TE, scores_TE, rule)
        slope_T = (2 * lse_T.view(num_parts, part) * grad_z_sums_B[:, None]).view(-1)
        grad_TE = torch.addcmul(grad_TE, softmax_TE, (slope_T if used_T is None else slope_T * used_T)[:, None])
    return grad_TE


def _scores(logits_TE: Tensor, rule: GateRule) -> Tensor:
    return torch.softmax(logits_TE, dim=1) if rule.score_function == "softmax" else torch.sigmoid(logits_TE)


def _softmax_and_lse(logits_TE: Tensor, scores_TE: Tensor, rule: GateRule) -> tuple[Tensor, Tensor]:
    """The largest softmax is ``exp(largest logit - lse)``, so that no second pass of exponentials is needed."""
    softmax_TE = scores_TE if rule.score_function == "softmax" else torch.softmax(logits_TE, dim=1)
    return softmax_TE, logits_TE.amax(dim=1) - softmax_TE.amax(dim=1).log()


def _scores_backward(grad_TE: Tensor, scores_TE: Tensor, rule: GateRule) -> Tensor:
    if rule.score_function == "softmax":
        return torch.ops.aten._softmax_backward_data(grad_TE, scores_TE, 1, scores_TE.dtype)
    return torch.ops.aten.sigmoid_backward(grad_TE, scores_TE)


def _choose(logits_TE: Tensor, scores_TE: Tensor, rule: GateRule, *, bias_E: Tensor | None) -> Tensor:
    """int64 ``[T, K]``, best first."""
    ranking_TE, group_TE = logits_TE, scores_TE
    if bias_E is not None:
        ranking_TE = group_TE = scores_TE + bias_E
    elif rule.group_score == "max":
        group_TE = logits_TE
    if rule.grouped:
        allowed_TE = experts_of_best_groups(
            group_TE, num_groups=rule.num_groups, num_limited=rule.num_limited, num_counted=rule.num_counted
        )
        ranking_TE = ranking_TE.masked_fill(~allowed_TE, float("-inf"))
    return top_k_ids(ranking_TE, rule.top_k)


def _raw_and_divisor(scores_TE: Tensor, ids_TK: Tensor, rule: GateRule) -> tuple[Tensor, Tensor]:
    """Scores of the selected experts, 0 where the id is -1, and what they are divided by, ``[T, 1]``."""
    raw_TK = scores_TE.gather(1, ids_TK.clamp(min=0).long()).masked_fill_(ids_TK < 0, 0.0)
    total_T1 = raw_TK.sum(dim=1, keepdim=True)
    return raw_TK, total_T1.clamp(min=torch.finfo(raw_TK.dtype).eps) if rule.normalize else torch.ones_like(total_T1)


def _share_factor(scores_TE: Tensor, rule: GateRule, used_T: Tensor | None) -> Tensor:
    """``[T]``: what a token's scores are multiplied by in the sum of shares."""
    if rule.score_function == "softmax":
        factor_T = scores_TE.new_ones(scores_TE.shape[0])
    else:
        factor_T = scores_TE.sum(dim=1).clamp_(min=torch.finfo(scores_TE.dtype).eps).reciprocal_()
    return factor_T if used_T is None else factor_T * used_T
