"""The whole layer with ``"kernels": "triton"`` in Triton's interpreter, against the layer on the PyTorch twins."""

import copy
import sys
from types import FunctionType, ModuleType

import harness
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from xmoe.dispatch.flat import FlatDispatcher
from xmoe.experts import Experts
from xmoe.kernels import reference, triton_kernels
from xmoe.kernels.launch import counting
from xmoe.layer import RoutedMLP
from xmoe.ops.collectives import Exchange
from xmoe.router import RouterSettings, TopKRouter
from xmoe.testing import assert_close, run_ranks

D, F, E = 20, 24, 5  # two blocks of the interpreter's, the second one cut short


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, F, bias=False), nn.Linear(D, F, bias=False)
        self.down_proj = nn.Linear(F, D, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def plain_mlp(activation):
    return lambda: nn.Sequential(nn.Linear(D, F), activation, nn.Linear(F, D))


EXPERTS = {
    "swiglu": SwiGLU,
    "gelu": plain_mlp(nn.GELU()),
    "gelu_tanh": plain_mlp(nn.GELU(approximate="tanh")),
    "relu": plain_mlp(nn.ReLU()),
}


def make_layer(expert="swiglu", *, num_local=E, correction_bias=False, **settings):
    torch.manual_seed(0)
    options = {"top_k": 3, "drop_tokens": False, "z_loss_coefficient": 0.1, **settings}
    gate = TopKRouter(D, E, settings=RouterSettings(**options), correction_bias=correction_bias)
    if correction_bias:
        gate.correction_bias.copy_(torch.linspace(-0.2, 0.3, E))
    return RoutedMLP(gate, Experts(EXPERTS[expert](), num_local, initialize=scatter_weights))


def scatter_weights(module, logical_id):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)


def forbid_twins(monkeypatch):
    """Every twin that has a kernel raises, wherever its name was imported to. Returns the names."""
    twins = {
        name: value
        for name, value in vars(reference).items()
        if isinstance(value, FunctionType)
        and callable(getattr(triton_kernels, name, None))
        and getattr(triton_kernels, name) is not value
    }
    for module in [m for n, m in sys.modules.items() if n.startswith("xmoe") and isinstance(m, ModuleType)]:
        for name, value in list(vars(module).items()):
            if any(value is twin for twin in twins.values()):
                monkeypatch.setattr(module, name, _raiser(name))
    return set(twins)


def _raiser(name):
    def raising(*args, **kwargs):
        raise AssertionError(f"the PyTorch twin {name} ran in place of its kernel")

    return raising


def run(layer, x, used=None, *, recompute=None):
    """Output, auxiliary loss, counts and all gradients of one forward and backward."""
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    call = layer if recompute is None else lambda *args: checkpoint(layer, *args, use_reentrant=recompute)
    output, loss, counts = call(x, used)
    ((output.float() * torch.arange(1.0, D + 1) / D).sum() + loss).backward()
    return {
        "output": output.detach(),
        "loss": loss.detach(),
        "counts": counts,
        "x": x.grad,
        **{name: parameter.grad for name, parameter in layer.named_parameters()},
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None or not value.is_floating_point():
            assert (found[name] is None and value is None) or torch.equal(found[name], value), name
        else:
            assert_close(found[name], value, what=name)


# Each way of routing is tests/kernels/test_router_on_triton.py's; to what follows, it is ids and weights.
CASES = {
    "plain": {},
    "k_1": {"top_k": 1, "random_token_selection": False},
    "dropping, with all that routing has": {
        "score_function": "sigmoid",
        "correction_bias": True,
        "routed_scaling_factor": 2.5,
        "num_expert_groups": 5,
        "num_limited_groups": 3,
        "group_score": "max",
        "aux_loss_scope": "sequence",
        "drop_tokens": True,
        "capacity_factor": 0.6,
        "min_capacity": 1,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_layer_equals_the_layer_on_the_twins(name, monkeypatch):
    layer = make_layer(**CASES[name])
    x = torch.randn(2, 6, D)
    used = None if name == "plain" else torch.arange(12).view(2, 6) % 4 > 0
    expected = run(layer, x, used)
    names = forbid_twins(monkeypatch)
    assert {"sort_slots", "expert_mlp_forward", "expert_mlp_backward", "gather_rows", "combine_rows"} <= names
    with pytest.raises(AssertionError, match="ran in place of its kernel"):
        run(layer, x)
    layer.kernels = "triton"
    with counting() as launches:
        found = run(layer, x, used)
    assert_same(found, expected)
    assert launches.total() >= 12, launches
    assert sum(count for kernel, count in launches.items() if "grouped" in kernel) == 7, launches


@pytest.mark.parametrize(
    ("expert", "num_tokens"), [("gelu", 17), ("gelu_tanh", 5), ("relu", 1), ("swiglu", 1), ("gelu", 0), ("swiglu", 0)]
)
def test_every_kind_of_expert_and_few_tokens(expert, num_tokens):
    layer = make_layer(expert, top_k=2, sample_second_expert=False)
    x = torch.randn(num_tokens, D)
    expected = run(layer, x)
    layer.kernels = "triton"
    assert_same(run(layer, x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype):
    """Both round at other places: each is held to the oracle's bounds, against the layer in float32."""
    layer = make_layer()
    x = torch.randn(19, D).to(dtype)
    layer.to(dtype)
    exact = copy.deepcopy(layer).float()
    expected = run(exact, x.float())
    layer.kernels = "triton"
    found = run(layer, x)
    assert torch.equal(found["counts"], expected["counts"])
    for name, value in expected.items():
        if name != "counts":
            assert found[name].dtype == (torch.float32 if name == "loss" else dtype)
            assert_close(found[name], value, dtype=dtype, what=name)


@pytest.mark.parametrize("recompute", [True, False], ids=["reentrant", "not_reentrant"])
def test_a_recompute_replays_the_decisions(recompute):
    layer = make_layer(drop_tokens=True, capacity_factor=0.6, min_capacity=1)
    x = torch.randn(13, D)
    expected = run(layer, x)
    layer.kernels = "triton"
    assert_same(run(layer, x, recompute=recompute), expected)


def test_two_runs_are_bitwise_equal_whatever_the_order_of_programs():
    layer = make_layer()
    layer.kernels = "triton"
    x = torch.randn(18, D)
    first = run(layer, x)
    with harness.program_order("random"):
        second = run(layer, x)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_float64_is_refused_by_name():
    layer = make_layer().double()
    layer.kernels = "triton"
    with pytest.raises(ValueError, match=r"xmoe.kernels is 'triton': .*float64"):
        layer(torch.randn(3, D, dtype=torch.float64))


def _over_ranks():
    rank, size, num_local = dist.get_rank(), dist.get_world_size(), 2
    gate = TopKRouter(D, num_local * size, settings=RouterSettings(top_k=3, drop_tokens=False))
    layer = RoutedMLP(gate, make_layer(num_local=num_local).experts)
    layer.set_dispatcher(FlatDispatcher(Exchange(group=dist.group.WORLD, label="test", timeout_s=100.0)))
    for index, parameter in enumerate(layer.experts.parameters()):
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(100 * rank + index))
    for num_tokens in (0 if rank else 7, 2 + 3 * rank):
        x = torch.randn(num_tokens, D)
        layer.kernels = "torch"
        expected = run(layer, x)
        layer.kernels = "triton"
        with harness.checked_interpreter(), counting() as launches:
            assert_same(run(layer, x), expected)
        assert launches.total() > 5


@pytest.mark.dist
def test_rows_of_other_ranks():
    run_ranks(2, _over_ranks, timeout_s=100.0)
