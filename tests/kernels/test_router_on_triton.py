"""The router on the Triton kernels, in the interpreter, against the router on the twins with the same random draws."""

import pytest
import torch

from xmoe.kernels import reference
from xmoe.kernels.launch import counting
from xmoe.ops._backend import use_kernels
from xmoe.replay import Decisions
from xmoe.router import RouterSettings, TopKRouter
from xmoe.testing import assert_close

D, E, T = 16, 12, 18
TWINS = ["count_ids", "experts_of_best_groups", "gate_backward", "gate_forward", "ranks_within_expert", "top_k_ids"]
GROUPS = {"num_expert_groups": 4, "num_limited_groups": 2}
CASES = {
    "plain": {"top_k": 3},
    "all experts": {"top_k": E, "z_loss_coefficient": 0.1},
    "one expert with noise": {"top_k": 1, "noisy_logits": True, "normalize_weights": True},
    "sampled second expert": {"top_k": 2},
    "sampled in groups": {"top_k": 2, **GROUPS},
    "sampled in groups by the best": {"top_k": 2, "group_score": "max", **GROUPS},
    "sigmoid, groups and bias": {"top_k": 4, "score_function": "sigmoid", "routed_scaling_factor": 2.5, **GROUPS},
    "loss per sequence": {"top_k": 3, "aux_loss_scope": "sequence", **GROUPS},
    "loss over the global batch": {"top_k": 3, "aux_loss_scope": "global_batch"},
    "forced": {"top_k": 5, "force_balance": True},
    "jitter": {"top_k": 3, "input_jitter": 0.1},
    "strict, one expert": {"top_k": 1, "strict_compat": True},
    "strict, two experts": {"top_k": 2, "strict_compat": True},
    "strict, three experts": {"top_k": 3, "strict_compat": True},
    "dropped at random": {"top_k": 3, "drop_policy": "random"},
    "dropped by position": {"top_k": 2, "drop_policy": "position"},
}


def make_router(name, *, drop):
    options = {"capacity_factor": 0.7, "min_capacity": 1, "drop_tokens": drop, "z_loss_coefficient": 0.05}
    bias = "bias" in name
    router = TopKRouter(D, E, settings=RouterSettings(**{**options, **CASES[name]}), correction_bias=bias)
    if bias:
        router.correction_bias.normal_(std=0.2)
    router.steps_end = True
    return router


def run(router, x, used, *, upstream, decide=None):
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    router.zero_grad()
    routing = router(x, used, num_sequences=3, decide=decide)
    ((routing.topk_weights_TK * upstream).sum() + routing.aux_loss).backward()
    return routing, x.grad, router.wg.weight.grad.clone()


def assert_same(found, expected):
    for field in ("topk_ids_TK", "selected_per_expert_E", "tokens_per_expert_E"):
        assert torch.equal(getattr(found[0], field), getattr(expected[0], field)), field
    assert found[0].topk_ids_TK.dtype == torch.int32
    assert_close(found[0].topk_weights_TK, expected[0].topk_weights_TK)
    assert_close(found[0].aux_loss, expected[0].aux_loss)
    assert_close(found[1], expected[1], what="gradient of x")
    assert_close(found[2], expected[2], what="gradient of the weight")


@pytest.fixture
def no_twins(monkeypatch):
    """Lets no twin run; the expected results must have been made before."""

    def forbid():
        for name in TWINS:
            monkeypatch.setattr(reference, name, lambda *args, name=name, **kwargs: pytest.fail(f"the twin {name} ran"))

    return forbid


# Dropping follows the choice of experts: after each kind of first choice, and of priorities.
DROPPING = {name for name in CASES if "dropped" in name or "strict" in name or "noise" in name}
BOTH = {"plain", "sampled second expert", "sigmoid, groups and bias", "loss per sequence"}


@pytest.mark.parametrize(
    ("name", "drop"),
    [(name, drop) for name in CASES for drop in (False, True) if name in BOTH or drop == (name in DROPPING)],
)
def test_every_way_of_routing_equals_the_twins(name, drop, no_twins):
    router = make_router(name, drop=drop)
    x, used, upstream = torch.randn(T, D), torch.rand(T) > 0.2, torch.randn(T, router.settings.top_k)
    expected = run(router, x, used, upstream=upstream)
    no_twins()
    with use_kernels("triton"), counting() as launches:
        found = run(router, x, used, upstream=upstream)
    assert_same(found, expected)
    assert launches["gate_backward"] == 1
    assert launches["gate_forward"] == (2 if drop else 1) + (name == "loss per sequence")


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_tokens(num_tokens):
    router = make_router("plain", drop=False)
    x, used, upstream = torch.randn(num_tokens, D), torch.ones(num_tokens), torch.ones(num_tokens, 3)
    router.settings = RouterSettings(top_k=3)
    expected = run(router, x, used, upstream=upstream)
    with use_kernels("triton"):
        assert_same(run(router, x, used, upstream=upstream), expected)


@pytest.mark.parametrize("drop", [False, True], ids=["all kept", "dropped"])
def test_a_recompute_weighs_the_recorded_decision_bit_by_bit_alike(drop):
    router = make_router("sampled second expert", drop=drop)
    x, upstream, made = torch.randn(T, D), torch.randn(T, 2), []
    with use_kernels("triton"):
        first = run(router, x, None, upstream=upstream, decide=Decisions(made, replaying=False, recorded=True))
        again = run(router, x, None, upstream=upstream, decide=Decisions(made, replaying=True, recorded=False))
    assert torch.equal(first[0].topk_ids_TK, again[0].topk_ids_TK)
    assert torch.equal(first[0].topk_weights_TK, again[0].topk_weights_TK)
    assert torch.equal(first[0].aux_loss, again[0].aux_loss)
    assert torch.equal(first[1], again[1])


def test_backward_on_another_thread_keeps_the_kernels_of_forward():
    router = make_router("plain", drop=False)
    x = torch.randn(T, D, requires_grad=True)
    with use_kernels("triton"):
        routing = router(x)
    with counting() as launches:
        routing.topk_weights_TK.square().sum().backward()
    assert launches["gate_backward"] == 1
