"""Weights and rows that need no gradient: no product is made for one, and nothing is kept for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xmoe.kernels.reference import ExpertWeights
from xmoe.ops.expert_mlp import GradientSums, expert_mlp
from xmoe.testing import assignments_of

COUNTS = [3, 0, 2]
ROWS, D, F = 3, 8, 16
SHAPES = {"up": (F, D), "down": (D, F), "gate": (F, D), "up_bias": (F,), "down_bias": (D,), "gate_bias": (F,)}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


def weights(*kinds: str, experts: tuple[int, ...] = (0, 1, 2)) -> ExpertWeights:
    """Of three experts, biased swiglu; trainable are ``kinds`` of ``experts``."""
    made = torch.Generator().manual_seed(1)
    return ExpertWeights(
        **{
            field: [
                torch.randn(shape, generator=made).requires_grad_(field in kinds and expert in experts)
                for expert in range(len(COUNTS))
            ]
            for field, shape in SHAPES.items()
        }
    )


def run(experts: ExpertWeights, *, x_trains: bool, num_calls: int = 1) -> tuple[list[Tensor | None], int, list[Tensor]]:
    """Gradients (x, then every weight), matrix products of backward, tensors kept for it; ``num_calls`` alike."""
    made = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, D, generator=made).requires_grad_(x_trains)
    ids = torch.tensor([0, 1, 2, 0, 2], dtype=torch.int32)
    assignment_weights = torch.rand(5, generator=made).requires_grad_()
    kept: list[Tensor] = []
    sums, total = GradientSums(num_calls), torch.zeros(())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for _ in range(num_calls):
            y = expert_mlp(
                x,
                ids,
                assignments_of(ids, ROWS),
                assignment_weights,
                COUNTS,
                torch.tensor(COUNTS),
                experts=experts,
                activation="swiglu",
                sums=sums,
            )
            total = total + y.sum()
    with Products() as products:
        total.backward()
    assert assignment_weights.grad is not None
    return [x.grad, *(w.grad for field in SHAPES for w in getattr(experts, field))], products.num, kept


def is_kept(tensor: Tensor, kept: list[Tensor]) -> bool:
    return any(tensor.data_ptr() == other.data_ptr() for other in kept)


# Two of the experts have rows. Each of them always has the product from y to the hidden; x takes two, through up and
# through gate.
CASES = {
    "all": (tuple(SHAPES), True, 6),
    "frozen experts": ((), True, 3),
    "frozen rows": (tuple(SHAPES), False, 4),
    "down trains": (("down",), True, 4),
    "up trains": (("up",), False, 2),
    "biases train": (("up_bias", "gate_bias", "down_bias"), False, 1),
}


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_products_and_gradients_of_what_trains(name: str, num_calls: int):
    kinds, x_trains, each = CASES[name]
    every, _, _ = run(weights(*SHAPES), x_trains=True, num_calls=num_calls)
    experts = weights(*kinds)
    found, products, kept = run(experts, x_trains=x_trains, num_calls=num_calls)
    assert products == each * 2 * num_calls
    needed = [x_trains, *(field in kinds for field in SHAPES for _ in COUNTS)]
    for gradient, expected, trains in zip(found, every, needed, strict=True):
        assert (gradient is not None) == trains
        assert gradient is None or torch.equal(gradient, expected)
    # Rows are for the gradients of up and gate alone, up and gate for that of the rows.
    num_rows_kept = sum(tuple(t.shape) == (ROWS, D) for t in kept)
    assert num_rows_kept == (num_calls if {"up", "gate"} & set(kinds) else 0)
    for field in ("up", "gate"):
        assert is_kept(getattr(experts, field)[0], kept) == x_trains
    assert is_kept(experts.down[0], kept)


def test_one_expert_of_three_trains():
    kinds = tuple(SHAPES)
    every, _, _ = run(weights(*kinds), x_trains=False, num_calls=2)
    found, _, _ = run(weights(*kinds, experts=(2,)), x_trains=False, num_calls=2)
    for index, (gradient, expected) in enumerate(zip(found[1:], every[1:], strict=True)):
        if index % len(COUNTS) == 2:
            assert torch.equal(gradient, expected)
        else:
            assert gradient is None
