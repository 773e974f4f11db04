"""Gating: the twins against loops over single numbers, the kernels against twins and loops, forward and backward."""

import math

import harness
import pytest
import torch

from xmoe.kernels import reference, triton_kernels
from xmoe.kernels.reference import GateRule
from xmoe.testing import assert_close

GROUPED = {"num_groups": 8, "num_limited": 4, "score_function": "sigmoid", "scale": 2.5}
# tokens, parts, experts, K, rule, and what comes with it
CASES = {
    "one": (1, 1, 1, 1, {}, ""),
    "all chosen": (7, 1, 5, 5, {"score_function": "sigmoid", "z_sums": True}, "mask"),
    "wide": (257, 1, 64, 6, {"z_sums": True}, "mask"),
    "not normalised": (63, 9, 8, 1, {"normalize": False, "scale": 3.0, "z_sums": True}, ""),
    "bias": (33, 1, 100, 7, {"z_sums": True}, "bias"),
    "groups": (21, 3, 256, 8, GROUPED, "bias mask"),
    "uneven groups": (13, 1, 60, 6, {"num_groups": 5, "num_limited": 2, "normalize": False}, "mask"),
    "best of a group": (9, 3, 24, 4, {"num_groups": 6, "num_limited": 2, "group_score": "max"}, ""),
    "groups of one": (7, 1, 12, 3, {"num_groups": 12, "num_limited": 5}, "bias"),
    "none": (0, 2, 8, 2, {"z_sums": True}, "mask"),
    "no parts": (0, 0, 8, 2, {"z_sums": True}, ""),
}


def inputs(name, *, given=False):
    tokens, parts, experts, top_k, options, extra = CASES[name]
    rule = GateRule(top_k=top_k, **options)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)] or [torch.empty(0, top_k)])
    more = {
        "num_parts": parts,
        "bias_E": torch.randn(experts) * 0.2 if "bias" in extra else None,
        "used_T": torch.rand(tokens) > 0.3 if "mask" in extra else None,
        "ids_TK": ids.int().view(tokens, top_k).masked_fill(torch.rand(tokens, top_k) < 0.3, -1) if given else None,
    }
    return torch.randn(tokens, experts) * 2, rule, more


def in_double(more):
    return {key: x.double() if key == "bias_E" and x is not None else x for key, x in more.items()}


def best(values, number, among):
    return sorted(among, key=lambda index: (-values[index], index))[:number]


def oracle(logits, rule, *, num_parts, bias_E, used_T, ids_TK):
    """A token, an expert, a choice at a time. Scores and sums are Python's floats, from the very logits."""
    num_tokens, num_experts = logits.shape
    ids, weights = [], []
    counts = [[0] * num_experts for _ in range(num_parts)]
    shares, z = [[0.0] * num_experts for _ in range(num_parts)], [0.0] * num_parts
    for token, row in enumerate(logits.tolist()):
        part = token // (num_tokens // num_parts)
        used = used_T is None or bool(used_T[token])
        lse = max(row) + math.log(sum(math.exp(x - max(row)) for x in row))
        softmax = [math.exp(x - lse) for x in row]
        scores = softmax if rule.score_function == "softmax" else [1 / (1 + math.exp(-x)) for x in row]
        if ids_TK is not None:
            chosen = ids_TK[token].tolist()
        else:
            values = (
                scores if bias_E is None else [s + b for s, b in zip(scores, bias_E.double().tolist(), strict=True)]
            )
            size = num_experts // rule.num_groups
            members = [range(group * size, (group + 1) * size) for group in range(rule.num_groups)]
            counted = 2 if rule.group_score == "top2_sum" else 1
            sums = [sum(sorted((values[e] for e in group), reverse=True)[:counted]) for group in members]
            allowed = [e for group in best(sums, rule.num_limited, range(rule.num_groups)) for e in members[group]]
            chosen = best(values, rule.top_k, allowed) if used else [-1] * rule.top_k
        raw = [scores[e] if e >= 0 else 0.0 for e in chosen]
        divisor = max(sum(raw), 2.0**-23) if rule.normalize else 1.0
        ids.append(chosen)
        weights.append([rule.scale * value / divisor for value in raw])
        for expert in chosen:
            counts[part][expert] += expert >= 0
        if used:
            z[part] += lse**2
            for expert in range(num_experts):
                shares[part][expert] += scores[expert] / sum(scores)
    shape = (num_tokens, rule.top_k)
    return (
        torch.tensor(ids, dtype=torch.int32).view(shape),
        torch.tensor(weights, dtype=torch.float64).view(shape),
        torch.tensor(counts).view(num_parts, num_experts),
        torch.tensor(shares, dtype=torch.float64).view(num_parts, num_experts),
        torch.tensor(z, dtype=torch.float64) if rule.z_sums else torch.zeros(num_parts, dtype=torch.float64),
    )


def assert_gating(found, expected, *, dtype):
    ids, weights, counts, shares, z = expected
    assert torch.equal(found.ids_TK, ids)
    assert found.ids_TK.dtype == torch.int32
    assert torch.equal(found.counts_BE, counts)
    assert_close(found.weights_TK, weights, what="weights")
    assert_close(found.share_sums_BE, shares, what="shares")
    assert_close(found.z_sums_B, z, what="z")
    assert {x.dtype for x in (found.weights_TK, found.share_sums_BE, found.z_sums_B)} == {dtype}


@pytest.mark.parametrize("given", [False, True], ids=["chosen", "given"])
@pytest.mark.parametrize("name", CASES)
def test_forward_equals_the_loops(name, given):
    logits, rule, more = inputs(name, given=given)
    expected = oracle(logits, rule, **more)
    assert_gating(reference.gate_forward(logits.double(), rule, **in_double(more)), expected, dtype=torch.float64)
    assert_gating(reference.gate_forward(logits, rule, **more), expected, dtype=torch.float32)
    assert_gating(triton_kernels.gate_forward(logits, rule, **more), expected, dtype=torch.float32)


def dense(logits, ids, rule, used_T, num_parts):
    """Weights, share sums and z sums as dense algebra that autograd differentiates."""
    used = torch.ones(len(logits)).double() if used_T is None else used_T.double()
    scores = logits.softmax(1) if rule.score_function == "softmax" else logits.sigmoid()
    chosen = (ids[:, :, None] == torch.arange(logits.shape[1])).double()
    raw = (chosen * scores[:, None]).sum(2)
    weights = rule.scale * (raw / raw.sum(1, keepdim=True).clamp(min=2.0**-52) if rule.normalize else raw)
    shares = scores / scores.sum(1, keepdim=True) * used[:, None]
    z = logits.logsumexp(1).square() * used
    return weights, shares.view(num_parts, -1, logits.shape[1]).sum(1), z.view(num_parts, -1).sum(1) * rule.z_sums


@pytest.mark.parametrize("given", [False, True], ids=["chosen", "given"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "no parts"])
def test_backward_equals_autograd_of_dense_algebra(name, given):
    logits, rule, more = inputs(name, given=given)
    ids, used, parts = reference.gate_forward(logits, rule, **more).ids_TK, more["used_T"], more["num_parts"]
    exact = logits.double().requires_grad_()
    values = dense(exact, ids, rule, used, parts)
    upstream = [torch.randn(x.shape) for x in values]
    (expected,) = torch.autograd.grad(values, exact, [g.double() for g in upstream])
    for kernels, dtype in [
        (reference, torch.float64),
        (reference, torch.float32),
        (triton_kernels, torch.float32),
    ]:
        weights, shares, z = (g.to(dtype) for g in upstream)
        found = kernels.gate_backward(
            logits.to(dtype),
            ids.to(torch.int16),
            rule,
            grad_weights_TK=weights,
            grad_share_sums_BE=shares,
            grad_z_sums_B=z,
            used_T=used,
        )
        assert found.dtype == dtype
        assert_close(found, expected)


@pytest.mark.parametrize("kernels", [reference, triton_kernels], ids=["twin", "kernel"])
@pytest.mark.parametrize(("groups", "limited"), [(1, 1), (4, 2), (3, 2)])
def test_ties_go_to_the_lowest_group_and_expert(kernels, groups, limited):
    rule = GateRule(top_k=5, num_groups=groups, num_limited=limited, group_score="max")
    logits = torch.randint(0, 3, (33, 12)).float()
    logits[0] = 0.0
    logits[1, ::2] = -0.0  # equal to 0
    logits[1, 1::2] = 0.0
    none = {"num_parts": 1, "bias_E": None, "used_T": None, "ids_TK": None}
    found = kernels.gate_forward(logits, rule).ids_TK
    assert torch.equal(found, oracle(logits, rule, **none)[0])
    assert found[:2].tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("kernels", [reference, triton_kernels], ids=["twin", "kernel"])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_extreme_logits_keep_their_order_and_stay_finite(kernels, score_function):
    rule = GateRule(top_k=3, score_function=score_function, z_sums=True)
    logits = torch.tensor([[-150.0, -140.0, 40.0, 60.0], [1e4, -1e4, 3e4, 2e4], [-3e38, -2e38, -1e38, -3.4e38]])
    found = kernels.gate_forward(logits, rule)
    assert found.ids_TK.tolist() == [[3, 2, 1], [2, 3, 0], [2, 1, 0]]
    ones = {
        "grad_weights_TK": torch.randn(3, 3),
        "grad_share_sums_BE": torch.randn(1, 4),
        "grad_z_sums_B": torch.zeros(1),
    }
    grad = kernels.gate_backward(logits[:2], found.ids_TK[:2], rule, **{**ones, "grad_weights_TK": torch.randn(2, 3)})
    assert bool(torch.isfinite(found.weights_TK).all())
    assert bool(torch.isfinite(found.share_sums_BE).all())
    assert bool(torch.isfinite(grad).all())


def test_rows_that_are_not_numbers_still_take_different_experts():
    logits = torch.randn(6, 5)
    logits[0], logits[1, 2], logits[2], logits[3, 1] = math.nan, math.nan, -math.inf, math.inf
    logits[4, :4] = -math.inf
    found = triton_kernels.gate_forward(logits, GateRule(top_k=5)).ids_TK
    assert found.sort(dim=1).values.tolist() == [[0, 1, 2, 3, 4]] * 6
    assert found[:, 0].tolist()[:5] == [0, 2, 0, 1, 4]


def test_a_decision_given_back_is_weighed_bit_by_bit_alike():
    for name in ("bias", "groups"):
        logits, rule, more = inputs(name)
        first = triton_kernels.gate_forward(logits, rule, **more)
        again = triton_kernels.gate_forward(logits, rule, **{**more, "ids_TK": first.ids_TK})
        for field in ("weights_TK", "counts_BE", "share_sums_BE", "z_sums_B"):
            assert torch.equal(getattr(first, field), getattr(again, field)), field


@pytest.mark.parametrize("given", [False, True], ids=["chosen", "given"])
@pytest.mark.parametrize("name", ["all chosen", "bias", "groups", "uneven groups", "not normalised"])
def test_programs_are_independent_and_touch_what_they_declare(name, given):
    logits, rule, more = inputs(name, given=given)

    def run():
        gating = triton_kernels.gate_forward(logits, rule, **more)
        grad = triton_kernels.gate_backward(
            logits,
            gating.ids_TK,
            rule,
            grad_weights_TK=gating.weights_TK,
            grad_share_sums_BE=gating.share_sums_BE,
            grad_z_sums_B=gating.z_sums_B,
            used_T=more["used_T"],
        )
        return gating, grad

    with harness.race_check(), harness.traffic() as launches:
        gating, grad = run()
    assert [launch.kernel for launch in launches] == [
        "_gate_forward_kernel",
        "_gate_sums_kernel",
        "_gate_backward_kernel",
    ]
    for launch in launches:
        assert (launch.bytes_read, launch.bytes_written) == (launch.declared.bytes_read, launch.declared.bytes_written)
    with harness.program_order("reversed"):
        again, grad_again = run()
    assert torch.equal(grad, grad_again)
    for field in ("weights_TK", "share_sums_BE", "z_sums_B"):
        assert torch.equal(getattr(gating, field), getattr(again, field))


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 4, 2), (1, 1, 1), (7, 5, 5), (63, 100, 3)])
def test_selections_equal_their_twins(tokens, experts, top_k):
    scores = torch.randint(0, 4, (tokens, experts)).float()
    found = triton_kernels.top_k_ids(scores, top_k)
    assert torch.equal(found, reference.top_k_ids(scores, top_k))
    assert found.dtype == torch.int64
    ids = found.masked_fill(torch.rand(tokens, top_k) < 0.3, -1)
    priorities = torch.randint(0, 3, ids.shape)
    places = triton_kernels.ranks_within_expert(ids, priorities, experts)
    kept = ids >= 0  # places of the others mean nothing
    assert torch.equal(places[kept], reference.ranks_within_expert(ids, priorities, experts)[kept])
    assert places.dtype == torch.int64


@pytest.mark.parametrize(("groups", "limited", "counted"), [(1, 1, 2), (4, 2, 2), (6, 3, 1), (12, 5, 2)])
def test_best_groups_equal_their_twin(groups, limited, counted):
    scores = torch.randint(0, 4, (17, 12)).float()
    options = {"num_groups": groups, "num_limited": limited, "num_counted": counted}
    expected = reference.experts_of_best_groups(scores, **options)
    assert torch.equal(triton_kernels.experts_of_best_groups(scores, **options), expected)


@pytest.mark.parametrize("kernels", [reference, triton_kernels], ids=["twin", "kernel"])
@pytest.mark.parametrize(
    ("rule", "more", "words"),
    [
        ({"top_k": 9}, {}, r"top_k \(9\) must be in 1\.\.8"),
        ({"top_k": 2, "num_groups": 3}, {}, r"num_groups \(3\) does not divide .* \(8\)"),
        ({"top_k": 3, "num_groups": 4}, {}, r"num_limited \(1\) groups hold 2 experts, top_k is 3"),
        ({"top_k": 2}, {"bias_E": torch.zeros(7)}, r"shape \(7,\), but there are 8 experts"),
        ({"top_k": 2}, {"used_T": torch.ones(5, dtype=torch.bool)}, r"shape \(5,\), but there are 6 tokens"),
        ({"top_k": 2}, {"ids_TK": torch.zeros(6, 3, dtype=torch.int32)}, r"\(6, 3\), expected \(6, 2\)"),
        ({"top_k": 2}, {"num_parts": 4}, "6 tokens do not lie in 4 equal parts"),
    ],
)
def test_wrong_shapes_name_both_numbers(kernels, rule, more, words):
    with pytest.raises(ValueError, match=words):
        kernels.gate_forward(torch.randn(6, 8), GateRule(**rule), **more)


@pytest.mark.parametrize("kernels", [reference, triton_kernels], ids=["twin", "kernel"])
@pytest.mark.parametrize("top_k", [0, 9])
def test_as_many_experts_cannot_be_selected(kernels, top_k):
    message = rf"top_k \({top_k}\) must be in 1\.\.8, the number of experts"
    with pytest.raises(ValueError, match=message):
        kernels.top_k_ids(torch.randn(6, 8), top_k)
    with pytest.raises(ValueError, match=message):
        kernels.experts_of_best_groups(torch.randn(6, 16), num_groups=8, num_limited=top_k, num_counted=1)


@pytest.mark.parametrize("kernels", [reference, triton_kernels], ids=["twin", "kernel"])
def test_backward_checks_what_forward_checks(kernels):
    grads = {"grad_weights_TK": torch.randn(6, 2), "grad_share_sums_BE": torch.randn(1, 8)}
    with pytest.raises(ValueError, match=r"ids have shape \(6, 3\), expected \(6, 2\)"):
        kernels.gate_backward(
            torch.randn(6, 8),
            torch.zeros(6, 3, dtype=torch.int32),
            GateRule(top_k=2),
            grad_z_sums_B=torch.randn(1),
            **grads,
        )


def test_the_kernels_take_float32():
    with pytest.raises(ValueError, match=r"torch\.float64.*torch\.float32"):
        triton_kernels.gate_forward(torch.randn(6, 8).double(), GateRule(top_k=2))
