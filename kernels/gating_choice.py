"""How the tokens of a gating tile choose among the experts in its columns: ranks, groups, and the best one by one.

What experts are ranked by becomes an integer that orders as the number does: the best is its maximum, of equal ones the
lowest column, and what is taken falls below every number, so that even rows of NaN give K different experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gating_tiles import BARRED, TAKEN, number_of, rank_of, take_best


@triton.jit
def experts_of_columns(num_experts, group_size, GROUPS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """The expert of each column, and whether there is one.

    Example: 2 groups of 3, WIDTH 8: 0, 1, 2, none, 3, 4, 5, none.
    """
    expert = tl.arange(0, WIDTH)
    valid = expert < num_experts
    if PADDED:
        member = expert % (WIDTH // GROUPS)
        expert = expert // (WIDTH // GROUPS) * group_size + member
        valid = (member < group_size) & (expert < num_experts)
    return expert, valid


@triton.jit
def _bar_groups(ranks, values, num_limited, TOP2: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr):
    """``ranks`` with the experts barred that are in none of the token's ``num_limited`` best groups.

    ``values``  ranks of what a group is scored by: the two best of a group are added, or the best one counts

    Example: 2 groups of 2, values [5, 0, 3, 3], TOP2, one group: 5 against 6, so the first two are barred.
    """
    members = tl.reshape(values, (values.shape[0], GROUPS, MEMBERS))
    best = tl.max(members, 2)
    groups = best
    if TOP2:
        member = tl.arange(0, MEMBERS)[None, None, :]
        found = tl.min(tl.where(members == best[:, :, None], member, MEMBERS), 2)
        second = tl.max(tl.where(member == found[:, :, None], BARRED, members), 2)
        groups = rank_of(number_of(best) + tl.where(second == BARRED, 0.0, number_of(second)))
        groups = tl.where(best == BARRED, BARRED, groups)
    for _ in range(num_limited):
        _found, groups = take_best(groups, GROUPS)
    allowed = tl.broadcast_to((groups == TAKEN)[:, :, None], (values.shape[0], GROUPS, MEMBERS))
    return tl.where(tl.reshape(allowed, (values.shape[0], GROUPS * MEMBERS)), ranks, BARRED)


@triton.jit
def rank_experts(
    x, scores, bias, expert, valid, num_limited, GROUP_SCORE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr
):
    """Ranks of the experts a token may take, by logits ``x``, or by scores plus the bias; of all others BARRED.

    Example: logits [[0, 1]], no bias, no groups: 0 and 1065353216.
    """
    if bias is not None:
        ranking = scores + tl.load(bias + expert, mask=valid, other=0.0)[None, :]
        group_score = ranking
    else:
        ranking = x
        group_score = scores
    ranks = tl.where(valid[None, :], rank_of(ranking), BARRED)
    if GROUP_SCORE == "max":
        ranks = _bar_groups(ranks, ranks, num_limited, False, GROUPS, WIDTH // GROUPS)
    if GROUP_SCORE == "top2_sum":
        values = tl.where(valid[None, :], rank_of(group_score), BARRED)
        ranks = _bar_groups(ranks, values, num_limited, True, GROUPS, WIDTH // GROUPS)
    return ranks


@triton.jit
def take_experts(
    ranks,
    counted,
    top_k,
    group_size,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """``(the top_k best experts of each row, -1 where the row does not count; 1 in their columns)``.

    Example: ranks [[5, 7, 7]] of a row that counts, top_k 2: [[1, 2]] and [[0, 1, 1]].
    """
    place = tl.arange(0, CHOICES)[None, :]
    picked = tl.full((ranks.shape[0], CHOICES), -1, tl.int32)
    for choice in range(top_k):
        found, ranks = take_best(ranks, WIDTH)
        picked = tl.where(place == choice, found[:, None], picked)
    if PADDED:
        picked = picked // (WIDTH // GROUPS) * group_size + picked % (WIDTH // GROUPS)
    chosen = tl.where(counted[:, None] & (ranks == TAKEN), 1, 0)
    return tl.where(counted[:, None], picked, -1), chosen


@triton.jit
def find_experts(picked, expert, valid, top_k, WIDTH: tl.constexpr, CHOICES: tl.constexpr):
    """1 in the columns of the experts picked.

    Example: picked [[2, -1]] among experts 0 to 2: [[0, 0, 1]].
    """
    place = tl.arange(0, CHOICES)[None, :]
    chosen = tl.zeros((picked.shape[0], WIDTH), tl.int32)
    for choice in range(top_k):
        found = tl.max(tl.where(place == choice, picked, -1), 1)
        chosen += tl.where((expert[None, :] == found[:, None]) & valid[None, :], 1, 0)
    return chosen
