"""The twins against loops over single numbers."""

import math

import pytest
import torch

from xmoe.kernels.reference import (
    ExpertWeights,
    combine_rows,
    count_ids,
    expert_mlp_backward,
    expert_mlp_forward,
    gather_rows,
    ranks_within_expert,
    sort_slots,
    top_k_ids,
)
from xmoe.testing import assert_close, assignments_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
SIZES = [(0, 4, 2), (1, 1, 1), (3, 8, 1), (5, 3, 3), (63, 7, 4), (257, 16, 2)]  # tokens, experts, K


def random_ids(num_tokens, num_experts, top_k, *, dropped=0.3):
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)] or [torch.empty(0, top_k)])
    return ids.long().view(num_tokens, top_k).masked_fill(torch.rand(num_tokens, top_k) < dropped, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
def test_top_k_ids_orders_ties_by_id(num_tokens, num_experts, top_k, dtype):
    scores = torch.randint(0, 3, (num_tokens, num_experts)).to(dtype)
    expected = [sorted(range(num_experts), key=lambda e: (-row[e], e))[:top_k] for row in scores.tolist()]
    assert top_k_ids(scores, top_k).tolist() == expected


def test_top_k_ids_leaves_its_input_and_accepts_minus_infinity():
    scores = torch.tensor([[-math.inf, 0.0, -math.inf]])
    assert top_k_ids(scores, 2)[0, 0] == 1
    assert scores.tolist() == [[-math.inf, 0.0, -math.inf]]


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
def test_integers_equal_loops(num_tokens, num_experts, top_k):
    ids = random_ids(num_tokens, num_experts, top_k)
    flat = ids.flatten().tolist()
    assert count_ids(ids.int(), num_experts).tolist() == [flat.count(e) for e in range(num_experts)]
    by_expert = [slot for e in [*range(num_experts), -1] for slot, found in enumerate(flat) if found == e]
    slots, places = sort_slots(ids.int(), num_experts)
    assert slots.tolist() == by_expert
    assert [by_expert[place] for place in places.tolist()] == list(range(num_tokens * top_k))
    assert slots.dtype == places.dtype == torch.int32

    priorities = torch.randint(0, 3, ids.shape)
    places = ranks_within_expert(ids, priorities, num_experts)
    values = priorities.flatten().tolist()
    for slot, expert in enumerate(flat):
        if expert >= 0:
            better = sum(
                other == expert and (values[i] > values[slot] or (values[i] == values[slot] and i < slot))
                for i, other in enumerate(flat)
            )
            assert places.flatten()[slot] == better


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
def test_gather_and_combine_equal_loops(num_tokens, num_experts, top_k, dtype):
    ids = random_ids(num_tokens, num_experts, top_k)
    slots, places = sort_slots(ids, num_experts)
    slots, places = slots[: int((ids >= 0).sum())], places.view(num_tokens, top_k)
    x = torch.randn(num_tokens, 9).to(dtype)
    rows = gather_rows(x, slots, top_k)
    assert all(torch.equal(rows[n], x[slot // top_k]) for n, slot in enumerate(slots.tolist()))

    rows = torch.randn(len(slots), 9).to(dtype)
    expected = torch.zeros(num_tokens, 9, dtype=torch.float64)
    for n, slot in enumerate(slots.tolist()):
        expected[slot // top_k] += rows[n].double()
    assert_close(combine_rows(rows, places), expected)


# Rows per expert; rows of one expert are distinct tokens.
COUNTS = {
    "mixed": [5, 0, 4, 3],
    "none": [0, 0],
    "all on one": [0, 7, 0],
    "single rows": [1, 1, 0, 1],
    "off every block": [63, 1, 0, 65],
}


def make_case(counts, activation, *, dtype, biases, hidden=12, width=20):
    num_rows = max([*counts, 1]) + 3  # three rows at least take no expert
    owned = [torch.randperm(num_rows - 3)[:n] for n in counts]
    row_ids = torch.cat(owned).int()

    def weights(out, inner):
        return [(torch.randn(out, inner) * inner**-0.5).to(dtype) for _ in counts]

    gated = activation == "swiglu"
    experts = ExpertWeights(
        up=weights(width, hidden),
        down=weights(hidden, width),
        gate=weights(width, hidden) if gated else [],
        up_bias=[torch.randn(width).to(dtype) for _ in counts] if biases else [],
        down_bias=[torch.randn(hidden).to(dtype) for _ in counts] if biases else [],
        gate_bias=[torch.randn(width).to(dtype) for _ in counts] if biases and gated else [],
    )
    x = torch.randn(num_rows, hidden).to(dtype)
    x[-1] = float("nan")  # a row nobody owns may hold anything
    weights_M = torch.rand(len(row_ids), dtype=torch.promote_types(dtype, torch.float32))
    return x, row_ids, weights_M, experts


def naive(x, row_ids, weights, counts, experts, activation):
    """One assignment after the other, in float64 with autograd."""
    act = {
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
        "relu": torch.relu,
    }.get(activation)
    out = [torch.zeros(x.shape[1], dtype=torch.float64) for _ in x]
    owner = [e for e, n in enumerate(counts) for _ in range(n)]
    for m, (row, e) in enumerate(zip(row_ids.tolist(), owner, strict=True)):
        up = experts.up[e] @ x[row] + (experts.up_bias[e] if experts.up_bias else 0)
        if activation == "swiglu":
            gate = experts.gate[e] @ x[row] + (experts.gate_bias[e] if experts.gate_bias else 0)
            hidden = gate * torch.sigmoid(gate) * up
        else:
            hidden = act(up)
        y = experts.down[e] @ hidden + (experts.down_bias[e] if experts.down_bias else 0)
        out[row] = out[row] + weights[m] * y
    return torch.stack(out)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(
    ("activation", "dtype", "biases"),
    [
        ("swiglu", torch.float64, True),
        ("swiglu", torch.float32, False),
        ("gelu", torch.float64, False),
        ("gelu", torch.bfloat16, True),
        ("gelu_tanh", torch.float64, True),
        ("relu", torch.float32, True),
    ],
)
def test_expert_mlp_equals_a_loop(counts, activation, dtype, biases):
    x, row_ids, weights, experts = make_case(counts, activation, dtype=dtype, biases=biases)
    wide = {f: [w.double().clone().requires_grad_() for w in getattr(experts, f)] for f in ExpertWeights.FIELDS}
    x64 = x.double().nan_to_num().requires_grad_()
    weights64 = weights.double().clone().requires_grad_()
    expected = naive(x64, row_ids, weights64, counts, ExpertWeights(**wide), activation)
    upstream = torch.randn_like(x)
    if len(row_ids):
        expected.backward(upstream.double())

    kinds = {"experts": experts, "activation": activation}
    plan = (row_ids, assignments_of(row_ids, len(x)), weights, counts, torch.tensor(counts))
    y, up, gate = expert_mlp_forward(x, *plan, **kinds)
    assert y.dtype == dtype
    assert_close(y, expected, what="y")
    grad_x, grad_weights, grads = expert_mlp_backward(upstream, x, *plan, up_MF=up, gate_MF=gate, **kinds)
    assert_close(grad_x, x64.grad if x64.grad is not None else torch.zeros_like(x64), what="x")
    if len(row_ids) >= 8 or dtype != torch.bfloat16:  # in bfloat16 the RMS of three cancelling sums says little
        assert_close(grad_weights, weights64.grad if len(row_ids) else weights64, dtype=dtype, what="weights")
    for field in ExpertWeights.FIELDS:
        found = getattr(grads, field)
        assert len(found) == len(wide[field]), field
        for e, (actual, leaf) in enumerate(zip(found, wide[field], strict=True)):
            if counts[e] == 0:
                assert torch.equal(actual, torch.zeros_like(actual)), f"{field}[{e}] of an expert without rows"
            else:
                assert_close(actual, leaf.grad, what=f"{field}[{e}]")
