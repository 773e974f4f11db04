"""The routed expert MLP composed of kernels, forward and backward, against autograd over single assignments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from gemm_oracle import act, matrices
from torch import Tensor

from xmoe.kernels import reference
from xmoe.kernels import triton_kernels as kernels
from xmoe.kernels.launch import counting, recording
from xmoe.kernels.reference import ExpertWeights
from xmoe.kernels.tuning import INTERPRETER, Config, config_for, forcing
from xmoe.testing import assert_close

FIELDS = ExpertWeights.FIELDS
BIASES = {"up_bias", "down_bias", "gate_bias"}


def random_ids(tokens: int, experts: int, top_k: int, *, dropped: float) -> Tensor:
    """Experts of each token, distinct, some of them dropped (-1)."""
    chosen = torch.rand(tokens, experts).argsort(dim=1)[:, :top_k]
    return chosen.masked_fill(torch.rand(tokens, top_k) < dropped, -1)


CASES: dict[str, Any] = {
    "k=1": lambda: (random_ids(31, 2, 1, dropped=0.0), 2),
    "k=2, drops, an expert without rows": lambda: (random_ids(30, 3, 2, dropped=0.3), 5),
    "k=E": lambda: (random_ids(7, 3, 3, dropped=0.0), 3),
    "all on one": lambda: (torch.full((17, 1), 2), 4),
    "all dropped": lambda: (torch.full((3, 2), -1), 2),
    "one token": lambda: (torch.zeros(1, 1, dtype=torch.int64), 1),
    "no token": lambda: (torch.zeros(0, 2, dtype=torch.int64), 2),
}


@dataclass(frozen=True)
class Problem:
    """Tokens as rows, and the plan's integers for them."""

    x: Tensor
    upstream: Tensor
    row_ids: Tensor
    assignments: Tensor
    weights: Tensor
    counts: Sequence[int]
    owners: list[int]
    experts: ExpertWeights
    activation: str

    @property
    def plan(self) -> tuple[Any, ...]:
        return self.row_ids, self.assignments, self.weights, self.counts, torch.tensor(self.counts)

    def run(self, side: Any = kernels) -> tuple[Tensor, Tensor, Tensor, ExpertWeights]:
        """y, and the gradients of x, of the weights of assignments, and of the experts."""
        kinds: dict[str, Any] = {"experts": self.experts, "activation": self.activation}
        y, up, gate = side.expert_mlp_forward(self.x, *self.plan, **kinds)
        grads = side.expert_mlp_backward(self.upstream, self.x, *self.plan, **kinds, up_MF=up, gate_MF=gate)
        return y, *grads


def problem(
    ids_TK: Tensor,
    num_experts: int,
    *,
    activation: str = "swiglu",
    biased: bool = False,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int] = (18, 17),
) -> Problem:
    (tokens, top_k), (width, expert_width) = ids_TK.shape, sizes
    slots, places = reference.sort_slots(ids_TK.int(), num_experts)
    counts = reference.count_ids(ids_TK, num_experts).tolist()
    shapes = {"up": (expert_width, width), "down": (width, expert_width), "gate": (expert_width, width)}
    shapes |= {"up_bias": (expert_width,), "down_bias": (width,), "gate_bias": (expert_width,)}
    owned = [f for f in FIELDS if (biased or f not in BIASES) and (activation == "swiglu" or "gate" not in f)]
    return Problem(
        x=torch.randn(tokens, width).to(dtype),
        upstream=torch.randn(tokens, width).to(dtype),
        row_ids=slots[: sum(counts)] // top_k,
        assignments=places.view(tokens, top_k),
        weights=torch.rand(sum(counts)),
        counts=counts,
        owners=[expert for expert, count in enumerate(counts) for _ in range(count)],
        experts=ExpertWeights(**{f: matrices(num_experts, *shapes[f], dtype=dtype) for f in owned}),
        activation=activation,
    )


def oracle(p: Problem) -> tuple[Tensor, Tensor, Tensor, ExpertWeights]:
    """What ``p.run()`` should give, one assignment after the other in float64."""

    def leaf(value: Tensor) -> Tensor:
        return value.double().requires_grad_()

    x, weights = leaf(p.x), leaf(p.weights)
    experts = ExpertWeights(**{field: [leaf(w) for w in getattr(p.experts, field)] for field in FIELDS})

    def through(name: str, value: Tensor, expert: int) -> Tensor:
        biases = getattr(experts, f"{name}_bias")
        return getattr(experts, name)[expert] @ value + (biases[expert] if biases else 0)

    y = [torch.zeros(p.x.shape[1], dtype=torch.float64) for _ in x]
    for m, (row, expert) in enumerate(zip(p.row_ids.tolist(), p.owners, strict=True)):
        gate = through("gate", x[row], expert) if experts.gate else None
        y[row] = y[row] + weights[m] * through("down", act(through("up", x[row], expert), gate, p.activation), expert)
    total = torch.stack(y) if y else torch.zeros_like(x)
    if p.owners:
        (total * p.upstream.double()).sum().backward()
    leaves = [x, weights, *(w for field in FIELDS for w in getattr(experts, field))]
    grads = iter([one.grad if one.grad is not None else torch.zeros_like(one).detach() for one in leaves])
    d_x, d_weights = next(grads), next(grads)
    d_experts = ExpertWeights(**{field: [next(grads) for _ in getattr(experts, field)] for field in FIELDS})
    return total.detach(), d_x, d_weights, d_experts


def assert_equals_oracle(p: Problem, found: tuple[Tensor, Tensor, Tensor, ExpertWeights]) -> None:
    expected = oracle(p)
    assert (found[0].dtype, found[1].dtype, found[2].dtype) == (p.x.dtype, p.x.dtype, torch.float32)
    for name, one, other in zip(("y", "x", "weights"), found, expected, strict=False):
        assert_close(one, other, dtype=p.x.dtype, what=name)
    for field in FIELDS:
        ones, others = getattr(found[3], field), getattr(expected[3], field)
        assert len(ones) == len(others), field
        for expert, (one, other) in enumerate(zip(ones, others, strict=True)):
            assert one.dtype == p.x.dtype
            if p.counts[expert]:
                assert_close(one, other, what=f"{field}[{expert}]")
            else:
                assert torch.equal(one, torch.zeros_like(one)), f"{field}[{expert}] of an expert without rows"


@pytest.mark.parametrize(
    ("case", "activation", "biased"),
    [
        *((case, "swiglu", False) for case in CASES),
        *((case, "gelu", True) for case in ("k=E", "all on one", "no token")),
    ],
)
def test_equals_autograd_over_assignments(case: str, activation: str, biased: bool):
    p = problem(*CASES[case](), activation=activation, biased=biased)
    assert_equals_oracle(p, p.run())


@pytest.mark.parametrize(("activation", "biased"), [("swiglu", True), ("gelu_tanh", False), ("relu", True)])
def test_every_activation(activation: str, biased: bool):
    p = problem(random_ids(20, 3, 2, dropped=0.2), 3, activation=activation, biased=biased)
    found = p.run()
    assert_equals_oracle(p, found)
    twin = p.run(reference)
    for one, other in zip(found[:3], twin[:3], strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(
    ("dtype", "activation", "biased"), [(torch.bfloat16, "swiglu", False), (torch.float16, "gelu", True)]
)
def test_sixteen_bits(dtype: torch.dtype, activation: str, biased: bool):
    p = problem(random_ids(30, 2, 2, dropped=0.1), 2, activation=activation, biased=biased, dtype=dtype, sizes=(32, 48))
    assert_equals_oracle(p, p.run())


def test_two_runs_agree_bit_by_bit():
    p = problem(random_ids(12, 2, 2, dropped=0.2), 2, biased=True, dtype=torch.bfloat16)
    for one, other in zip(p.run()[:3], p.run()[:3], strict=True):
        assert torch.equal(one, other)


def test_a_row_that_no_assignment_reads_may_hold_anything():
    p = problem(torch.tensor([[0, 1], [-1, -1], [1, -1]]), 2)
    expected = oracle(p)
    p.x[1] = p.upstream[1] = float("nan")
    found = p.run()
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])


def test_rows_are_cut_once_for_each_height_in_use():
    """Configurations of one height share a schedule; another height gets one of its own."""

    def launched(p: Problem) -> int:
        with counting() as launches:
            assert_equals_oracle(p, p.run())
        return launches["tile_schedule"]

    p = problem(random_ids(20, 2, 2, dropped=0.2), 2)
    assert launched(p) == 2
    config = config_for("grouped_dgrad", arch=INTERPRETER, dtype=p.x.dtype)
    with forcing({"grouped_dgrad": Config(blocks={**config.blocks, "BLOCK_M": 32})}):
        assert launched(p) == 3


@pytest.mark.parametrize("arch", ["gfx90a", "sm_90"])
@pytest.mark.parametrize(("activation", "biased", "launches"), [("swiglu", False, (4, 7)), ("gelu", True, (4, 8))])
def test_nothing_is_read_back_by_the_host(arch: str, activation: str, biased: bool, launches: tuple[int, int]):
    """Meta tensors have no data to read. Launches are fixed by the form of the experts, not by their number."""
    meta = partial(torch.empty, device="meta")
    rows, integers = partial(meta, dtype=torch.bfloat16), partial(meta, dtype=torch.int32)
    owned = {"up": (2048, 1024), "down": (1024, 2048)}
    owned |= {"up_bias": (2048,), "down_bias": (1024,)} if biased else {}
    owned |= {"gate": (2048, 1024)} if activation == "swiglu" else {}
    experts = ExpertWeights(**{field: [rows(*shape) for _ in range(16)] for field, shape in owned.items()})
    plan = integers(800), integers(100, 8), meta(800), None, meta(16, dtype=torch.int64)
    given: Any = {"experts": experts, "activation": activation}
    with recording(arch) as forward:
        y, up, gate = kernels.expert_mlp_forward(rows(100, 1024), *plan, **given)
    with recording(arch) as backward:
        d_x, d_weights, _ = kernels.expert_mlp_backward(y, rows(100, 1024), *plan, **given, up_MF=up, gate_MF=gate)
    assert (y.shape, d_x.shape, d_weights.shape) == ((100, 1024), (100, 1024), (800,))
    assert (len(forward), len(backward)) == launches, [[call.name for call in calls] for calls in (forward, backward)]
