"""The whole layer in one process: against an oracle that runs every expert on every token, and what it keeps."""

import pytest
import torch
from torch import nn

from xmoe.experts import Experts
from xmoe.layer import RoutedMLP
from xmoe.metrics import take_layer_loads
from xmoe.router import RouterSettings, TopKRouter
from xmoe.testing import assert_close, dense_oracle

HIDDEN = 16


class SwiGLU(nn.Module):
    def __init__(self, hidden=HIDDEN, width=24):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def gelu(hidden=HIDDEN, width=24):
    return nn.Sequential(nn.Linear(hidden, width), nn.GELU(), nn.Linear(width, hidden))


class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return torch.sin(self.fc(x)), None


def fresh(module, logical_id):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


def make_layer(expert, num_experts=8, k=2, *, dtype=torch.float64, hidden=HIDDEN, **options):
    parts = {key: options.pop(key) for key in ("shared_mlp", "shared_gate") if key in options}
    settings = RouterSettings(top_k=k, **({"drop_tokens": False, "sample_second_expert": False} | options))
    gate = TopKRouter(hidden, num_experts, settings=settings)
    return RoutedMLP(gate, Experts(expert, num_experts, initialize=fresh), **parts).to(dtype)


def oracle(layer, x, used=None):
    """(output, aux_loss) in float64 from the same (rounded) parameters, and those parameters."""
    wide = RoutedMLP(TopKRouter(x.shape[-1], layer.gate.num_experts, settings=layer.gate.settings), layer.experts)
    wide.gate.double()
    wide.experts = Experts(layer.experts.modules_in_order()[0], layer.gate.num_experts).double()
    wide.load_state_dict({name: value.double() for name, value in layer.state_dict().items()}, strict=True)
    flat = x.reshape(-1, x.shape[-1])
    routing = wide.gate(flat, used)
    y = dense_oracle(
        flat,
        experts=list(wide.experts.modules_in_order()),
        topk_ids_TK=routing.topk_ids_TK,
        topk_weights_TK=routing.topk_weights_TK,
    )
    return y.view_as(x), routing.aux_loss, wide


CASES = {
    "k=1": (SwiGLU(), 8, 1, (21,), {}),
    "k=2": (SwiGLU(), 8, 2, (3, 7), {}),
    "k=3, gelu": (gelu(), 8, 3, (21,), {}),
    "k=E": (SwiGLU(), 4, 4, (9,), {}),
    "one expert": (gelu(), 1, 1, (9,), {}),
    "one token": (SwiGLU(), 8, 2, (1,), {}),
    "no token": (SwiGLU(), 8, 2, (0,), {}),
    "no token, any module": (Opaque(), 8, 2, (0, 5), {}),
    "any module": (Opaque(), 8, 3, (2, 3, 4), {}),
    "sigmoid": (SwiGLU(), 8, 3, (33,), {"score_function": "sigmoid", "routed_scaling_factor": 2.5}),
    "unnormalised": (gelu(), 8, 3, (33,), {"normalize_weights": False, "z_loss_coefficient": 0.1}),
    "drops by probs": (SwiGLU(), 8, 3, (64,), {"drop_tokens": True, "capacity_factor": 0.6, "min_capacity": 1}),
    "drops by position": (gelu(), 8, 2, (64,), {"drop_tokens": True, "capacity_factor": 0.6, "min_capacity": 1}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_layer_equals_the_dense_oracle(name, dtype):
    expert, num_experts, k, shape, options = CASES[name]
    layer = make_layer(expert, num_experts, k, dtype=dtype, **options)
    x = torch.randn(*shape, HIDDEN).to(dtype).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y, aux, counts = layer(x)
    expected, expected_aux, wide = oracle(layer, x64)
    assert y.dtype == dtype
    assert counts.dtype == torch.int64
    assert int(counts.sum()) == x.numel() // HIDDEN * k
    upstream = torch.randn_like(y)
    ((y * upstream).sum() + aux).backward()
    ((expected * upstream.double()).sum() + expected_aux).backward()
    assert_close(y, expected, what="y")
    assert_close(aux, expected_aux, dtype=torch.float32 if dtype == torch.bfloat16 else dtype, what="aux")
    if dtype == torch.bfloat16:  # gradients of few rows cancel; float32 and float64 hold them to the table
        assert all(bool(torch.isfinite(p.grad).all()) for p in layer.parameters())
        return
    assert_close(x.grad, x64.grad, what="x")
    for (key, parameter), reference in zip(layer.named_parameters(), wide.parameters(), strict=True):
        assert_close(parameter.grad, reference.grad, what=key)


def test_bfloat16_gradients():
    layer = make_layer(SwiGLU(64, 48), 4, 2, dtype=torch.bfloat16, hidden=64)
    x = torch.randn(256, 64).bfloat16().requires_grad_()
    x64 = x.detach().double().requires_grad_()
    upstream = torch.randn(256, 64).bfloat16()
    y, _, _ = layer(x)
    y.backward(upstream)
    expected, _, wide = oracle(layer, x64)
    expected.backward(upstream.double())
    assert_close(x.grad, x64.grad, what="x")
    for (key, parameter), reference in zip(layer.named_parameters(), wide.parameters(), strict=True):
        if key.startswith("experts"):
            assert_close(parameter.grad, reference.grad, what=key)


@pytest.mark.parametrize("expert", [SwiGLU(), Opaque()], ids=["fused", "loop"])
def test_masked_tokens_get_zero_and_give_no_gradient(expert):
    for k in (1, 2, 3, 8):
        layer = make_layer(expert, 8, k)
        x = torch.randn(4, 6, HIDDEN, dtype=torch.float64, requires_grad=True)
        used = torch.rand(4, 6) > 0.4
        y, aux, counts = layer(x, used)
        (y.sum() + aux).backward()
        assert int(counts.sum()) == k * int(used.sum())
        assert bool((y[~used] == 0).all())
        assert bool((x.grad[~used] == 0).all())
        expected, _, _ = oracle(layer, x.detach(), used)
        assert_close(y, expected)


def test_all_tokens_on_one_expert():
    layer = make_layer(SwiGLU(), 8, 1)
    layer.gate.wg.weight.data[:] = 0.0  # ties: the lowest id wins
    x = torch.randn(17, HIDDEN, dtype=torch.float64, requires_grad=True)
    y, _, counts = layer(x)
    assert counts.tolist() == [17, 0, 0, 0, 0, 0, 0, 0]
    assert_close(y, oracle(layer, x.detach())[0])
    y.sum().backward()
    for expert in list(layer.experts.modules_in_order())[1:]:
        assert all(bool((p.grad == 0).all()) for p in expert.parameters())


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_see_every_token(gated):
    shared, gate = Opaque(), nn.Linear(HIDDEN, 1)
    layer = make_layer(SwiGLU(), shared_mlp=shared, shared_gate=gate if gated else None)
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    used = torch.rand(2, 5) > 0.5
    y, _, _ = layer(x, used)
    expected = torch.sin(shared.fc(x)) * (gate(x).sigmoid() if gated else 1.0)
    assert_close(y[~used], expected[~used])
    layer.zero_routed_output = True
    y, aux, _ = layer(x)
    assert_close(y, expected)
    (y.sum() + aux).backward()
    assert shared.fc.weight.grad is not None
    assert all(bool((p.grad == 0).all()) for p in layer.experts.parameters())
    assert not gated or gate.weight.grad is not None


def test_inputs_of_any_layout_and_no_inputs_gradient():
    layer = make_layer(SwiGLU())
    x = torch.randn(HIDDEN, 3, 5, dtype=torch.float64).permute(2, 1, 0)
    assert_close(layer(x)[0], layer(x.contiguous())[0])
    y, aux, _ = layer(x)
    (y.sum() + aux).backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_two_runs_are_bitwise_equal_and_use_deterministic_operations_only():
    torch.use_deterministic_algorithms(True)
    try:
        layer = make_layer(SwiGLU(), 8, 4, dtype=torch.float32, drop_tokens=True, capacity_factor=0.8)
        x = torch.randn(257, HIDDEN, requires_grad=True)
        results = []
        for _ in range(20):
            layer.zero_grad()
            x.grad = None
            y, aux, _ = layer(x)
            (y.square().sum() + aux).backward()
            results.append([y, aux, x.grad, *[p.grad for p in layer.parameters()]])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in results[1:] for a, b in zip(results[0], run, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_around_the_layer(backend):
    layer = make_layer(SwiGLU(), dtype=torch.float32)
    before = nn.Linear(HIDDEN, HIDDEN)

    def step(x):
        y, aux, counts = layer(torch.tanh(before(x)))
        return (y.square().sum() + aux) * 2, counts

    x = torch.randn(11, HIDDEN)
    results = []
    for function in (step, torch.compile(step, backend=backend)):
        layer.zero_grad()
        loss, counts = function(x)
        loss.backward()
        results.append([loss, counts, *[p.grad.clone() for p in layer.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert int(layer.gate.step_counts.sum()) == 2 * 22
    torch._dynamo.reset()


def test_loads_are_taken_once():
    model = nn.Sequential(make_layer(SwiGLU(), drop_tokens=True, capacity_factor=0.5, min_capacity=1))
    x = torch.randn(32, HIDDEN, dtype=torch.float64)
    for _ in range(2):
        model(x)
    (load,) = take_layer_loads(model)
    assert load.name == "0"
    assert int(load.selected_E.sum()) == 2 * 64
    assert load.computed_rows == int(load.routed_E.sum()) < 128
    assert load.all_to_all_bytes == 0
    (load,) = take_layer_loads(model)
    assert int(load.selected_E.sum()) == load.computed_rows == 0
    assert int(model[0].gate.step_counts.sum()) == 128  # the balancing bias keeps its own


def saved_bytes(layer, x):
    """Bytes autograd keeps for backward: each storage once, without parameters; and what was kept."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    storages, rows = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            rows.append((tensor.shape, tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = layer(x)
    assert x.untyped_storage().data_ptr() in storages
    del outputs
    return sum(storages.values()), rows


@pytest.mark.parametrize(
    ("activation", "dtype"), [("swiglu", torch.float32), ("gelu", torch.float32), ("gelu", torch.bfloat16)]
)
def test_saved_bytes_are_those_of_the_formula(activation, dtype):
    tokens, hidden, width, num_experts, k = 1024, 768, 256, 128, 8
    expert = SwiGLU(hidden, width) if activation == "swiglu" else gelu(hidden, width)
    settings = RouterSettings(top_k=k, drop_tokens=False)
    layer = RoutedMLP(TopKRouter(hidden, num_experts, settings=settings), Experts(expert, num_experts)).to(dtype)
    x = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    found, rows = saved_bytes(layer, x)
    matrices = 2 if activation == "swiglu" else 1
    itemsize = x.element_size()
    formula = tokens * hidden * itemsize + tokens * k * matrices * width * itemsize + 4 * tokens * num_experts
    print(f"{activation} {dtype}: {found / formula:.4f} of the formula")
    assert found <= 1.02 * formula
    assert not [shape for shape, _ in rows if shape == (tokens * k, hidden)], "rows of T*k are kept"
