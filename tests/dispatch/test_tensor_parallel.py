"""Ranks that share their tokens: the shares partition the kept slots, and results and gradients are the whole's."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from xmoe.dispatch.local import LocalDispatcher
from xmoe.dispatch.tensor_parallel import SharedTokens
from xmoe.experts import Experts
from xmoe.layer import RoutedMLP
from xmoe.ops.collectives import Exchange
from xmoe.router import RouterSettings, TopKRouter
from xmoe.testing import assert_close, check_assignments, run_ranks

pytestmark = pytest.mark.dist

D = 8


def _layer(**settings):
    torch.manual_seed(3)
    expert = nn.Sequential(nn.Linear(D, 6), nn.GELU(), nn.Linear(6, D))
    router = TopKRouter(D, 5, settings=RouterSettings(top_k=2, sample_second_expert=False, **settings))
    return RoutedMLP(router, Experts(expert, 5, initialize=lambda module, i: module.apply(_reset))).double()


def _reset(module):
    if isinstance(module, nn.Linear):
        module.reset_parameters()


class _Watched(LocalDispatcher):
    def plan(self, buffers):
        (buffer,) = buffers
        self.slots = set(buffer.slot_ids_S[: int(buffer.tokens_per_expert_E.sum())].tolist())
        (plan,) = super().plan(buffers)
        check_assignments(plan, buffer.num_tokens)
        return [plan]


def _shares():
    exchange = Exchange(group=dist.group.WORLD, label="test", timeout_s=30.0)
    for num_tokens in (0, 1, 7):
        for settings in ({"drop_tokens": False}, {"capacity_factor": 0.5, "min_capacity": 1}):
            torch.manual_seed(num_tokens)
            x = torch.randn(num_tokens, D, dtype=torch.float64, requires_grad=True)
            whole, shared = _layer(**settings), _layer(**settings)
            whole_slots, own_slots = _Watched(), _Watched()
            whole.set_dispatcher(whole_slots)
            shared.set_dispatcher(SharedTokens(own_slots, exchange))
            results = []
            for layer in (whole, shared):
                out, aux, _ = layer(x)
                loss = out.square().sum() + aux
                gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
                results.append([out.detach(), *gradients])
            names = ["x", *(name for name, _ in whole.named_parameters())]
            for index, name in enumerate(["out", *names]):
                found, expected = results[1][index], results[0][index]
                if "mlps" in name:  # of the rank's own tokens
                    dist.all_reduce(found)
                assert_close(found, expected, what=f"{num_tokens} {settings} {name}")
            everywhere = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, own_slots.slots)
            assert sum(map(len, everywhere)) == len(whole_slots.slots)
            assert set().union(*everywhere) == whole_slots.slots


def test_shares_add_up_to_the_whole():
    run_ranks(3, _shares)


def _recomputed():
    for num_chunks in (1, 3):
        _recomputed_in(num_chunks)


def _recomputed_in(num_chunks):
    exchange = Exchange(group=dist.group.WORLD, label="test", timeout_s=30.0)
    results = []
    for through in (None, True, False):
        torch.manual_seed(0)
        x = torch.randn(9, D, dtype=torch.float64, requires_grad=True)
        layer = _layer(drop_tokens=False)
        inner = LocalDispatcher()
        inner.num_chunks = num_chunks
        layer.set_dispatcher(SharedTokens(inner, exchange))
        y = layer(x)[0] if through is None else checkpoint(layer, x, use_reentrant=through)[0]
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
    for found in results[1:]:
        for actual, wanted in zip(found, results[0], strict=True):
            assert torch.equal(actual, wanted), f"{num_chunks} chunks"


def test_shares_are_recomputed_by_every_checkpoint():
    run_ranks(2, _recomputed)
