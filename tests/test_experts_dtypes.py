"""The dtype of the experts' results: one for fused experts and for those called as modules, as rows travel in it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from xmoe.dispatch.make import make_dispatcher
from xmoe.experts import Experts
from xmoe.layer import RoutedMLP
from xmoe.ops.collectives import Exchange
from xmoe.router import RouterSettings, TopKRouter
from xmoe.testing import assert_close, run_ranks

HIDDEN = 8


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


def fill(module: nn.Module, logical_id: int) -> None:
    generator = torch.Generator().manual_seed(logical_id)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)


def layer_of(num_local: int, *, first_id: int = 0, hooked: bool = False) -> RoutedMLP:
    """Experts ``first_id`` onwards of four; a hook makes them run module by module."""
    torch.manual_seed(3)
    settings = RouterSettings(top_k=2, drop_tokens=False, sample_second_expert=False)
    experts = Experts(Plain(), num_local, first_id=first_id, initialize=fill)
    layer = RoutedMLP(TopKRouter(HIDDEN, 4, settings=settings), experts)
    fill(layer.gate, 99)
    if hooked:
        layer.experts.modules_in_order()[0].register_forward_hook(lambda module, inputs, output: None)
    return layer


# A layer of float32 gets bfloat16 rows from a block that autocast ran.
DTYPES = [
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64, torch.float64),
]


@pytest.mark.parametrize(("dtype", "rows", "result"), DTYPES)
def test_a_hook_changes_no_dtype_under_autocast(dtype: torch.dtype, rows: torch.dtype, result: torch.dtype):
    x = torch.randn(6, HIDDEN, dtype=rows)
    found = []
    for hooked in (False, True):
        layer = layer_of(4, hooked=hooked).to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            assert (layer.experts.prepare("cpu").weights is None) == hooked
            y, _, _ = layer(x)
        y.float().sum().backward()
        found.append((y, [p.grad for p in layer.parameters()]))
    (fused, fused_grads), (looped, looped_grads) = found
    assert fused.dtype == looped.dtype == result
    assert_close(fused, looped)
    for a, b in zip(fused_grads, looped_grads, strict=True):
        assert a is not None
        assert b is not None
        assert a.dtype == b.dtype == dtype
        assert_close(a, b, dtype=result)


def test_float64_is_no_matter_of_autocast():
    layer = layer_of(4).double()
    x = torch.randn(6, HIDDEN, dtype=torch.float64)
    found = []
    for enabled in (False, True):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y, _, _ = layer(x)
        y.sum().backward()
        found.append([y, *(p.grad for p in layer.experts.parameters())])
    for plain, autocast in zip(*found, strict=True):
        assert autocast.dtype == torch.float64
        assert torch.equal(plain, autocast)


def _hooked_on_one_rank():
    layer = layer_of(2, first_id=2 * dist.get_rank(), hooked=dist.get_rank() == 0)
    exchange = Exchange(group=dist.group.WORLD, label="moe", timeout_s=20.0)
    layer.set_dispatcher(make_dispatcher("flat", exchange, ranks_per_node=None, device=torch.device("cpu")))
    torch.manual_seed(dist.get_rank())
    x = torch.randn(5, HIDDEN, requires_grad=True)
    whole = layer_of(4)
    found = []
    for one in (layer, whole):
        with torch.autocast("cpu", torch.bfloat16):
            y, _, _ = one(x)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *one.gate.parameters()])])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, dtype=torch.bfloat16)


@pytest.mark.dist
def test_under_autocast_experts_may_be_hooked_on_one_rank():
    # As DeepSpeed's flops profiler does on rank 0. The other rank died of rows of twice the size it expected.
    run_ranks(2, _hooked_on_one_rank)
