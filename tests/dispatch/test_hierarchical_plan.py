"""Plans of hierarchical dispatch: all ranks' at once, against loops over their routings. No processes."""

import random
from dataclasses import fields, is_dataclass

import pytest
import torch
from hierarchy import (
    LEVELS,
    bring_home,
    buffers_of,
    plans_of,
    plans_of_chunks,
    routing_of,
    send_outward,
    wanted_assignments,
    wanted_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from xmoe.dispatch.blocks import transpose_blocks
from xmoe.dispatch.hierarchical_plan import (
    Arrivals,
    Sizes,
    Where,
    arrive,
    depart,
    read_sizes,
    references_by_chunk,
    references_of,
)
from xmoe.kernels import reference, triton_kernels
from xmoe.kernels.launch import counting, recording
from xmoe.testing import check_assignments
from xmoe.topology import NodeLayout
from xmoe.types import TokenBuffer

LAYOUTS = {
    "1x4": [0, 0, 0, 0],
    "2x1": [0, 1],
    "2x2": [0, 0, 1, 1],
    "4x2": [0, 0, 1, 1, 2, 2, 3, 3],
    "2x4": [0, 0, 0, 0, 1, 1, 1, 1],
    "2x3 interleaved": [0, 1, 0, 1, 1, 0],
}
UNEVEN = [5, 6, 0, 13, 1, 9, 0, 4]


def check(routings, layout, levels, num_local):
    """Everything that a plan promises, of all ranks."""
    k = routings[0].topk_ids_TK.shape[1]
    buffers = buffers_of(routings)
    plans = plans_of(buffers, layout, levels)
    codes = [
        1000.0 * source + torch.arange(len(r.topk_ids_TK), dtype=torch.float64)[:, None]
        for source, r in enumerate(routings)
    ]
    rows = send_outward(codes, plans, layout)
    results = []
    for rank, (plan, x) in enumerate(zip(plans, rows, strict=True)):
        wanted = wanted_assignments(routings, rank, num_local)
        assert plan.tokens_per_local_expert == [sum(e == i for *_, e in wanted) for i in range(num_local)]
        assert plan.num_arrived == len(x)
        check_assignments(plan, len(x))
        found = x[plan.row_ids_M.long()].flatten().tolist()
        assert found == [1000.0 * source + slot // k for source, slot, _ in wanted]
        assert sorted(set(plan.row_ids_M.tolist())) == list(range(len(x))), "a row that serves nobody came here"
        results.append(torch.zeros_like(x).index_add_(0, plan.row_ids_M.long(), _results_of(plan, rank, x, num_local)))
    for routing, code, out in zip(routings, codes, bring_home(results, plans, layout), strict=True):
        kept = routing.topk_ids_TK >= 0
        factor = ((routing.topk_ids_TK + 1) * kept).sum(1, keepdim=True)
        assert torch.equal(out, code * factor)
    _check_traffic(routings, plans, layout, levels, num_local)
    _check_weights(routings, buffers, plans, num_local)


def _results_of(plan, rank, x, num_local):
    """What assignments give: their row times one more than their expert's id."""
    local = torch.repeat_interleave(torch.arange(num_local), torch.tensor(plan.tokens_per_local_expert))
    return x[plan.row_ids_M.long()] * (rank * num_local + local + 1)[:, None]


def _check_traffic(routings, plans, layout, levels, num_local):
    """Rows on every link are the distinct (token, target) pairs, none more."""
    passed_on = [0] * layout.num_nodes
    for source, (routing, plan) in enumerate(zip(routings, plans, strict=True)):
        own_rows, between, targets = wanted_rows(routing, source, layout, levels, num_local)
        sent, own = plan.first.send_splits, layout.members[layout.nodes[source]]
        assert sum(sent[rank] for rank in own) == len(own_rows)
        assert sum(sent) - len(own_rows) == len(between)
        pilots = _pilots(plan, layout)
        for (token, node), lasts in targets.items():
            at_pilot = sum(rank == pilots[token, node] for _, rank, *_ in lasts)
            assert at_pilot, "a pilot without an expert of its token"
            passed_on[node] += len(lasts) - at_pilot
    for node, members in enumerate(layout.members):
        hops = [plans[rank].second for rank in members]
        assert sum(sum(hop.send_splits) for hop in hops if hop is not None) == passed_on[node]
        assert all(hop is None or hop.send_splits[place] == 0 for place, hop in enumerate(hops)), "rows to oneself"


def _pilots(plan, layout):
    """The rank that each (token, node) of the first hop goes to."""
    hop = plan.first
    tokens = iter((hop.slot_ids_N // hop.places_TK.shape[1]).tolist())
    return {(next(tokens), layout.nodes[rank]): rank for rank, n in enumerate(hop.send_splits) for _ in range(n)}


def _check_weights(routings, buffers, plans, num_local):
    k = routings[0].topk_ids_TK.shape[1]
    for rank, plan in enumerate(plans):
        sent = [
            buffer.combine_weights_S[: other.num_assigned].split(other.weight_splits_sent)[rank]
            for buffer, other in zip(buffers, plans, strict=True)
        ]
        assert [len(part) for part in sent] == plan.weight_splits_received
        found = torch.cat(sent)[plan.weight_ids_M.long()]
        wanted = wanted_assignments(routings, rank, num_local)
        expected = [routings[source].topk_weights_TK[slot // k, slot % k] for source, slot, _ in wanted]
        assert torch.equal(found, torch.stack(expected) if expected else torch.empty(0))


def routings_of(tokens_of_rank, num_experts, k, kind):
    return [routing_of(n, num_experts, k, kind, seed) for seed, n in enumerate(tokens_of_rank)]


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("kind", ["random", "rank 0", "skewed", "dropped"])
@pytest.mark.parametrize("nodes", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_row_serves_its_experts_and_comes_home(nodes, kind, levels):
    layout = NodeLayout.from_hosts(nodes)
    for num_local, ks in {1: (1, 8), 2: (3,), 4: (7,)}.items():
        num_experts = num_local * layout.num_ranks
        for k in {min(k, num_experts) for k in ks}:
            check(routings_of(UNEVEN[: layout.num_ranks], num_experts, k, kind), layout, levels, num_local)


@pytest.mark.parametrize("levels", LEVELS)
def test_ranks_without_tokens_and_tokens_without_experts(levels):
    layout = NodeLayout.from_hosts([0, 0, 1, 1])
    check(routings_of([0, 0, 0, 0], 8, 3, "random"), layout, levels, 2)
    routings = routings_of([0, 7, 0, 0], 8, 3, "random")
    check(routings, layout, levels, 2)
    routings[1].topk_ids_TK.fill_(-1)
    routings[1].tokens_per_expert_E.zero_()
    check(routings, layout, levels, 2)


@settings(max_examples=60, deadline=None)
@given(
    num_nodes=st.integers(1, 4),
    ranks_per_node=st.integers(1, 4),
    num_local=st.sampled_from([1, 2, 3, 5]),
    levels=st.sampled_from(LEVELS),
    kind=st.sampled_from(["random", "rank 0", "skewed", "dropped"]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_random_topologies(num_nodes, ranks_per_node, num_local, levels, kind, seed, data):
    nodes = [node for node in range(num_nodes) for _ in range(ranks_per_node)]
    random.Random(seed).shuffle(nodes)
    layout = NodeLayout.from_hosts(nodes)
    k = data.draw(st.integers(1, min(8, num_local * layout.num_ranks)), label="k")
    tokens = data.draw(st.lists(st.integers(0, 12), min_size=len(nodes), max_size=len(nodes)), label="tokens")
    routings = [routing_of(n, num_local * len(nodes), k, kind, seed + r) for r, n in enumerate(tokens)]
    check(routings, layout, levels, num_local)


def test_ranks_of_slots_undo_the_sort():
    routing = routing_of(17, 6, 3, "dropped", 0)
    buffer, ids_KT = buffers_of([routing])[0], routing.topk_ids_TK.t()
    for num_ranks in (1, 2, 6):
        found = reference.ranks_of_slots(buffer.slot_ids_S, buffer.tokens_per_expert_E, num_ranks=num_ranks, top_k=3)
        assert torch.equal(found, torch.where(ids_KT < 0, num_ranks, ids_KT // (6 // num_ranks)))


def test_plans_are_the_same_in_every_run():
    layout = NodeLayout.from_hosts([0, 0, 1, 1])
    first, second = (plans_of(buffers_of(routings_of(UNEVEN[:4], 8, 3, "random")), layout, "node+gpu") for _ in "ab")
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.row_ids_M, b.row_ids_M)
        for hop, other in [(a.first, b.first), (a.second, b.second)]:
            assert torch.equal(hop.slot_ids_N, other.slot_ids_N)
            assert torch.equal(hop.places_TK, other.places_TK)


class Operations(TorchDispatchMode):
    """Counts operators of torch that start a kernel on a device: all but views and allocations."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "empty" not in function.name():
            self.found.append(function.name())
        return function(*args, **(kwargs or {}))


def meta_plan(levels, kernels):
    """A plan on tensors without values: whatever reads one, or takes its size from one, raises."""
    layout = NodeLayout.from_hosts([0, 0, 1, 1])
    where = Where.of(layout, 1, per_gpu="gpu" in levels, per_node="node" in levels, device=torch.device("meta"))
    slots = torch.empty(7 * 3, dtype=torch.int32, device="meta")
    buffer = TokenBuffer(
        slot_ids_S=slots,
        places_S=slots,
        combine_weights_S=slots.float(),
        tokens_per_expert_E=torch.empty(8, dtype=torch.int64, device="meta"),
        num_tokens=7,
        top_k=3,
    )
    second = [3, 2] if where.num_places else []
    sizes = Sizes(
        first_sent=[4, 3, 2, 1],
        first_received=[2, 2, 2, 2],
        second_sent=second,
        second_received=second,
        assigned_sent=[5, 5, 5, 5],
        assigned_received=[6, 4, 6, 4],
        references_sent=[6, 6, 6, 6],
        references_received=[6, 4, 6, 4 + sum(second)],
        tokens_e=[11, 9],
    )
    received = torch.empty(sum(sizes.references_received), dtype=torch.int32, device="meta")
    with Operations() as operations:
        departure = depart(buffer, where, kernels)
        arrivals = Arrivals.of(departure.message_WC, where)
        with pytest.raises(NotImplementedError):
            read_sizes([departure], [arrivals])  # the one that does
        assert references_of([departure], [sizes]).shape == (24,)
        (references,) = references_by_chunk(received, [arrivals], [sizes])
        plan = arrive(departure, arrivals, references, sizes, where=where, top_k=3)
    assert plan.assignments_RK.shape == (8 + sum(second), 2)
    return operations.found


@pytest.mark.parametrize("levels", LEVELS)
def test_the_plan_needs_no_value_of_the_device(levels):
    assert len(meta_plan(levels, reference)) > 50


@pytest.mark.parametrize(("levels", "expected"), [("gpu", 14), ("node", 29), ("node+gpu", 29)])
def test_a_plan_on_a_device_is_few_launches(levels, expected):
    with recording("gfx90a") as launches:
        operations = meta_plan(levels, triton_kernels)
    assert len(launches) + len(operations) == expected, (launches, operations)
    assert set(operations) == {"aten::full", "aten::_to_copy"}  # what is none, and the one sync


@pytest.mark.parametrize(("nodes", "levels", "kind"), [("2x2", "node+gpu", "skewed"), ("2x2", "node", "dropped")])
def test_a_plan_by_the_kernels_is_that_of_the_twins(nodes, levels, kind):
    """In Triton's interpreter, all ranks' plans, of uneven numbers of tokens and of none."""
    layout = NodeLayout.from_hosts(LAYOUTS[nodes])
    buffers = buffers_of(routings_of(UNEVEN[: layout.num_ranks], 2 * layout.num_ranks, 3, kind))
    expected = plans_of(buffers, layout, levels)
    with counting() as launches:
        found = plans_of(buffers, layout, levels, triton_kernels)
    assert launches["draw_pilots"] == 5 * layout.num_ranks
    for plan, wanted in zip(found, expected, strict=True):
        assert_same_plan(plan, wanted)


def assert_same_plan(plan, wanted):
    for field in fields(wanted):
        found, expected = getattr(plan, field.name), getattr(wanted, field.name)
        if isinstance(expected, torch.Tensor):
            assert found.dtype == expected.dtype, field.name
            assert torch.equal(found, expected), field.name
        elif is_dataclass(expected):
            assert_same_plan(found, expected)
        else:
            assert found == expected, field.name


@pytest.mark.parametrize("levels", LEVELS)
def test_chunks_planned_together_have_the_plans_that_they_have_alone(levels):
    layout = NodeLayout.from_hosts(LAYOUTS["2x2"])
    chunks = [buffers_of(routings_of(tokens, 8, 3, "dropped")) for tokens in ([4, 0, 7, 2], [3, 3, 0, 5], [0, 6, 1, 2])]
    together = plans_of_chunks(chunks, layout, levels)
    for chunk, plans in zip(chunks, together, strict=True):
        for plan, wanted in zip(plans, plans_of(chunk, layout, levels), strict=True):
            assert_same_plan(plan, wanted)


def test_a_small_plan_in_numbers():
    # Two nodes of two ranks, one expert each; rank 0 has one token, for experts 1, 2 and 3.
    layout = NodeLayout.from_hosts(["a", "a", "b", "b"])
    routings = [routing_of(int(rank == 0), 4, 3, "random", rank) for rank in range(4)]
    routings[0].topk_ids_TK.copy_(torch.tensor([[3, 1, 2]]))
    routings[0].tokens_per_expert_E.copy_(torch.tensor([0, 1, 1, 1]))
    plans = plans_of(buffers_of(routings), layout, "node+gpu")
    assert plans[0].first.send_splits == [0, 1, 0, 1]  # to its neighbour, and to the pilot, rank 3
    assert plans[3].second.send_splits == [1, 0]  # which passes a copy on to rank 2
    assert plans[3].second.slot_ids_N.tolist() == [1]  # row 0, its second of two
    assert plans[3].second.places_TK.tolist() == [[0, 1]]  # home: its own result and the one that came back
    assert [plan.row_ids_M.tolist() for plan in plans] == [[], [0], [0], [0]]
    flat = plans_of(buffers_of(routings), layout, "gpu")
    assert flat[0].first.send_splits == [0, 1, 1, 1]
    assert flat[0].second is None


def test_transposed_blocks_list_ranks_within_experts():
    assert transpose_blocks(torch.tensor([[1, 2], [3, 0]]), num_rows=6).tolist() == [0, 3, 4, 5, 1, 2]
    counts = torch.randint(0, 4, (3, 5))
    rows = iter(range(int(counts.sum())))
    by_pair = {(w, e): [next(rows) for _ in range(int(counts[w, e]))] for w in range(3) for e in range(5)}
    expected = [row for e in range(5) for w in range(3) for row in by_pair[w, e]]
    assert transpose_blocks(counts, num_rows=int(counts.sum())).tolist() == expected
    assert transpose_blocks(torch.zeros(2, 2, dtype=torch.int64), num_rows=0).tolist() == []
