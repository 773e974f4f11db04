"""Row kernels: loops in float64 check the twins, twins and loops check the kernels."""

import pytest
import torch

from xmoe.kernels import reference, triton_kernels
from xmoe.kernels.reference import sort_slots
from xmoe.testing import assert_close

BACKENDS = [reference, triton_kernels]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_ids(num_tokens, num_experts, top_k, *, dropped=0.3):
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)] or [torch.empty(0, top_k)])
    return ids.int().view(num_tokens, top_k).masked_fill(torch.rand(num_tokens, top_k) < dropped, -1)


class Plan:
    """Slots of the kept rows and places of all slots."""

    def __init__(self, ids_TK):
        self.num_tokens, self.top_k = ids_TK.shape
        slots, places = sort_slots(ids_TK, int(ids_TK.max()) + 1 if ids_TK.numel() else 1)
        self.num_rows = int((ids_TK >= 0).sum())
        self.slots, self.places_TK = slots[: self.num_rows], places.view(ids_TK.shape)


PLANS = {
    "no tokens": torch.empty(0, 2, dtype=torch.int32),
    "one": torch.zeros(1, 1, dtype=torch.int32),
    "k is 1": lambda: random_ids(17, 7, 1),
    "k is E": lambda: random_ids(7, 5, 5),
    "off every block": lambda: random_ids(37, 16, 2),
    "all on one expert": lambda: torch.where(torch.arange(3) == 1, 2, -1).int().repeat(7, 1),
    "all dropped": torch.full((7, 3), -1, dtype=torch.int32),
    "none dropped": lambda: random_ids(17, 9, 3, dropped=0.0),
}
WIDTHS = {"off every block": 3, "no tokens": 40, "one": 1}
CASES = [
    *((name, torch.float32) for name in PLANS),
    *((name, torch.bfloat16) for name in ("one", "k is E", "off every block", "none dropped")),
    *((name, torch.float16) for name in ("one", "k is E", "none dropped")),
]


@pytest.fixture(params=CASES, ids=[f"{name}, {str(dtype)[6:]}" for name, dtype in CASES])
def case(request):
    """Plan, width and dtype."""
    name, dtype = request.param
    ids = PLANS[name]
    return Plan(ids if isinstance(ids, torch.Tensor) else ids()), WIDTHS.get(name, 33), dtype


def among_nans(*shape, dtype):
    """Random rows whose neighbours in memory are NaN."""
    buffer = torch.full((shape[0] + 4, *shape[1:]), float("nan"), dtype=dtype)
    buffer[2:-2] = torch.randn(shape)
    return buffer[2:-2]


def test_gather_copies_rows_bit_by_bit(case):
    plan, width, dtype = case
    x = among_nans(plan.num_tokens, width, dtype=dtype)
    expected = [x[slot // plan.top_k] for slot in plan.slots.tolist()]
    expected = torch.stack(expected) if expected else x.new_zeros(0, width)
    for backend in BACKENDS:
        found = backend.gather_rows(x, plan.slots, plan.top_k)
        assert found.dtype == dtype
        assert torch.equal(found, expected), backend.__name__


def test_weighted_gather_equals_a_loop(case):
    plan, width, dtype = case
    x, weights = among_nans(plan.num_tokens, width, dtype=dtype), among_nans(plan.num_rows, dtype=torch.float32)
    expected = torch.zeros(plan.num_rows, width, dtype=torch.float64)
    for n, slot in enumerate(plan.slots.tolist()):
        expected[n] = weights[n].double() * x[slot // plan.top_k].double()
    found = [backend.gather_rows(x, plan.slots, plan.top_k, weights) for backend in BACKENDS]
    assert torch.equal(*found)
    assert_close(found[0], expected)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_combine_equals_a_loop(case, weighted):
    plan, width, dtype = case
    rows = among_nans(plan.num_rows, width, dtype=dtype)
    weights = torch.rand(plan.num_tokens, plan.top_k) if weighted else None
    expected = torch.zeros(plan.num_tokens, width, dtype=torch.float64)
    for n, slot in enumerate(plan.slots.tolist()):
        weight = weights.flatten()[slot].double() if weighted else 1.0
        expected[slot // plan.top_k] += weight * rows[n].double()
    if weighted:  # the weight of a slot without a row is no number of anything
        weights[plan.places_TK >= plan.num_rows] = float("nan")
    twin, found = (backend.combine_rows(rows, plan.places_TK, weights) for backend in BACKENDS)
    assert twin.dtype == found.dtype == dtype
    assert_close(twin, expected)
    assert_close(found, expected)
    if weighted:  # the kernel multiplies and adds at once
        assert_close(found, twin)
    else:
        assert torch.equal(found, twin)


@pytest.mark.parametrize("backend", BACKENDS)
def test_combine_sums_in_slot_order_whatever_the_order_of_rows(backend):
    rows = torch.tensor([[1e8], [1.0], [-1e8]])
    assert backend.combine_rows(rows, torch.tensor([[0, 2, 1]]).int()).item() == 1.0  # (1e8 - 1e8) + 1
    assert backend.combine_rows(rows, torch.tensor([[0, 1, 2]]).int()).item() == 0.0  # (1e8 + 1) - 1e8


@pytest.mark.parametrize("backend", BACKENDS)
def test_places_outside_the_rows_hold_none(backend):
    rows = torch.tensor([[1.0], [2.0]])
    places = torch.tensor([[-1, 1], [2, 0], [2**31 - 1, -(2**31)]]).int()
    assert backend.combine_rows(rows, places).flatten().tolist() == [2.0, 1.0, 0.0]
    assert backend.combine_rows(rows, torch.empty(2, 0).int()).flatten().tolist() == [0.0, 0.0]


def test_row_dot_equals_a_loop(case):
    plan, width, dtype = case
    a, b = among_nans(plan.num_rows, width, dtype=dtype), among_nans(plan.num_tokens, width, dtype=dtype)
    expected = torch.zeros(plan.num_rows, dtype=torch.float64)
    for n, slot in enumerate(plan.slots.tolist()):
        expected[n] = (a[n].double() * b[slot // plan.top_k].double()).sum()
    for backend in BACKENDS:
        found = backend.row_dot(a, b, plan.slots, plan.top_k)
        assert found.dtype == torch.float32
        assert_close(found, expected, what=backend.__name__)


COUNTS = {"mixed": [17, 0, 1, 40], "none": [0, 0], "all on one": [0, 63, 0], "one": [1]}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("gathered", [False, True], ids=["plain", "gathered"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_segment_sums_equal_a_loop(counts, gathered, dtype):
    num_rows, width = sum(counts), 35
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]).int()
    rows = among_nans(max(num_rows, 1) if gathered else num_rows, width, dtype=dtype)
    arguments = {}
    if gathered:
        arguments = {"row_ids_M": torch.randperm(num_rows).int(), "weights_M": torch.rand(num_rows)}
    expected = torch.zeros(len(counts), width, dtype=torch.float64)
    segment_of = [segment for segment, count in enumerate(counts) for _ in range(count)]
    for m, segment in enumerate(segment_of):
        row = rows[arguments["row_ids_M"][m] if gathered else m].double()
        expected[segment] += row * (arguments["weights_M"][m].double() if gathered else 1.0)
    for backend in BACKENDS:
        found = backend.segment_sums(rows, offsets, **arguments)
        assert found.dtype == dtype
        assert_close(found, expected, what=backend.__name__)
        empty = found[torch.tensor(counts) == 0]
        assert torch.equal(empty, torch.zeros_like(empty))


def test_rows_that_are_not_contiguous():
    plan = Plan(random_ids(9, 4, 2))
    x, rows = torch.randn(20, 9).t(), torch.randn(20, plan.num_rows).t()
    slots, places = plan.slots.repeat_interleave(2)[::2], plan.places_TK.t().contiguous().t()
    weights = torch.rand(1).expand(plan.num_rows)
    offsets = torch.tensor([0, -1, 3, -1, plan.num_rows, -1]).int()[::2]
    for name, given in [
        ("gather_rows", (x, slots, 2, weights)),
        ("combine_rows", (rows, places)),
        ("row_dot", (rows, x, slots, 2)),
        ("segment_sums", (rows, offsets)),
    ]:
        assert_close(getattr(triton_kernels, name)(*given), getattr(reference, name)(*given), what=name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k: k.gather_rows(torch.ones(3), torch.zeros(2).int(), 1), r"x_TD must be .*\(3,\)"),
        (lambda k: k.gather_rows(torch.ones(3, 2), torch.zeros(2).int(), 0), r"top_k \(0\)"),
        (lambda k: k.gather_rows(torch.ones(3, 2), torch.zeros(2).int(), 1, torch.ones(3)), r"2 rows.*\(3,\)"),
        (lambda k: k.combine_rows(torch.ones(3, 2), torch.zeros(2).int()), r"\(2,\)"),
        (lambda k: k.combine_rows(torch.ones(3, 2), torch.zeros(2, 1).int(), torch.ones(1, 2)), r"\(2, 1\).*\(1, 2\)"),
        (lambda k: k.row_dot(torch.ones(3, 2), torch.ones(3, 4), torch.zeros(3).int(), 1), "2 wide.*4 wide"),
        (lambda k: k.row_dot(torch.ones(3, 2), torch.ones(3, 2), torch.zeros(2).int(), 1), "3 rows.*2 entries"),
        (lambda k: k.segment_sums(torch.ones(3, 2), torch.tensor([0, 3]), weights_M=torch.ones(2)), r"3 rows.*\(2,\)"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(triton_kernels)
