"""Group-limited selection and the scopes of the load-balancing loss, against float64 loops written here."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xmoe.config import ConfigError
from xmoe.experts import Experts
from xmoe.kernels import reference
from xmoe.layer import RoutedMLP
from xmoe.router import RouterSettings, TopKRouter
from xmoe.testing import assert_close

D, E = 16, 16
NO_NOISE = {"drop_tokens": False, "sample_second_expert": False}


def make_router(*, bias=False, dtype=torch.float32, experts=E, **options):
    return TopKRouter(D, experts, settings=RouterSettings(**options), correction_bias=bias).to(dtype)


def best(values, number, among):
    """The ids among ``among`` of the ``number`` largest values, largest first; of equal values the lowest id."""
    return sorted(among, key=lambda index: (-values[index], index))[:number]


def oracle_ids(logits, *, k, score_function, bias=None, groups=None, limited=None, counted=2):
    """Ids by loops over tokens, from float64 logits; without groups the plain top-k."""
    scores = logits.softmax(1) if score_function == "softmax" else logits.sigmoid()
    scores = (scores if bias is None else scores + bias).tolist()
    result = []
    for row in scores:
        allowed = range(len(row))
        if groups is not None:
            size = len(row) // groups
            sums = [sum(sorted(row[g * size : (g + 1) * size], reverse=True)[:counted]) for g in range(groups)]
            allowed = [i for g in best(sums, limited, range(groups)) for i in range(g * size, (g + 1) * size)]
        result.append(best(row, k, allowed))
    return result


@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("k", "groups", "limited"), [(4, 4, 2), (1, 8, 1), (8, 4, 2), (6, 16, 7), (3, 1, 1), (2, 4, 3)]
)
def test_groups_select_what_the_loops_select(group_score, score_function, bias, k, groups, limited):
    router = make_router(
        bias=bias,
        top_k=k,
        score_function=score_function,
        num_expert_groups=groups,
        num_limited_groups=limited,
        group_score=group_score,
        **NO_NOISE,
    )
    if bias:
        router.correction_bias.normal_(std=0.3)
    x = torch.randn(200, D)
    used = torch.rand(200) > 0.2
    logits = x.double() @ router.wg.weight.detach().double().t()
    expected = torch.tensor(
        oracle_ids(
            logits,
            k=k,
            score_function=score_function,
            bias=router.correction_bias.double() if bias else None,
            groups=groups,
            limited=limited,
            counted=2 if group_score == "top2_sum" else 1,
        )
    )
    routing = router(x, used)
    assert torch.equal(routing.topk_ids_TK.long(), expected.masked_fill(~used[:, None], -1))
    assert max(len(set(row)) for row in (expected // (E // groups)).tolist()) <= limited
    scores = logits.softmax(1) if score_function == "softmax" else logits.sigmoid()
    weights = scores.gather(1, expected) * used[:, None]
    if k > 1:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-30)
    assert_close(routing.topk_weights_TK, weights)


def test_groups_change_what_is_selected_and_one_group_does_not():
    x = torch.randn(100, D)
    free = make_router(top_k=4, **NO_NOISE)
    one, four = (make_router(top_k=4, num_expert_groups=groups, num_limited_groups=1, **NO_NOISE) for groups in (1, 4))
    one.wg = four.wg = free.wg
    assert torch.equal(one(x).topk_ids_TK, free(x).topk_ids_TK)
    assert not torch.equal(four(x).topk_ids_TK, free(x).topk_ids_TK)


def test_the_group_score_decides():
    # The first group has the best expert, the second the best pair: .40 + .01 against .28 + .27.
    logits = torch.tensor([0.40, 0.01, 0.01, 0.01, 0.28, 0.27, 0.01, 0.01]).log()
    for group_score, ids in (("max", [0, 1]), ("top2_sum", [4, 5])):
        router = make_router(
            top_k=2, experts=8, num_expert_groups=2, num_limited_groups=1, group_score=group_score, **NO_NOISE
        )
        router.wg.weight.data = logits[:, None] * torch.eye(D)[:1]
        assert router(torch.eye(D)[:1]).topk_ids_TK.tolist() == [ids]


@pytest.mark.parametrize("bias", [False, True])
def test_ties_go_to_the_lowest_group_and_expert(bias):
    router = make_router(bias=bias, top_k=3, num_expert_groups=4, num_limited_groups=2, **NO_NOISE)
    router.wg.weight.data.zero_()
    assert router(torch.randn(5, D)).topk_ids_TK.tolist() == [[0, 1, 2]] * 5


@given(
    rows=st.lists(st.lists(st.integers(-2, 2), min_size=12, max_size=12), max_size=4),
    shape=st.sampled_from([(1, 1), (2, 1), (3, 2), (4, 3), (6, 6), (12, 5)]),
    counted=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_the_twin_equals_a_loop(rows, shape, counted):
    groups, limited = shape
    size = 12 // groups
    found = reference.experts_of_best_groups(
        torch.tensor(rows, dtype=torch.float32).view(-1, 12),
        num_groups=groups,
        num_limited=limited,
        num_counted=counted,
    )
    for row, allowed in zip(rows, found.tolist(), strict=True):
        sums = [sum(sorted(row[g * size : (g + 1) * size], reverse=True)[:counted]) for g in range(groups)]
        chosen = best(sums, limited, range(groups))
        assert allowed == [index // size in chosen for index in range(12)]


def test_capacity_drops_the_lowest_scores_of_the_limited_selection():
    options = {"top_k": 4, "num_expert_groups": 4, "num_limited_groups": 2, "drop_policy": "probs"}
    router = make_router(capacity_factor=0.5, min_capacity=1, **options)
    x = torch.randn(64, D)
    routing = router(x)
    logits = x.double() @ router.wg.weight.detach().double().t()
    wanted = oracle_ids(logits, k=4, score_function="softmax", groups=4, limited=2)
    scores, capacity = logits.softmax(1).tolist(), math.ceil(64 / E * 4 * 0.5)
    for expert in range(E):
        asking = [token for token in range(64) if expert in wanted[token]]
        kept = sorted(sorted(asking, key=lambda token: -scores[token][expert])[:capacity])
        assert kept == (routing.topk_ids_TK == expert).any(1).nonzero().flatten().tolist()
        assert routing.selected_per_expert_E[expert] == len(asking)


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_k": 1, "noisy_logits": True}])
def test_noise_draws_within_the_limited_groups(options):
    router = make_router(num_expert_groups=4, num_limited_groups=1, drop_tokens=False, **options)
    x = torch.randn(1, D).repeat(300, 1)
    ids = router(x).topk_ids_TK
    assert len(ids.unique()) > options["top_k"], "nothing was drawn"
    assert len((ids // 4).unique()) == 1


@pytest.mark.parametrize(
    ("options", "path", "words"),
    [
        ({"num_expert_groups": 3, "num_limited_groups": 1}, "num_expert_groups", r"divide num_experts \(16\)"),
        ({"num_expert_groups": 4, "num_limited_groups": 5}, "num_limited_groups", r"at most num_expert_groups \(4\)"),
        ({"num_expert_groups": 8, "num_limited_groups": 1}, "num_limited_groups", r"k \(3\).* 1 of 8 groups hold 2"),
        ({"num_expert_groups": 4}, "num_expert_groups", "needs num_limited_groups"),
        ({"num_limited_groups": 4}, "num_limited_groups", "needs num_expert_groups"),
        ({"group_score": "max"}, "group_score", "needs num_expert_groups"),
        (
            {"num_expert_groups": 4, "num_limited_groups": 2, "strict_compat": True},
            "num_expert_groups",
            "strict_compat",
        ),
        ({"aux_loss_scope": "sequence", "strict_compat": True}, "aux_loss_scope", "strict_compat"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, path, words):
    with pytest.raises(ConfigError, match=rf"^xmoe\.{path} is .*{words}"):
        make_router(top_k=3, **options)
    router = make_router(top_k=3)
    with pytest.raises(ConfigError, match=words):
        router.configure(RouterSettings(top_k=3, **options))


def oracle_sequence_loss(logits_BSE, counted_BS, *, k, score_function):
    """DeepSeek-V3, eqs. 17-20, a scalar at a time; the mean over sequences. Differentiable in the logits."""
    total = torch.zeros((), dtype=torch.float64)
    for logits, counted in zip(logits_BSE, counted_BS.tolist(), strict=True):
        tokens = [t for t, counts in enumerate(counted) if counts]
        if not tokens:
            continue
        scores = logits.softmax(1) if score_function == "softmax" else logits.sigmoid()
        ids = oracle_ids(logits.detach(), k=k, score_function=score_function)
        for expert in range(logits.shape[1]):
            f = logits.shape[1] / (k * len(tokens)) * sum(expert in ids[t] for t in tokens)
            p = sum(scores[t, expert] / scores[t].sum() for t in tokens) / len(tokens)
            total = total + f * p
    return total / len(logits_BSE)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("extra", [{}, {"num_expert_groups": 4, "num_limited_groups": 2}], ids=["free", "grouped"])
@pytest.mark.parametrize("bias", [False, True])
def test_sequence_loss_and_its_gradient_equal_the_loops(score_function, k, extra, bias):
    router = make_router(
        bias=bias,
        dtype=torch.float64,
        top_k=k,
        score_function=score_function,
        aux_loss_scope="sequence",
        aux_loss_coefficient=0.7,
        **extra,
        **NO_NOISE,
    )
    if bias:
        router.correction_bias.normal_()
    x = torch.randn(3, 7, D, dtype=torch.float64)
    used = torch.rand(3, 7) > 0.3
    used[1] = False  # a sequence of padding counts as 0, so that splits of the batch have one mean
    weight = router.wg.weight.detach().clone().requires_grad_()
    expected = 0.7 * oracle_sequence_loss(x @ weight.t(), used, k=k, score_function=score_function)
    found = router(x.view(21, D), used, num_sequences=3).aux_loss
    assert found.shape == ()
    assert_close(found, expected)
    found.backward()
    expected.backward()
    assert_close(router.wg.weight.grad, weight.grad)


def make_layer(**options):
    router = make_router(dtype=torch.float64, top_k=3, **NO_NOISE, **options)
    return RoutedMLP(router, Experts(torch.nn.Linear(D, D), E)).double()


def test_the_layer_takes_sequences_from_the_shape():
    layer = make_layer(aux_loss_scope="sequence")
    x = torch.randn(2, 2, 5, D, dtype=torch.float64)
    each = [layer(sequence)[1] for sequence in x.view(4, 5, D)]  # [S, D] is one sequence
    assert_close(layer(x)[1], sum(each) / 4)
    assert_close(layer(x.view(4, 5, D))[1], sum(each) / 4)
    assert float(layer(x.view(20, D))[1].detach()) != pytest.approx(float(sum(each).detach()) / 4)
    assert_close(layer(x[0, 0, 0])[1], layer(x[0, 0, :1])[1])


@pytest.mark.parametrize("scope", ["micro_batch", "sequence", "global_batch"])
@pytest.mark.parametrize("shape", [(0, D), (0, 5, D), (3, 0, D)])
def test_no_tokens_give_a_connected_zero(scope, shape):
    layer = make_layer(aux_loss_scope=scope, z_loss_coefficient=0.1)
    output, loss, _ = layer(torch.randn(shape, dtype=torch.float64))
    assert output.shape == shape
    assert float(loss.detach()) == 0.0
    loss.backward()
    assert torch.equal(layer.gate.wg.weight.grad, torch.zeros_like(layer.gate.wg.weight))


def oracle_step_loss(weight, x, counted, *, k):
    """By loops: the loads are those of the tokens ``counted`` (the last step's), the shares those of ``x``."""
    counts = [0] * E
    for row in oracle_ids((counted @ weight.t()).detach(), k=k, score_function="softmax"):
        for expert in row:
            counts[expert] += 1
    shares = (x @ weight.t()).softmax(1)
    return sum(E / k * counts[e] / len(counted) * shares[:, e].sum() / len(x) for e in range(E))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_global_batch_is_balanced_by_the_loads_of_the_last_step(k):
    router = make_router(dtype=torch.float64, top_k=k, aux_loss_scope="global_batch", **NO_NOISE)
    router.steps_end = True
    last = None
    for _ in range(3):  # steps
        weight = router.wg.weight.detach().clone().requires_grad_()
        parts = [torch.randn(size, D, dtype=torch.float64) for size in (5, 11, 1)]
        routed = [router(x) for x in parts]
        gradient = torch.autograd.grad(sum(r.aux_loss for r in routed), router.wg.weight)[0]
        if last is None:
            assert all(r.aux_loss.item() == pytest.approx(1.0) for r in routed), "even loads: 1, whatever the shares"
            assert float(gradient.abs().max()) < 1e-14
        else:
            expected = [oracle_step_loss(weight, x, last, k=k) for x in parts]
            for found, wanted in zip(routed, expected, strict=True):
                assert_close(found.aux_loss, wanted)
            assert_close(gradient, torch.autograd.grad(sum(expected), weight)[0])
        router.end_step(sum(r.selected_per_expert_E for r in routed))
        last = torch.cat(parts)


def test_masked_tokens_are_in_no_load_and_no_share():
    router = make_router(dtype=torch.float64, top_k=3, aux_loss_scope="global_batch", **NO_NOISE)
    router.steps_end = True
    x, used = torch.randn(9, D, dtype=torch.float64), torch.arange(9) % 3 > 0
    router.end_step(router(x, used).selected_per_expert_E)
    assert_close(router(x, used).aux_loss, oracle_step_loss(router.wg.weight, x[used], x[used], k=3))


def test_without_an_engine_every_forward_stands_alone():
    router = make_router(dtype=torch.float64, top_k=3, aux_loss_scope="global_batch", **NO_NOISE)
    plain = make_router(dtype=torch.float64, top_k=3, **NO_NOISE)
    plain.wg = router.wg
    for _ in range(2):
        x = torch.randn(9, D, dtype=torch.float64)
        assert_close(router(x).aux_loss, plain(x).aux_loss)


def test_the_loads_are_saved_and_checkpoints_without_them_load():
    router = make_router(top_k=3, aux_loss_scope="global_batch", **NO_NOISE)
    plain = make_router(top_k=3, **NO_NOISE)
    counts = torch.arange(E)
    router.end_step(counts)
    other = copy.deepcopy(router)
    other.end_step(torch.zeros(E, dtype=torch.int64))
    other.load_state_dict(router.state_dict())
    assert torch.equal(other.last_step_counts, counts)
    assert "last_step_counts" not in plain.state_dict()
    plain.load_state_dict(router.state_dict())
    other.load_state_dict(plain.state_dict())
    assert not other.last_step_counts.any(), "loads of another run were kept"
