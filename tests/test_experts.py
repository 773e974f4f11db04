"""Experts: which modules run fused, and that fused and loop are the same function."""

import pytest
import torch
from torch import nn

from xmoe.experts import Experts, recognize
from xmoe.testing import assert_close, assignments_of
from xmoe.types import ExpertPlan, Rows


class Gated(nn.Module):
    """SwiGLU under the names given."""

    def __init__(self, names=("gate_proj", "up_proj", "down_proj"), *, bias=False, hidden=8, width=12, after=None):
        super().__init__()
        self.names, self.after = names, after
        for name in names[:2]:
            setattr(self, name, nn.Linear(hidden, width, bias=bias))
        setattr(self, names[2], nn.Linear(width, hidden, bias=bias))

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        y = down(nn.functional.silu(gate(x)) * up(x))
        return y if self.after is None else self.after(x, y)


class Plain(nn.Module):
    """fc2(act(fc1(x))), with hooks for what makes a module something else."""

    def __init__(self, act=nn.functional.gelu, *, after=None, linear=nn.Linear, bias=True, hidden=8, width=12):
        super().__init__()
        self.act, self.after = act, after
        self.fc1, self.fc2 = linear(hidden, width, bias=bias), linear(width, hidden, bias=bias)

    def forward(self, x):
        y = self.fc2(self.act(self.fc1(x)))
        return y if self.after is None else self.after(x, y)


class Megatron(nn.Module):
    """ParallelMLP's names and its (output, bias) result; ``add_bias=False`` leaves the bias to the caller."""

    def __init__(self, *, add_bias=True, bias=True):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(8, 12, bias=bias)
        self.dense_4h_to_h = nn.Linear(12, 8, bias=bias)
        self.add_bias = add_bias

    def forward(self, x):
        hidden = nn.functional.gelu(self.dense_h_to_4h(x))
        if self.add_bias:
            return self.dense_4h_to_h(hidden), None
        return nn.functional.linear(hidden, self.dense_4h_to_h.weight), self.dense_4h_to_h.bias


def tanh_gelu(x):
    return nn.functional.gelu(x, approximate="tanh")


KNOWN = {
    "gate_proj": (Gated(), "swiglu"),
    "gate_proj, bias": (Gated(bias=True), "swiglu"),
    "w1 w3 w2": (Gated(("w1", "w3", "w2")), "swiglu"),
    "fc1 fc2": (Plain(), "gelu"),
    "fc1 fc2, tanh, no bias": (Plain(tanh_gelu, bias=False), "gelu_tanh"),
    "relu": (Plain(torch.relu), "relu"),
    "sequential": (nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)), "gelu"),
    "sequential, tanh": (nn.Sequential(nn.Linear(8, 12), nn.GELU("tanh"), nn.Linear(12, 8)), "gelu_tanh"),
    "megatron": (Megatron(), "gelu"),
    "megatron, no bias": (Megatron(bias=False), "gelu"),
    "no dropout": (nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.Dropout(0.0)), "relu"),
}


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class SameLinear(nn.Linear):
    """Computes what nn.Linear does, now; what its author does with it later nobody knows."""


class LayerScale(Plain):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))  # ones: only another value of it shows

    def forward(self, x):
        return super().forward(x) * self.scale


class Counting(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


def tied():
    module = Gated()
    module.up_proj.weight = module.gate_proj.weight
    return module


UNKNOWN = {
    "dropout": nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.Dropout(0.1)),
    "residual": Plain(after=lambda x, y: x + y),
    "scaled": Plain(after=lambda x, y: 0.5 * y),
    "layer scale": LayerScale(),
    "buffer": Counting(),
    "tied": tied(),
    "other activation": Plain(torch.sigmoid),
    "silu": Plain(nn.functional.silu),
    "clamped before": Plain(lambda v: nn.functional.gelu(v.clamp(max=50.0))),
    "clamped after": Gated(after=lambda x, y: y.clamp(-1e4, 1e4)),
    "epsilon": Plain(after=lambda x, y: y * (x.abs().amax(-1, keepdim=True) > 1e-3)),
    "scaling linear": Plain(linear=ScaledLinear),
    "linear of another class": Plain(linear=SameLinear),
    "bias left to the caller": Megatron(add_bias=False),
    "gate and up swapped": Gated(("up_proj", "gate_proj", "down_proj")),
    "three layers": nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
    "no module of ours": nn.Identity(),
    "raises": Plain(lambda v: v[:, :, :, 0]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_modules_are_recognised(name):
    module, activation = KNOWN[name]
    state = torch.get_rng_state()
    formula = recognize(module)
    assert formula is not None
    assert formula.activation == activation
    assert torch.equal(state, torch.get_rng_state())
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    assert recognize(module) == formula, "of zero weights"


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_modules_are_not(name):
    assert recognize(UNKNOWN[name]) is None


COUNTS = [3, 0, 5, 1]


def make_rows(num_rows=6, *, dtype=torch.float64):
    ids = torch.cat([torch.randperm(num_rows)[:n] for n in COUNTS]).int()
    plan = ExpertPlan(
        row_ids_M=ids,
        assignments_RK=assignments_of(ids, num_rows),
        counts_e=torch.tensor(COUNTS),
        tokens_per_local_expert=COUNTS,
    )
    weights = torch.rand(len(ids), dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    return Rows(x_RD=torch.randn(num_rows, 8, dtype=dtype, requires_grad=True), weights_M=weights), plan


def run_both_ways(experts, rows, plan, upstream):
    """(y, gradients) fused and in the loop."""
    leaves = [rows.x_RD, rows.weights_M, *experts.parameters()]
    results = []
    for forward in (experts.forward, experts._loop):
        y = forward(rows, plan)
        results.append([y, *torch.autograd.grad(y, leaves, upstream, allow_unused=True, materialize_grads=True)])
    return results


@pytest.mark.parametrize("name", KNOWN)
def test_fused_equals_the_loop_over_modules(name):
    experts = Experts(KNOWN[name][0], 4).double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    rows, plan = make_rows()
    fused, looped = run_both_ways(experts, rows, plan, torch.randn(6, 8, dtype=torch.float64))
    for a, b in zip(fused, looped, strict=True):
        assert_close(a, b)
    mine = list(experts.modules_in_order()[1].parameters())
    leaves = list(experts.parameters())
    for parameter, grad in zip(leaves, fused[3:], strict=True):
        if any(parameter is p for p in mine):
            assert bool((grad == 0).all())
            assert not bool(torch.signbit(grad).any())


class Seen(nn.Module):
    """An expert no formula knows, which writes down how many rows it was given."""

    def __init__(self, tuples):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.tuples, self.seen = tuples, []

    def forward(self, x):
        assert x.dim() == 3
        self.seen.append(tuple(x.shape))
        y = torch.tanh(self.fc(x))
        return (y, self.fc.bias) if self.tuples else y


@pytest.mark.parametrize("tuples", [False, True])
def test_every_fallback_expert_is_called_and_gets_a_gradient(tuples):
    # Public thread: DeepSpeed#5066 (an expert without tokens, whose hooks never fire, hangs the others).
    experts = Experts(Seen(tuples), 4).double()
    rows, plan = make_rows()
    y = experts(rows, plan)
    expected = torch.zeros_like(y)
    start = 0
    for e, expert in enumerate(experts.modules_in_order()):
        assert expert.seen == [(1, COUNTS[e], 8)]
        for m in range(start, start + COUNTS[e]):
            row = plan.row_ids_M[m]
            expected[row] = expected[row] + rows.weights_M[m] * torch.tanh(expert.fc(rows.x_RD[row]))
        start += COUNTS[e]
    assert_close(y, expected)
    y.sum().backward()
    assert all(p.grad is not None for p in experts.parameters())
    assert bool((experts.modules_in_order()[1].fc.weight.grad == 0).all())


def count_loops(experts):
    calls = []
    loop = experts._loop
    experts._loop = lambda *args: calls.append(1) or loop(*args)
    return calls


def altered(kind):
    experts = Experts(Plain(), 4).double()
    victim = experts.modules_in_order()[2]
    if kind == "hook":
        victim.fc1.register_forward_hook(lambda module, args, out: 3 * out)
    elif kind == "pre-hook":
        victim.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    elif kind == "replaced layer":
        victim.fc2 = ScaledLinear(12, 8).double()
    elif kind == "replaced forward":
        victim.forward = lambda x: x
    else:
        torch.nn.utils.parametrizations.weight_norm(victim.fc1)
    return experts


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "replaced layer", "replaced forward", "parametrization"])
def test_an_expert_altered_after_construction_is_run_as_it_is(kind):
    experts = altered(kind)
    calls = count_loops(experts)
    rows, plan = make_rows()
    y = experts(rows, plan)
    assert calls == [1]
    start = sum(COUNTS[:2])
    mine = plan.row_ids_M[start : start + COUNTS[2]]
    victim = experts.modules_in_order()[2]
    others = torch.zeros_like(y)
    for e in (0, 1, 3):
        at = slice(sum(COUNTS[:e]), sum(COUNTS[: e + 1]))
        ids = plan.row_ids_M[at]
        others = others.index_add(0, ids, experts.modules_in_order()[e](rows.x_RD[ids]) * rows.weights_M[at, None])
    weighted = victim(rows.x_RD[mine]) * rows.weights_M[start : start + COUNTS[2], None]
    assert_close(y, others.index_add(0, mine, weighted))


def test_autocast_runs_in_its_dtype_and_trains_float32_weights():
    experts = Experts(Gated(), 4)
    rows, plan = make_rows(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(rows, plan)
        looped = experts._loop(rows, plan)
    assert_close(y, looped, dtype=torch.bfloat16)
    y.float().square().sum().backward()
    assert {p.grad.dtype for p in experts.parameters()} == {torch.float32}
    assert rows.x_RD.grad.dtype == torch.float32
    wide = [p.grad for p in experts.parameters()]
    experts.zero_grad()
    experts(rows, plan).square().sum().backward()
    for a, p in zip(wide, experts.parameters(), strict=True):
        assert_close(a, p.grad, dtype=torch.bfloat16)


def randomize(module, logical_id):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=1.0 + logical_id)


@pytest.mark.parametrize("per_rank", [1, 2, 4])
def test_each_expert_starts_the_same_whatever_the_split(per_rank):
    torch.manual_seed(7)
    whole = Experts(Plain(), 4, initialize=randomize).state_dict()
    for first in range(0, 4, per_rank):
        torch.manual_seed(7)
        part = Experts(Plain(), per_rank, first_id=first, initialize=randomize).state_dict()
        for name, value in part.items():
            _, local, rest = name.split(".", 2)
            assert torch.equal(value, whole[f"mlps.{first + int(local)}.{rest}"])


def test_initialisation_differs_between_experts_and_layers_and_needs_no_seed():
    torch.seed()  # 64 random bits: what a program that never seeds has
    one, two = Experts(Plain(), 2, initialize=randomize), Experts(Plain(), 2, initialize=randomize)
    weights = [e.fc1.weight for layer in (one, two) for e in layer.modules_in_order()]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
    copies = Experts(Plain(), 2).modules_in_order()
    assert torch.equal(copies[0].fc1.weight, copies[1].fc1.weight)
