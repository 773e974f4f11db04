"""The router: selection, weights, losses, capacity, masks, the balancing bias, and DeepSpeed's gates by value."""

import math
from types import SimpleNamespace

import pytest
import torch
from deepspeed.moe import sharded_moe as native
from hypothesis import given, settings
from hypothesis import strategies as st

from xmoe.router import RouterSettings, TopKRouter
from xmoe.testing import assert_close

NO_NOISE = {"drop_tokens": False, "sample_second_expert": False}


def make_router(hidden=16, experts=8, *, bias=False, dtype=torch.float32, **options):
    router = TopKRouter(hidden, experts, settings=RouterSettings(**options), correction_bias=bias)
    return router.to(dtype)


def oracle_ids(logits, top_k):
    return logits.double().sort(dim=1, descending=True, stable=True).indices[:, :top_k].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_8k_tokens_select_what_float64_selects(dtype, score_function):
    # Public threads: megablocks#91, torchtitan#4273. A bfloat16 router flips about one token in twenty.
    router = make_router(64, 64, top_k=6, score_function=score_function, dtype=dtype, **NO_NOISE)
    x = torch.randn(8192, 64).to(dtype)
    routing = router(x)
    exact = x.double() @ router.wg.weight.double().t()
    assert routing.topk_ids_TK.tolist() == oracle_ids(exact, 6)
    assert routing.topk_weights_TK.dtype == torch.float32
    assert routing.aux_loss.dtype == torch.float32


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_saturated_scores_still_follow_their_logits(score_function):
    router = make_router(4, 4, top_k=2, score_function=score_function, **NO_NOISE)
    router.wg.weight.data = torch.diag(torch.tensor([-150.0, -140.0, 40.0, 60.0]))
    assert router(torch.ones(1, 4)).topk_ids_TK.tolist() == [[3, 2]]
    router.wg.weight.data = torch.diag(torch.tensor([-150.0, -140.0, -130.0, 90.0]))
    assert router(torch.ones(1, 4)).topk_ids_TK.tolist() == [[3, 2]]


@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False, None])
def test_weights_and_their_gradient_equal_float64(k, score_function, normalize):
    router = make_router(
        top_k=k,
        score_function=score_function,
        normalize_weights=normalize,
        routed_scaling_factor=2.5,
        dtype=torch.float64,
        **NO_NOISE,
    )
    x = torch.randn(21, 16, dtype=torch.float64, requires_grad=True)
    routing = router(x)
    weight = router.wg.weight.detach().clone().requires_grad_()
    x2 = x.detach().clone().requires_grad_()
    logits = x2 @ weight.t()
    scores = logits.softmax(1) if score_function == "softmax" else logits.sigmoid()
    raw = scores.gather(1, torch.tensor(oracle_ids(logits, k)))
    divide = k > 1 if normalize is None else normalize
    expected = 2.5 * (raw / raw.sum(1, keepdim=True) if divide else raw)
    assert_close(routing.topk_weights_TK, expected)
    upstream = torch.randn_like(expected)
    (routing.topk_weights_TK * upstream).sum().backward()
    (expected * upstream).sum().backward()
    if divide and k == 1:  # the weight is the constant 2.5
        assert float(x.grad.abs().max()) < 1e-12
    else:
        assert_close(x.grad, x2.grad)
        assert_close(router.wg.weight.grad, weight.grad)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_aux_loss_has_deepspeeds_value(k):
    # Public thread: DeepSpeed PR 5156.
    router = make_router(top_k=k, dtype=torch.float64, **NO_NOISE)
    x = torch.randn(40, 16, dtype=torch.float64, requires_grad=True)
    gates = (x @ router.wg.weight.t()).softmax(1)
    ids = torch.tensor(oracle_ids(gates, k))
    chosen = torch.zeros(40, 8, dtype=torch.float64).scatter_(1, ids[:, :1] if k == 2 else ids, 1.0)
    me, ce = gates.mean(0), chosen.mean(0)
    expected = {1: (me * ce).sum() * 8, 2: (me * ce).mean() * 64}.get(k, (me * ce).mean() * 64 / k)
    found = router(x).aux_loss
    assert found.shape == ()
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found, x)[0], torch.autograd.grad(expected, x)[0])


def test_aux_and_z_loss_have_coefficients():
    router = make_router(top_k=2, aux_loss_coefficient=0.0, z_loss_coefficient=0.25, dtype=torch.float64, **NO_NOISE)
    x = torch.randn(40, 16, dtype=torch.float64)
    expected = 0.25 * (x @ router.wg.weight.t()).logsumexp(1).square().mean()
    assert_close(router(x).aux_loss, expected)
    used = torch.arange(40) % 3 > 0
    expected = 0.25 * (x[used] @ router.wg.weight.t()).logsumexp(1).square().mean()
    assert_close(router(x, used).aux_loss, expected)


def test_losses_are_float32_under_autocast():
    router = make_router(top_k=3, z_loss_coefficient=0.1, **NO_NOISE)
    x = torch.randn(50, 16)
    plain = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = router(x)
    assert torch.equal(plain.aux_loss, cast.aux_loss)
    assert torch.equal(plain.topk_weights_TK, cast.topk_weights_TK)


@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize("drop", [False, True])
def test_padding_mask_for_every_k(k, drop):
    # Public thread: torchtitan PR 4168 (DeepSpeed's gates honour used_token at k = 1 only).
    router = make_router(top_k=k, drop_tokens=drop, capacity_factor=0.5, min_capacity=1, z_loss_coefficient=0.1)
    x = torch.randn(24, 16, requires_grad=True)
    used = torch.arange(24) % 4 != 1
    torch.manual_seed(0)
    routing = router(x, used)
    assert routing.selected_per_expert_E.sum() == k * int(used.sum())
    assert bool((routing.topk_ids_TK[~used] == -1).all())
    assert bool((routing.topk_weights_TK[~used] == 0).all())
    (routing.topk_weights_TK.sum() + routing.aux_loss).backward()
    assert bool((x.grad[~used] == 0).all())
    for other in (used.float(), used.view(4, 6), used.int()):
        torch.manual_seed(0)
        assert torch.equal(router(x, other).topk_ids_TK, routing.topk_ids_TK)


@pytest.mark.parametrize("entries", [1, 5, 7])
def test_a_mask_of_another_size_is_refused(entries):
    with pytest.raises(ValueError, match=f"used_token has {entries} entries for 6 tokens"):
        make_router(top_k=2)(torch.randn(6, 16), torch.ones(entries))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_masked_tokens_do_not_weigh_on_the_loss(k):
    router = make_router(top_k=k, z_loss_coefficient=0.3, dtype=torch.float64, **NO_NOISE)
    x = torch.randn(30, 16, dtype=torch.float64)
    used = torch.rand(30) > 0.4
    assert_close(router(x, used).aux_loss, router(x[used]).aux_loss)


@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_no_tokens_give_a_finite_connected_zero(k, masked):
    # Own finding about DeepSpeed's gates: the mean of no rows is NaN and poisons the total loss.
    router = make_router(top_k=k, z_loss_coefficient=0.1, score_function="sigmoid")
    x = torch.randn(5 if masked else 0, 16, requires_grad=True)
    routing = router(x, torch.zeros(5)) if masked else router(x)
    assert routing.aux_loss.detach() == 0
    routing.aux_loss.backward()
    assert bool((router.wg.weight.grad == 0).all())
    assert bool((x.grad == 0).all())
    assert routing.tokens_per_expert_E.tolist() == [0] * 8


@pytest.mark.parametrize("policy", ["probs", "position", "random"])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("training", [True, False])
def test_capacity_drops_by_policy(policy, k, training):
    router = make_router(top_k=k, capacity_factor=0.5, eval_capacity_factor=0.25, min_capacity=1, drop_policy=policy)
    router.train(training)
    x = torch.randn(64, 16)
    routing = router(x)
    capacity = math.ceil(64 / 8 * k * (0.5 if training else 0.25))
    ids, full = routing.topk_ids_TK, routing.selected_per_expert_E
    assert torch.equal(routing.tokens_per_expert_E, full.clamp(max=capacity))
    assert [int((ids == e).sum()) for e in range(8)] == routing.tokens_per_expert_E.tolist()
    again = router(x).topk_ids_TK
    noisy = training and (policy == "random" or k == 2)
    assert torch.equal(ids, again) != noisy
    if noisy:
        return
    whole = make_router(top_k=k, **NO_NOISE)
    whole.wg = router.wg
    wanted = whole(x).topk_ids_TK
    scores = (x @ router.wg.weight.t()).softmax(1)
    for expert in range(8):
        asking = (wanted == expert).nonzero().tolist()
        if policy == "probs":
            asking.sort(key=lambda slot: -float(scores.detach()[slot[0], expert]))
        elif k == 2:
            asking.sort(key=lambda slot: slot[1])  # every first choice before any second
        assert sorted(asking[:capacity]) == (ids == expert).nonzero().tolist()


def test_random_drop_at_two_experts_with_a_sampled_second_is_random():
    # First choices all go to one expert: by position its first tokens would always win.
    router = make_router(2, 4, top_k=2, drop_policy="random", capacity_factor=0.25, min_capacity=0)
    router.wg.weight.data = torch.tensor([[9.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    x = torch.ones(64, 2)
    kept = torch.cat([(router(x).topk_ids_TK == 0).any(1).nonzero().flatten() for _ in range(4)])
    assert int(kept.max()) > 16


def test_few_tokens_are_below_min_capacity_and_none_is_dropped():
    # DeepSpeed's top-1 gate asserts here, its last batch of an evaluation often does.
    for k in (1, 2, 3):
        for num_tokens in (1, 2, 3):
            routing = make_router(top_k=k, min_capacity=4, capacity_factor=4.0)(torch.randn(num_tokens, 16))
            assert int(routing.tokens_per_expert_E.sum()) == num_tokens * k


def test_force_balance_gives_every_expert_the_same():
    router = make_router(top_k=3, force_balance=True, drop_tokens=False)
    routing = router(torch.randn(16, 16))
    assert routing.selected_per_expert_E.tolist() == [6] * 8
    assert_close(routing.topk_weights_TK.sum(1), torch.ones(16))


def test_input_jitter_stays_in_its_bounds_and_out_of_evaluation():
    router = make_router(top_k=2, input_jitter=0.1, normalize_weights=False, **NO_NOISE)
    x = torch.ones(2000, 16).bfloat16()
    router.wg.weight.data = torch.eye(8, 16)
    assert torch.equal(router.eval()(x).topk_weights_TK, torch.full((2000, 2), 1 / 8))
    noisy = router.train()(x).topk_weights_TK
    assert 1 / 8 < float(noisy.detach().max()) <= math.exp(0.2) / (math.exp(0.2) + 7)


def test_evaluation_is_deterministic():
    # Public thread: DeepSpeed PR 8620 (the second expert is sampled in evaluation too).
    for k in (1, 2, 4):
        router = make_router(top_k=k, capacity_factor=0.5, min_capacity=1, noisy_logits=True, input_jitter=0.1).eval()
        x = torch.randn(40, 16)
        state = torch.get_rng_state()
        first = router(x)
        assert all(torch.equal(router(x).topk_ids_TK, first.topk_ids_TK) for _ in range(3))
        assert torch.equal(state, torch.get_rng_state())


# The balancing bias


def test_bias_selects_and_does_not_weigh():
    router = make_router(top_k=2, bias=True, dtype=torch.float64, score_function="sigmoid", **NO_NOISE)
    x = torch.randn(12, 16, dtype=torch.float64)
    router.correction_bias[5] = 10.0
    routing = router(x)
    assert bool((routing.topk_ids_TK[:, 0] == 5).all())
    scores = (x @ router.wg.weight.t()).sigmoid()
    raw = scores.gather(1, routing.topk_ids_TK.long())
    assert_close(routing.topk_weights_TK, raw / raw.sum(1, keepdim=True))
    assert routing.topk_weights_TK.requires_grad
    assert not router.correction_bias.requires_grad


def test_bias_update_follows_the_load_and_stays_centred():
    # Public threads: torchtitan#1506 and PR 3686.
    router = make_router(experts=4, top_k=1, bias=True, correction_bias_update_rate=0.5)
    router.update_correction_bias(torch.tensor([8, 0, 4, 4]))
    assert router.correction_bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    router.update_correction_bias(torch.tensor([9, 1, 1, 1]))
    assert router.correction_bias.tolist() == [-1.25, 0.75, 0.25, 0.25]  # -1 + 3 steps, then centred
    for _ in range(200):
        router.update_correction_bias(torch.randint(0, 100, (4,)))
    assert abs(float(router.correction_bias.mean())) < 1e-6


def test_bias_stays_float32_through_casts_moves_and_checkpoints():
    router = make_router(top_k=2, bias=True)
    router.correction_bias += torch.arange(8) * 1e-3
    wanted = router.correction_bias.clone()
    model = torch.nn.Sequential(router).bfloat16()
    assert router.wg.weight.dtype == torch.bfloat16
    assert torch.equal(router.correction_bias, wanted)
    other = torch.nn.Sequential(make_router(top_k=2, bias=True)).half()
    other.load_state_dict(model.state_dict())
    assert other[0].correction_bias.dtype == torch.float32
    assert torch.equal(other[0].correction_bias, wanted)
    assert set(model.state_dict()) == {"0.wg.weight", "0.correction_bias"}
    with torch.device("meta"):
        meta = make_router(top_k=2, bias=True)
    assert meta.bfloat16().to_empty(device="cpu").correction_bias.dtype == torch.float32


def test_wrong_settings_name_both_numbers():
    for options, message in [
        ({"top_k": 9}, r"k \(9\).*num_experts \(8\)"),
        ({"top_k": 0}, r"k \(0\)"),
        ({"top_k": 1, "capacity_factor": 0.0}, r"capacity_factor \(0.0\)"),
        ({"top_k": 1, "min_capacity": -1}, r"min_capacity \(-1\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_router(**options)


# DeepSpeed's own gates, with the same random draws


def dense_of(routing, num_experts):
    """[T, E] weights and counts as DeepSpeed's dense gates mean them."""
    weights = routing.topk_weights_TK.new_zeros(len(routing.topk_ids_TK), num_experts + 1)
    index = torch.where(routing.topk_ids_TK < 0, num_experts, routing.topk_ids_TK).long()
    return weights.scatter_add(1, index, routing.topk_weights_TK)[:, :num_experts]


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize(
    ("k", "noise"),
    [
        (1, {"random_token_selection": True}),
        (1, {"random_token_selection": False}),
        (1, {"random_token_selection": True, "noisy_logits": True}),
        (1, {"random_token_selection": True, "input_jitter": 1e-2}),
        (2, {}),
        (2, {"input_jitter": 1e-2}),
        (2, {"sample_second_expert": False}),
        (3, {}),
        (5, {"input_jitter": 1e-2}),
    ],
)
@pytest.mark.parametrize(("training", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
def test_strict_compat_equals_deepspeed(k, noise, drop, training, dtype):
    router = make_router(
        top_k=k,
        drop_tokens=drop,
        capacity_factor=0.6,
        eval_capacity_factor=0.4,
        min_capacity=2,
        strict_compat=True,
        dtype=dtype,
        **noise,
    ).train(training)
    policy = "RSample" if noise.get("noisy_logits") else "Jitter" if noise.get("input_jitter") else None
    sampling = noise.get("sample_second_expert", True)
    gate = native.TopKGate(
        16, 8, k, 0.6, 0.4, 2, policy, drop, noise.get("random_token_selection", True), None, sampling
    )
    gate.wg = router.wg
    gate.train(training)
    for _ in range(2):
        x = torch.randn(48, 16).to(dtype).requires_grad_()
        x2 = x.detach().clone().requires_grad_()
        state = torch.get_rng_state()
        l_aux, combine, _, counts = gate(x2)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        routing = router(x)
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(routing.selected_per_expert_E, counts)
        assert_close(dense_of(routing, 8), combine.sum(2))
        assert_close(routing.aux_loss, l_aux)
        upstream = torch.randn(48, 8)
        ours = torch.autograd.grad((dense_of(routing, 8) * upstream).sum() + routing.aux_loss, [x, router.wg.weight])
        theirs = torch.autograd.grad((combine.sum(2) * upstream).sum() + l_aux, [x2, gate.wg.weight])
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b)


def test_strict_compat_masks_as_deepspeed_does():
    x, used = torch.randn(24, 16), (torch.arange(24) % 3 > 0).long()
    for k in (1, 2, 4):
        router = make_router(top_k=k, drop_tokens=False, strict_compat=True)
        gate = native.TopKGate(16, 8, k, drop_tokens=False)
        gate.wg = router.wg
        state = torch.get_rng_state()
        l_aux, _, _, counts = gate(x, used)
        torch.set_rng_state(state)
        routing = router(x, used)
        assert routing.selected_per_expert_E.tolist() == counts.long().tolist()
        assert_close(routing.aux_loss, l_aux)


# Whatever the input


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_properties_of_any_routing(data):
    case = SimpleNamespace(
        experts=data.draw(st.integers(1, 12)),
        tokens=data.draw(st.integers(0, 40)),
        scale=data.draw(st.sampled_from([0.0, 1.0, 1e3])),
        seed=data.draw(st.integers(0, 2**16)),
    )
    k = data.draw(st.integers(1, case.experts))
    options = {
        "drop_policy": data.draw(st.sampled_from([None, "probs", "position", "random"])),
        "drop_tokens": data.draw(st.booleans()),
        "capacity_factor": data.draw(st.sampled_from([0.1, 1.0, 1.3])),
        "min_capacity": data.draw(st.integers(0, 4)),
        "score_function": data.draw(st.sampled_from(["softmax", "sigmoid"])),
        "noisy_logits": data.draw(st.booleans()),
        "force_balance": data.draw(st.booleans()),
        "routed_scaling_factor": 3.0,
        "normalize_weights": True,
    }
    torch.manual_seed(case.seed)
    router = make_router(8, case.experts, top_k=k, bias=data.draw(st.booleans()), **options)
    x = (torch.randn(case.tokens, 8) * case.scale).requires_grad_()
    routing = router(x)
    ids = routing.topk_ids_TK
    assert all(len({i for i in row if i >= 0}) == sum(i >= 0 for i in row) for row in ids.tolist())
    assert int(ids.max() if ids.numel() else 0) < case.experts
    assert int(routing.selected_per_expert_E.sum()) == case.tokens * k
    assert [int((ids == e).sum()) for e in range(case.experts)] == routing.tokens_per_expert_E.tolist()
    if options["drop_tokens"] and case.tokens:
        capacity = router.settings.capacity(case.tokens, case.experts, training=True)
        assert int(routing.tokens_per_expert_E.max()) <= capacity
    else:
        assert bool((ids >= 0).all())
    # Weights sum to the scale where the best scores were chosen; chance and force may choose scores of nearly zero.
    best = options["score_function"] == "softmax" and not options["force_balance"] and not options["noisy_logits"]
    for row, total in zip(ids.tolist(), routing.topk_weights_TK.sum(1).tolist(), strict=True):
        assert total <= 3.0 * (1 + 1e-5)
        if best and min(row) >= 0:
            assert total == pytest.approx(3.0, rel=1e-5)
    (routing.topk_weights_TK.sum() + routing.aux_loss).backward()
    assert bool(torch.isfinite(x.grad).all())
    assert bool(torch.isfinite(routing.aux_loss))
