"""Layers under hierarchical dispatch, the same on every rank but for their experts."""

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

HIDDEN = 8
UNEVEN = [5, 6, 0, 13, 1, 9, 0, 4]


def dispatcher_of(levels, ranks_per_node, *, group=None, num_chunks=1, **options):
    options = {"label": "blocks.3.moe", "timeout_s": 30.0} | options
    exchange = Exchange(group=dist.group.WORLD if group is None else group, **options)
    return make_dispatcher(
        levels, exchange, ranks_per_node=ranks_per_node, device=torch.device("cpu"), num_chunks=num_chunks
    )


class Tanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return torch.tanh(self.fc(x))


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 12, bias=False), nn.Linear(HIDDEN, 12, bias=False)
        self.down_proj = nn.Linear(12, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


EXPERTS = {"fused": SwiGLU, "loop": Tanh}


def fill(module, logical_id):
    generator = torch.Generator().manual_seed(logical_id)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def make_layer(num_experts, k, *, rank=0, world=1, expert="fused", dispatcher=None, **options):
    settings = RouterSettings(top_k=k, **({"drop_tokens": False, "sample_second_expert": False} | options))
    gate = TopKRouter(HIDDEN, num_experts, settings=settings)
    local = num_experts // world
    experts = Experts(EXPERTS[expert](), local, first_id=rank * local, initialize=fill)
    layer = RoutedMLP(gate, experts, dispatcher=dispatcher).double()
    fill(gate, 99)
    return layer


def inputs_of(rank, tokens, kind="random"):
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    if kind == "skewed":
        x = 0.2 * x + torch.linspace(-1, 1, HIDDEN, dtype=torch.float64)
    return x.requires_grad_(), torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)


def checkpoint_ways():
    """Ways to call a function of one tensor, by name: at first without a checkpoint."""
    from deepspeed import checkpointing

    return {
        "plain": lambda function, x: function(x),
        "torch reentrant": lambda function, x: checkpoint(function, x, use_reentrant=True),
        "torch non-reentrant": lambda function, x: checkpoint(function, x, use_reentrant=False),
        "DeepSpeed": checkpointing.checkpoint,
        "DeepSpeed non-reentrant": checkpointing.non_reentrant_checkpoint,
    }


def gradients_by(way, layer, batches):
    """Gradients of batches in flight at once, each through the layer by ``way``; and how often integers were sent."""
    integers, all_to_all = [], dist.all_to_all_single

    def recorded(output, input, *splits, **options):
        integers.append(not input.is_floating_point())
        return all_to_all(output, input, *splits, **options)

    torch.manual_seed(dist.get_rank())
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", recorded)
        for x, upstream in batches:
            y, aux, _ = way(lambda x: layer(torch.tanh(x)), x)
            losses.append((y * upstream).sum() + aux)
        for loss in reversed(losses):
            loss.backward()
    return [x.grad for x, _ in batches] + [p.grad for p in layer.parameters()], sum(integers)
