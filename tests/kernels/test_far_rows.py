"""Rows and matrices more than 2^31 elements from their tensor's start give what near ones give.

Buffers are allocated lazily: only pages that a kernel, or the test, touches become resident. Where an output has as
many rows, only the programs of the last ones run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Chosen, Grid, only_programs
from torch import Tensor

from xmoe.kernels import triton_kernels as kernels
from xmoe.kernels.ragged import Stacked, TileSchedule
from xmoe.kernels.reference_gating import GateRule
from xmoe.kernels.tuning import INTERPRETER, config_for

# As they are before any test poisons them, and with them every page of a buffer.
ALLOCATORS = [(torch, "empty", torch.empty), (torch, "empty_like", torch.empty_like)]
ALLOCATORS += [(torch.Tensor, "new_empty", torch.Tensor.new_empty)]

WIDTH = 64
NUM_ROWS = 5
FAR = 2**31 // WIDTH + 3  # the first far row
BOUND_BYTES = 300e6
DTYPE = torch.bfloat16
BLOCK_M = 16


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


@pytest.fixture(autouse=True)
def lazy(_poison_integers: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No poison, and no test may make more than a little of its buffers resident."""
    for owner, name, original in ALLOCATORS:
        monkeypatch.setattr(owner, name, original)
    before = resident_bytes()
    yield
    assert resident_bytes() - before < BOUND_BYTES


def rows(width: int = WIDTH, dtype: torch.dtype = DTYPE, count: int = NUM_ROWS) -> Tensor:
    return torch.randn(count, width).to(dtype)


def far(near: Tensor) -> Tensor:
    """A tensor of FAR rows that nobody touched, and after them ``near``'s."""
    buffer = torch.empty((FAR + near.shape[0], *near.shape[1:]), dtype=near.dtype)
    buffer[FAR:] = near
    return buffer


def near_and_far_ids() -> tuple[Tensor, Tensor]:
    ids = torch.randperm(NUM_ROWS, dtype=torch.int32)
    return ids, ids + FAR


def of_last_rows(kernel: str, grid: Grid) -> Chosen:
    """The programs whose first grid index is among the last NUM_ROWS."""
    rest = 1
    for extent in grid[1:]:
        rest *= extent
    return Chosen(grid, list(range(max(0, grid[0] - NUM_ROWS) * rest, grid[0] * rest)))


def one_tile(first: int, num_rows: int) -> TileSchedule:
    """Rows from ``first`` on are those of the only expert; ``num_rows`` of them, less than a tile."""
    integers = [torch.tensor(values, dtype=torch.int32) for values in ([first, first + num_rows], [0], [first], [1])]
    names = ("offsets_e1", "tile_expert", "tile_row", "num_tiles")
    fields: dict[str, Any] = dict(zip(names, integers, strict=True))
    return TileSchedule(**fields, max_tiles=1, num_rows=first + num_rows, block_m=BLOCK_M)


def stacked(last: Tensor) -> tuple[Stacked, Stacked]:
    """Three experts' matrices, near each other and 2^30 elements apart (32 bits hold the stride); the last has rows."""
    apart = 2**30 + 16
    buffer = torch.empty(2 * apart + last.numel(), dtype=last.dtype)
    buffer[2 * apart :] = last.flatten()
    close = torch.stack([torch.zeros_like(last), torch.zeros_like(last), last])
    return (
        Stacked(first=close[0], stride=last.numel(), num_experts=3),
        Stacked(first=buffer[: last.numel()].view_as(last), stride=apart, num_experts=3),
    )


LAST_EXPERT = TileSchedule(
    offsets_e1=torch.tensor([0, 0, 0, NUM_ROWS], dtype=torch.int32),
    tile_expert=torch.tensor([2], dtype=torch.int32),
    tile_row=torch.tensor([0], dtype=torch.int32),
    num_tiles=torch.tensor([1], dtype=torch.int32),
    max_tiles=3,
    num_rows=NUM_ROWS,
    block_m=BLOCK_M,
)


def assert_same(found: Any, expected: Any) -> None:
    """Bit by bit; the far result may have rows in front that nobody wrote."""
    if isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif expected is not None:
        assert expected.isfinite().all()
        assert expected.any()
        assert torch.equal(found[found.shape[0] - expected.shape[0] :], expected)


def test_gather_from_far_rows():
    x = rows()
    near, there = near_and_far_ids()
    assert_same(kernels.gather_rows(far(x), there * 2 + 1, 2), kernels.gather_rows(x, near * 2 + 1, 2))


def test_gather_to_far_rows():
    x, weights = rows(), torch.rand(NUM_ROWS)
    near, _ = near_and_far_ids()
    expected = kernels.gather_rows(x, near, 1, weights)
    with only_programs(of_last_rows):
        assert_same(kernels.gather_rows(x, far(near), 1, far(weights)), expected)


def test_combine_from_far_rows():
    x, weights = rows(), torch.rand(3, 2)
    near = torch.tensor([[3, 0], [-1, 4], [1, 2]], dtype=torch.int32)
    there = torch.where(near < 0, -1, near + FAR)
    expected = kernels.combine_rows(x, near, weights)
    assert_same(kernels.combine_rows(far(x), there, weights), expected)


def test_combine_to_far_rows():
    x = rows()
    near = torch.tensor([[3], [0], [-1], [4], [1]], dtype=torch.int32)
    expected = kernels.combine_rows(x, near)
    with only_programs(of_last_rows):
        assert_same(kernels.combine_rows(x, far(near)), expected)


def test_row_dot_with_far_rows():
    a, b = rows(), rows()
    near, there = near_and_far_ids()
    expected = kernels.row_dot(a, b, near, 1)
    assert_same(kernels.row_dot(a, far(b), there, 1), expected)
    with only_programs(of_last_rows):
        assert_same(kernels.row_dot(far(a), b, far(near), 1), expected)


def test_segment_sums_of_far_rows():
    x, weights = rows(), torch.rand(NUM_ROWS)
    near, there = near_and_far_ids()
    offsets = torch.tensor([0, 2, NUM_ROWS], dtype=torch.int32)
    assert_same(kernels.segment_sums(far(x), offsets + FAR), kernels.segment_sums(x, offsets))
    expected = kernels.segment_sums(x, offsets, row_ids_M=near, weights_M=weights)
    assert_same(kernels.segment_sums(far(x), offsets, row_ids_M=there, weights_M=weights), expected)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_activations_of_far_rows(activation: str):
    d_hidden, up, weights = rows(), rows(), torch.rand(NUM_ROWS)
    gate = rows() if activation == "swiglu" else None
    forward = kernels.activation_forward(up, gate, weights, activation)
    backward = kernels.activation_backward(d_hidden, up, gate, weights, activation)
    there = [far(x) if x is not None else None for x in (up, gate, weights)]
    with only_programs(of_last_rows):
        assert_same(kernels.activation_forward(*there, activation), forward)
        assert_same(kernels.activation_backward(far(d_hidden), *there, activation), backward)


Grouped = Callable[[Callable[[Tensor], Tensor], Stacked, TileSchedule, Tensor | None], Any]


def _forward(place: Callable[[Tensor], Tensor], weight: Stacked, schedule: TileSchedule, ids: Tensor | None) -> Any:
    torch.manual_seed(0)
    a, scale = rows(), place(torch.rand(NUM_ROWS))
    bias = Stacked(first=rows(count=1)[0], stride=0, num_experts=weight.num_experts)
    a = far(a) if ids is not None and int(ids[0]) >= FAR else a if ids is not None else place(a)
    return kernels.grouped_forward(a, weight, schedule, row_ids_M=ids, bias=bias, bias_scale_M=scale)


def _forward_activated(
    place: Callable[[Tensor], Tensor], weight: Stacked, schedule: TileSchedule, ids: Tensor | None
) -> Any:
    torch.manual_seed(0)
    x, weights = rows(), place(torch.rand(NUM_ROWS))
    gate = Stacked(first=rows(count=WIDTH), stride=0, num_experts=weight.num_experts)
    ids = place(torch.arange(NUM_ROWS, dtype=torch.int32)) if ids is None else ids
    x = far(x) if int(ids[-1]) >= FAR else x
    return kernels.grouped_forward_activated(
        x, weight, gate, schedule, row_ids_M=ids, weights_M=weights, activation="swiglu"
    )


def _dgrad(place: Callable[[Tensor], Tensor], weight: Stacked, schedule: TileSchedule, ids: Tensor | None) -> Any:
    torch.manual_seed(0)
    d_out, second = place(rows()), place(rows())
    return kernels.grouped_dgrad(d_out, weight, schedule, second=(second, weight))


def _dgrad_activated(
    place: Callable[[Tensor], Tensor], weight: Stacked, schedule: TileSchedule, ids: Tensor | None
) -> Any:
    torch.manual_seed(0)
    dy, up, gate, weights = rows(), place(rows()), place(rows()), place(torch.rand(NUM_ROWS))
    ids = place(torch.arange(NUM_ROWS, dtype=torch.int32)) if ids is None else ids
    dy = far(dy) if int(ids[-1]) >= FAR else dy
    return kernels.grouped_dgrad_activated(
        dy,
        weight,
        schedule,
        row_ids_M=ids,
        up_MF=up,
        gate_MF=gate,
        weights_M=weights,
        activation="swiglu",
    )


GROUPED = [_forward, _forward_activated, _dgrad, _dgrad_activated]


def here(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("call", GROUPED)
def test_grouped_gemms_with_weights_far_apart(call: Grouped):
    near, there = stacked(rows(count=WIDTH))
    assert_same(call(here, there, LAST_EXPERT, None), call(here, near, LAST_EXPERT, None))


@pytest.mark.parametrize("call", GROUPED)
def test_grouped_gemms_of_far_assignments(call: Grouped):
    weight = Stacked(first=rows(count=WIDTH), stride=WIDTH * WIDTH, num_experts=1)
    expected = call(here, weight, one_tile(0, NUM_ROWS), None)
    assert_same(call(far, weight, one_tile(FAR, NUM_ROWS), None), expected)


@pytest.mark.parametrize("call", [_forward, _forward_activated, _dgrad_activated])
def test_grouped_gemms_of_far_gathered_rows(call: Grouped):
    weight = Stacked(first=rows(count=WIDTH), stride=WIDTH * WIDTH, num_experts=1)
    near, there = near_and_far_ids()
    schedule = one_tile(0, NUM_ROWS)
    assert_same(call(here, weight, schedule, there), call(here, weight, schedule, near))


@pytest.mark.parametrize("gathered", [None, "x", "d_out"])
def test_weight_gradients_of_far_rows(gathered: str | None):
    d_out, x = rows(), rows()
    near, there = near_and_far_ids()
    if gathered is None:
        expected = kernels.grouped_wgrad(d_out, x, one_tile(0, NUM_ROWS))
        assert_same(kernels.grouped_wgrad(far(d_out), far(x), one_tile(FAR, NUM_ROWS)), expected)
        return
    schedule = one_tile(0, NUM_ROWS)
    expected = kernels.grouped_wgrad(d_out, x, schedule, row_ids_M=near, gathered=gathered)
    sides = (far(d_out), x) if gathered == "d_out" else (d_out, far(x))
    assert_same(kernels.grouped_wgrad(*sides, schedule, row_ids_M=there, gathered=gathered), expected)


def test_weight_gradients_to_far_matrices():
    d_out, x = rows(16), rows(16)
    expected = kernels.grouped_wgrad(d_out, x, one_tile(0, NUM_ROWS))
    num_experts = 2**31 // (16 * 16) + 3
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    offsets[-1] = NUM_ROWS
    last = one_tile(0, NUM_ROWS)
    schedule = TileSchedule(**{**vars(last), "offsets_e1": offsets})
    blocks = config_for("grouped_wgrad", arch=INTERPRETER, dtype=DTYPE).blocks
    assert (blocks["BLOCK_OUT"], blocks["BLOCK_IN"]) == (16, 16)  # one tile a matrix, and here one program a tile
    programs = Chosen((num_experts,), list(range(num_experts - 8, num_experts)))
    with only_programs(lambda kernel, grid: programs):
        found = kernels.grouped_wgrad(d_out, x, schedule)
    assert torch.equal(found[-1:], expected)
    assert found[-3:-1].count_nonzero() == 0


@pytest.mark.parametrize("given", [False, True])
def test_gating_of_far_tokens(given: bool):
    # Programs have as many tokens as make no difference to the last ones: every program has whole tiles.
    experts, rule = WIDTH, GateRule(top_k=2, z_sums=True)
    blocks = config_for("gate_forward", arch=INTERPRETER, dtype=torch.float32, width=experts).blocks
    size = blocks["BLOCK_T"] * blocks["TILES"]
    logits = torch.randn(FAR % size + NUM_ROWS, experts)
    ids = torch.topk(torch.rand(logits.shape), 2).indices.int()
    grads = {
        "grad_weights_TK": torch.randn(logits.shape[0], 2),
        "grad_share_sums_BE": torch.randn(1, experts),
        "grad_z_sums_B": torch.randn(1),
    }
    near = kernels.gate_forward(logits, rule, ids_TK=ids if given else None)
    near_grad = kernels.gate_backward(logits, ids, rule, **grads)

    def at_the_end(x: Tensor) -> Tensor:
        buffer = torch.empty((FAR // size * size + x.shape[0], *x.shape[1:]), dtype=x.dtype)
        buffer[buffer.shape[0] - x.shape[0] :] = x
        return buffer

    def last_programs(kernel: str, grid: Grid) -> Chosen:
        count = -(-logits.shape[0] // size) if kernel != "_gate_sums_kernel" else 0
        return Chosen(grid, list(range(grid[0] - count, grid[0])))

    there = at_the_end(logits)
    with only_programs(last_programs):
        found = kernels.gate_forward(there, rule, ids_TK=at_the_end(ids) if given else None)
        grads["grad_weights_TK"] = at_the_end(grads["grad_weights_TK"])
        found_grad = kernels.gate_backward(there, at_the_end(ids), rule, **grads)
    assert_same((found.ids_TK, found.weights_TK, found_grad), (near.ids_TK, near.weights_TK, near_grad))
