"""Every operator against numerical derivatives in float64."""

import pytest
import torch
from torch.autograd import gradcheck

from xmoe.kernels.launch import counting
from xmoe.kernels.reference import ExpertWeights, GateRule, sort_slots
from xmoe.ops._backend import use_kernels
from xmoe.ops.expert_mlp import expert_mlp
from xmoe.ops.gather import combine_rows, gather_rows, select_slots
from xmoe.ops.routing import gate_tokens, router_logits
from xmoe.testing import assert_close, assignments_of


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_rows():
    slots, places = sort_slots(torch.tensor([[1, -1], [-1, 0], [2, 2], [-1, -1]]), 3)
    slots, places = slots[:4], places.view(4, 2)
    assert slots.tolist() == [3, 0, 4, 5]
    assert gradcheck(lambda x: gather_rows(x, slots, places), rand(4, 3))
    assert gradcheck(lambda rows: combine_rows(rows, slots, places), rand(4, 3))
    assert gradcheck(lambda rows, weights: combine_rows(rows, slots, places, weights), (rand(4, 3), rand(4, 2)))


def gradients(run, leaves, upstream):
    """The result of ``run`` and its gradients at detached copies of ``leaves``."""
    copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    result = run(*copies)
    return [result, *torch.autograd.grad(result, copies, upstream.to(result.dtype))]


@pytest.mark.parametrize("ids", [[[1, -1], [-1, 0], [2, 2], [-1, -1]], [[0], [0], [0]], [[-1, -1]]])
def test_rows_on_triton_have_the_gradients_of_the_twins(ids):
    ids = torch.tensor(ids)
    slots, places = sort_slots(ids, 3)
    num_rows = int((ids >= 0).sum())
    slots, places = slots[:num_rows], places.view(ids.shape)
    cases = {
        "gather": (lambda x: gather_rows(x, slots, places), [rand(len(ids), 20)], (num_rows, 20)),
        "combine": (lambda r: combine_rows(r, slots, places), [rand(num_rows, 20)], (len(ids), 20)),
        "weighted": (
            lambda r, w: combine_rows(r, slots, places, w),
            [rand(num_rows, 20), rand(*ids.shape)],
            (len(ids), 20),
        ),
    }
    for name, (run, leaves, shape) in cases.items():
        upstream = torch.randn(shape, dtype=torch.float64)
        expected = gradients(run, leaves, upstream)
        with use_kernels("triton"), counting() as launches:
            result = run(*(copies := [leaf.detach().float().requires_grad_() for leaf in leaves]))
        # Backward follows forward's choice, outside the context as on autograd's own threads.
        with counting() as backward_launches:
            found = [result, *torch.autograd.grad(result, copies, upstream.float())]
        assert launches.total() == 1, name
        assert backward_launches.total() == len(leaves), name
        for actual, wanted in zip(found, expected, strict=True):
            assert_close(actual, wanted, what=name)


def test_weights_of_slots():
    slots, places = sort_slots(torch.tensor([[2, -1], [0, 2], [1, 0]]), 3)
    assert gradcheck(lambda w: select_slots(w, slots, places), rand(3, 2))


def test_router_logits():
    assert gradcheck(router_logits, (rand(5, 3), rand(4, 3)))


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    "ids", [[[0, 2], [1, 3]], [[-1, 2], [-1, -1]], [[3], [0]], [[0, 1, 2, 3], [3, 0, 1, -1]], None]
)
def test_gate_tokens(score_function, normalize, ids):
    ids = None if ids is None else torch.tensor(ids, dtype=torch.int32)
    rule = GateRule(
        top_k=2 if ids is None else ids.shape[1],
        score_function=score_function,
        normalize=normalize,
        scale=2.5,
        z_sums=True,
    )

    def run(logits):
        gating = gate_tokens(logits, rule, used_T=torch.tensor([True, False]), ids_TK=ids, num_parts=2)
        return gating.weights_TK, gating.share_sums_BE, gating.z_sums_B

    assert gradcheck(run, rand(2, 4))


def test_weights_of_vanishing_scores_are_finite():
    logits = torch.full((1, 4), -200.0, requires_grad=True)
    gating = gate_tokens(logits, GateRule(top_k=2, score_function="sigmoid"))
    (gating.weights_TK.sum() + gating.share_sums_BE.sum()).backward()
    assert gating.weights_TK.tolist() == [[0.0, 0.0]]
    assert bool(torch.isfinite(logits.grad).all())


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("biases", [False, True])
def test_expert_mlp(activation, biases):
    counts, row_ids = [2, 0, 3], torch.tensor([3, 1, 0, 1, 2], dtype=torch.int32)
    assignments = assignments_of(row_ids, 4)
    width = {"up": (5, 3), "down": (3, 5)} | ({"gate": (5, 3)} if activation == "swiglu" else {})
    shapes = dict(width)
    if biases:
        shapes |= {f"{name}_bias": shape[:1] for name, shape in width.items()}
    flat = [rand(*shape) for shape in shapes.values() for _ in counts]

    def run(x, weights, *flat):
        lists = {name: flat[3 * i : 3 * i + 3] for i, name in enumerate(shapes)}
        experts = ExpertWeights(**lists)
        return expert_mlp(
            x, row_ids, assignments, weights, counts, torch.tensor(counts), experts=experts, activation=activation
        )

    assert gradcheck(run, (rand(4, 3), rand(5), *flat))


def test_router_logits_keep_float32_under_autocast_in_both_directions():
    x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(8, 32, requires_grad=True)
    upstream = torch.randn(64, 8)
    with torch.autocast("cpu", torch.bfloat16):
        logits = router_logits(x, weight)
        logits.backward(upstream)
    assert torch.equal(logits, x @ weight.t())
    assert torch.equal(x.grad, upstream @ weight)
    assert torch.equal(weight.grad, upstream.t() @ x)
