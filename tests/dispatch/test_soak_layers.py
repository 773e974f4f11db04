"""Layers trained over 8 ranks with random, uneven batches: no step hangs, and each gives what one process gives.

The default run takes a few steps; ``make soak`` runs 10 times 200 with each dispatcher.
"""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from xmoe.dispatch.make import make_dispatcher
from xmoe.experts import Experts
from xmoe.layer import RoutedMLP
from xmoe.ops.collectives import Exchange
from xmoe.router import RouterSettings, TopKRouter
from xmoe.testing import assert_close, run_ranks

pytestmark = pytest.mark.dist

WORLD, WIDTH = 8, 8
DISPATCHERS = ["flat", "gpu", "node", "node+gpu"]


def _dispatcher(name, ranks_per_node, num_chunks):
    exchange = Exchange(group=dist.group.WORLD, label=f"soak of {name}", timeout_s=60.0)
    return make_dispatcher(
        name, exchange, ranks_per_node=ranks_per_node, device=torch.device("cpu"), num_chunks=num_chunks
    )


def _initialize(module, expert_id):
    generator = torch.Generator().manual_seed(expert_id)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)


def _layer(chance, num_experts, per_rank, first_id):
    """A layer of this run's kind; the same generator state gives the same router."""
    settings = RouterSettings(
        top_k=chance.randint(1, min(num_experts, 8)),
        sample_second_expert=False,
        drop_tokens=chance.random() < 0.5,
        capacity_factor=chance.choice([0.5, 1.0]),
        min_capacity=1,
        random_token_selection=False,
    )
    expert = nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH))
    torch.manual_seed(chance.randrange(2**31))
    router = TopKRouter(WIDTH, num_experts, settings=settings)
    return RoutedMLP(router, Experts(expert, per_rank, first_id=first_id, initialize=_initialize)).double()


def _tokens(own):
    return own.choice([0, 1, own.randint(2, 9), own.randint(2, 60)])


def _steps(name, ranks_per_node, num_chunks, num_steps, seed):
    """Runs forward, and mostly backward, of both layers; compares with a layer that holds every expert."""
    rank, shared = dist.get_rank(), random.Random(seed)
    own = random.Random(seed * WORLD + rank + 1)
    per_rank = shared.choice([1, 2, 3])
    state = shared.getstate()
    spread = _layer(shared, WORLD * per_rank, per_rank, rank * per_rank)
    shared.setstate(state)
    whole = _layer(shared, WORLD * per_rank, WORLD * per_rank, 0)
    spread.set_dispatcher(_dispatcher(name, ranks_per_node, num_chunks))
    for step in range(num_steps):
        kind = shared.choice(["plain", "plain", "checkpointed", "evaluation"])
        tokens, used = _tokens(own), None
        x = torch.randn(tokens, WIDTH, dtype=torch.float64)
        if own.random() < 0.3:
            used = torch.rand(tokens) < own.choice([0.0, 0.5])
        results = []
        for layer in (spread, whole):
            layer.train(kind != "evaluation")
            inputs = x.clone().requires_grad_(kind != "evaluation")
            if kind == "checkpointed":
                y = checkpoint(layer, inputs, used, use_reentrant=False)[0]
            else:
                y = layer(inputs, used)[0]
            if kind != "evaluation":
                y.square().sum().backward()
            results.append((y.detach(), inputs.grad))
        for found, expected, what in zip(*results, ("output", "gradient"), strict=True):
            assert_close(found, expected, what=f"{what} of step {step} ({kind}, {tokens} tokens)")
    return num_steps


# The levels apart: in test_hierarchical.py.
@pytest.mark.parametrize(("name", "num_chunks"), [("flat", 3), ("node+gpu", 2)])
def test_steps_of_eight_ranks(name, num_chunks):
    assert run_ranks(WORLD, _steps, name, 4, num_chunks, 12, 1) == [12] * WORLD


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize("seed", range(10))
def test_200_steps_of_eight_ranks(name, seed):
    ranks_per_node, num_chunks = [4, 2, 8, 1][seed % 4], [1, 2, 3][seed % 3]
    answers = run_ranks(WORLD, _steps, name, ranks_per_node, num_chunks, 200, 100 + seed, timeout_s=600.0)
    assert answers == [200] * WORLD
