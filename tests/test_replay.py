"""Activation checkpointing: the first forward's decisions are replayed, counted once, and belong to one call."""

import gc
import weakref
from functools import partial

import deepspeed
import pytest
import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint as composable
from torch.utils.checkpoint import checkpoint

from xmoe.dispatch.local import LocalDispatcher
from xmoe.experts import Experts
from xmoe.layer import RoutedMLP
from xmoe.router import RouterSettings, TopKRouter
from xmoe.testing import assert_close

ds = deepspeed.checkpointing


class CountingDispatcher(LocalDispatcher):
    """Counts plans, which are what a distributed dispatcher exchanges counts for."""

    def __init__(self):
        self.plans = 0

    def plan(self, buffers):
        self.plans += 1
        return super().plan(buffers)


class Block(nn.Module):
    """A residual block whose routing is as noisy as it gets, with dropout before and after the routed layer."""

    def __init__(self, *, k=2, calls=1):
        super().__init__()
        mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        noise = {"input_jitter": 0.3, "noisy_logits": True, "drop_policy": "random" if k != 2 else None}
        settings = RouterSettings(top_k=k, capacity_factor=0.7, min_capacity=1, **noise)
        experts = Experts(mlp, 4, initialize=lambda module, _: [p.data.normal_() for p in module.parameters()])
        self.moe = RoutedMLP(TopKRouter(8, 4, settings=settings), experts, dispatcher=CountingDispatcher())
        self.calls = calls

    def forward(self, x):
        aux = 0.0
        for _ in range(self.calls):
            y, l_aux, _ = self.moe(nn.functional.dropout(x, 0.2))
            x, aux = x + nn.functional.dropout(torch.tanh(y), 0.5), aux + l_aux
        return x, aux


def nested(outer, inner):
    def run(block, x):
        return outer(lambda y: inner(block, y), x)

    return run


def torch_reentrant(function, x):
    return checkpoint(function, x, use_reentrant=True)


def torch_non_reentrant(function, x):
    return checkpoint(function, x, use_reentrant=False)


def without_early_stop(function, x):
    return checkpoint(function, x, use_reentrant=False, early_stop=False)


def torch_composable(block, x):
    if not hasattr(block, "_is_composed"):
        composable(block)
        block._is_composed = True
    return block(x)


WAYS = {
    "torch reentrant": torch_reentrant,
    "torch non-reentrant": torch_non_reentrant,
    "torch without early stop": without_early_stop,
    "torch composable": torch_composable,
    "DeepSpeed": ds.checkpoint,
    "DeepSpeed non-reentrant": ds.non_reentrant_checkpoint,
    "nested reentrant": nested(torch_reentrant, torch_reentrant),
    "nested non-reentrant": nested(torch_non_reentrant, torch_non_reentrant),
    "reentrant in non-reentrant": nested(torch_non_reentrant, torch_reentrant),
    "non-reentrant in reentrant": nested(torch_reentrant, torch_non_reentrant),
    "non-reentrant in DeepSpeed": nested(ds.checkpoint, torch_non_reentrant),
}
RETAINING = ["torch reentrant", "torch non-reentrant", "torch without early stop"]  # the others forbid it themselves


def plainly(block, x):
    return block(x)


def train(block, way, order, *, seed=3):
    """Two micro-batches in flight; gradients of inputs and parameters, counters, and where the generator ended."""
    torch.manual_seed(seed)
    inputs = [torch.randn(n, 8, dtype=torch.float64).requires_grad_() for n in (13, 7)]
    losses = []
    for x in inputs:
        y, aux = way(block, x)
        losses.append(y.square().sum() + aux)
    state = torch.get_rng_state()
    if order == "sum":
        sum(losses).backward()
    elif order == "first only":
        losses[0].backward()
    else:
        for index in order:
            losses[index].backward()
    assert torch.equal(torch.get_rng_state(), state), "the recompute moved the generator"
    grads = [x.grad for x in inputs] + [p.grad for p in block.parameters()]
    return [loss.detach() for loss in losses], grads, block.moe


def compare(way, order, **options):
    torch.manual_seed(0)
    block = Block(**options).double()
    other = Block(**options).double()
    other.load_state_dict(block.state_dict())
    losses, grads, moe = train(block, WAYS[way], order)
    expected, expected_grads, plain = train(other, plainly, order)
    for a, b in zip([*losses, *grads], [*expected, *expected_grads], strict=True):
        assert_close(a, b)
    assert torch.equal(moe.gate.step_counts, plain.gate.step_counts)
    assert int(moe.gate.step_counts.sum()) == 20 * moe.gate.settings.top_k * options.get("calls", 1)
    assert torch.equal(moe.counters.selected_E, plain.counters.selected_E)
    assert torch.equal(moe.counters.routed_E, plain.counters.routed_E)
    assert moe.counters.computed_rows == plain.counters.computed_rows
    assert moe.dispatcher.plans == 2 * options.get("calls", 1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), "sum"], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_and_counters_equal_the_uncheckpointed_run(way, order):
    # Public threads: Automodel PR 2635, NeMo-RL#1203, transformers#47467.
    compare(way, order)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [1, 3])
def test_other_kinds_of_noise(way, k):
    compare(way, (1, 0), k=k)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_called_twice_in_one_checkpoint(way):
    compare(way, (1, 0), calls=2)


@pytest.mark.parametrize("way", WAYS)
def test_a_micro_batch_without_backward_leaks_into_no_other(way):
    compare(way, "first only")
    torch.manual_seed(0)
    block = Block().double()
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    abandoned, _ = WAYS[way](block, x)
    losses, grads, _ = train(block, WAYS[way], (1, 0))
    block.zero_grad()
    expected, expected_grads, _ = train(block, plainly if way != "torch composable" else WAYS[way], (1, 0))
    del abandoned
    for a, b in zip(losses, expected, strict=True):
        assert_close(a, b)
    for a, b in zip(grads[:2], expected_grads[:2], strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("way", RETAINING)
@pytest.mark.parametrize("calls", [1, 2])
def test_a_retained_graph_is_recomputed_alike_each_time(way, calls):
    block = Block(calls=calls).double()
    x = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    y, aux = WAYS[way](block, x)
    loss = y.square().sum() + aux
    grads = []
    for retain in (True, True, False):
        x.grad = None
        block.zero_grad()
        loss.backward(retain_graph=retain)
        grads.append([x.grad, *[p.grad for p in block.parameters()]])
    for later in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], later, strict=True))
    assert block.moe.dispatcher.plans == calls
    assert int(block.moe.gate.step_counts.sum()) == 9 * 2 * calls


@pytest.mark.parametrize("way", WAYS)
def test_the_record_dies_with_its_graph(way, monkeypatch):
    block = Block().double()
    made = []
    select = block.moe.gate._select

    def remember(*args):
        selection = select(*args)
        made.append(weakref.ref(selection.ids_TK))
        return selection

    monkeypatch.setattr(block.moe.gate, "_select", remember)
    for backward in (True, False):
        x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
        y, aux = WAYS[way](block, x)
        if backward:
            (y.sum() + aux).backward()
        del y, aux
        gc.collect()
    assert len(made) == 2
    assert [ref() for ref in made] == [None, None]


def test_layers_of_one_checkpoint_keep_their_decisions_apart():
    torch.manual_seed(0)
    blocks = [Block().double(), Block(k=3).double()]
    x = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)

    def both(x):
        y, first = blocks[0](x)
        y, second = blocks[1](y)
        y, third = blocks[0](y)
        return y, first + second + third

    results = []
    for way in (both, lambda x: checkpoint(both, x, use_reentrant=False), lambda x: ds.checkpoint(both, x)):
        torch.manual_seed(1)
        x.grad = None
        y, aux = way(x)
        (y.square().sum() + aux).backward()
        results.append(x.grad)
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_and_forwards_without_gradient_count_nothing(way):
    block = Block().double()
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        block(x)
        WAYS[way](block, x)
    block.eval()
    y, aux = WAYS[way](block, x)
    (y.sum() + aux).backward()
    assert int(block.moe.gate.step_counts.sum()) == 0
    assert int(block.moe.counters.selected_E.sum()) == 0


def test_frozen_input_still_trains_the_layer_without_reentrance():
    block = Block().double()
    x = torch.randn(5, 8, dtype=torch.float64)
    y, aux = checkpoint(block, x, use_reentrant=False)
    (y.sum() + aux).backward()
    assert block.moe.gate.wg.weight.grad is not None
    assert block.moe.dispatcher.plans == 1


def test_other_saved_tensor_hooks_around_the_layer_are_harmless():
    block = Block().double()
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y, aux = block(x)
    with torch.autograd.graph.saved_tensors_hooks(partial(torch.Tensor.clone), torch.Tensor.clone):
        block(x)
    (y.sum() + aux).backward()
    assert bool(torch.isfinite(x.grad).all())
