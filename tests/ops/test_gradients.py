"""Every operator against numerical derivatives in float64."""

import pytest
import torch
from torch.autograd import gradcheck

from xmoe.kernels.reference import ExpertWeights, sort_slots
from xmoe.ops.expert_mlp import expert_mlp
from xmoe.ops.gather import combine_rows, gather_rows, select_slots
from xmoe.ops.routing import router_logits, top_k_weights
from xmoe.testing import assignments_of


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_rows():
    slots, places = sort_slots(torch.tensor([[1, -1], [-1, 0], [2, 2], [-1, -1]]), 3)
    slots, places = slots[:4], places.view(4, 2)
    assert slots.tolist() == [3, 0, 4, 5]
    assert gradcheck(lambda x: gather_rows(x, slots, places), rand(4, 3))
    assert gradcheck(lambda rows: combine_rows(rows, slots, places), rand(4, 3))
    assert gradcheck(lambda rows, weights: combine_rows(rows, slots, places, weights), (rand(4, 3), rand(4, 2)))


def test_weights_of_slots():
    slots, places = sort_slots(torch.tensor([[2, -1], [0, 2], [1, 0]]), 3)
    assert gradcheck(lambda w: select_slots(w, slots, places), rand(3, 2))


def test_router_logits():
    assert gradcheck(router_logits, (rand(5, 3), rand(4, 3)))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("ids", [[[0, 2], [1, 3]], [[-1, 2], [-1, -1]], [[3], [0]], [[0, 1, 2, 3], [3, 0, 1, -1]]])
def test_top_k_weights(normalize, ids):
    ids = torch.tensor(ids, dtype=torch.int32)
    scores = (torch.rand(2, 4, dtype=torch.float64) + 0.1).requires_grad_()
    assert gradcheck(lambda s: top_k_weights(s, ids, normalize=normalize, scale=2.5), scores)


def test_top_k_weights_of_vanishing_scores_are_finite():
    scores = torch.zeros(1, 4, requires_grad=True)
    weights = top_k_weights(scores, torch.tensor([[0, 1]]), normalize=True, scale=1.0)
    weights.sum().backward()
    assert weights.tolist() == [[0.0, 0.0]]
    assert bool(torch.isfinite(scores.grad).all())


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
