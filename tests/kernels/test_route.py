"""Kernels that plan a hierarchical dispatch: integers, equal bit by bit to the twins' on every step of a plan.

``tests/dispatch/test_hierarchical_plan.py`` holds the twins against loops over single slots. There are no rows past
2^31 elements here: launchers refuse so many slots, and ``test_addressing.py`` checks that addresses are 64 bits wide.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from route_problem import STEPS, RouteProblem
from torch import Tensor

from xmoe.kernels import reference, reference_route, route_pilots, triton_kernels
from xmoe.kernels.launch import counting, recording
from xmoe.kernels.reference import Inbox
from xmoe.kernels.tuning import Config, forcing

# The node of each rank.
WORLDS = {
    "1x1": (0,),
    "1x4": (0, 0, 0, 0),
    "2x2": (0, 0, 1, 1),
    "4x2": (0, 0, 1, 1, 2, 2, 3, 3),
    "2x4": (0, 0, 0, 0, 1, 1, 1, 1),
    "8x1": (0, 1, 2, 3, 4, 5, 6, 7),
    "2x3 interleaved": (0, 1, 0, 1, 1, 0),
}
# Tokens, experts a rank, choices, kind. The interpreter's tiles have 16 tokens.
SLOTS = {
    "few": (5, 1, 1, "random"),
    "skewed": (37, 2, 5, "skewed"),
    "dropped": (20, 4, 3, "dropped"),
    "all on the first": (17, 4, 8, "first"),
    "no tokens": (0, 2, 2, "random"),
    "none kept": (3, 1, 2, "none"),
}


def ids_of(tokens: int, num_experts: int, top_k: int, kind: str) -> Tensor:
    """int32 ``[T, K]``, no expert twice for one token."""
    scores = torch.rand(tokens, num_experts)
    if kind == "skewed":
        scores -= torch.linspace(0, 1, num_experts)
    if kind == "first":
        scores[:, :top_k] += 1
    ids = scores.argsort(dim=1, descending=True)[:, :top_k].int()
    if kind == "dropped":
        ids = ids.masked_fill(torch.rand(tokens, top_k) < 0.4, -1)
    return ids.fill_(-1) if kind == "none" else ids


def problem_of(world: str, slots: str, *, per_gpu: bool, per_node: bool) -> RouteProblem:
    nodes, (tokens, num_local, top_k, kind) = WORLDS[world], SLOTS[slots]
    num_experts = num_local * len(nodes)
    return RouteProblem(
        ids_TK=ids_of(tokens, num_experts, min(top_k, num_experts), kind),
        nodes=nodes,
        own_node=nodes[-1] if slots == "skewed" else 0,
        num_local=num_local,
        per_gpu=per_gpu,
        per_node=per_node and len(set(nodes)) > 1,
    )


def assert_equal(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
        assert torch.equal(found, expected), what
    elif is_dataclass(expected):
        for field in fields(expected):
            assert_equal(getattr(found, field.name), getattr(expected, field.name), f"{what}: {field.name}")
    elif isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other, what)
    else:
        assert found == expected, what


LEVELS = {"gpu": (True, False), "node": (False, True), "node+gpu": (True, True)}
# Every world with every level, and with half of the kinds of slots; and what has most rows of the second hop.
PLANS = [
    (world, slots, list(LEVELS)[(i + j) % 3])
    for i, world in enumerate(WORLDS)
    for j, slots in enumerate(SLOTS)
    if (i + j) % 2 == 0
] + [("2x4", "skewed", "node+gpu"), ("4x2", "dropped", "node+gpu")]


@pytest.mark.parametrize(("world", "slots", "levels"), PLANS)
def test_every_step_equals_the_twins(world: str, slots: str, levels: str):
    per_gpu, per_node = LEVELS[levels]
    problem = problem_of(world, slots, per_gpu=per_gpu, per_node=per_node)
    for step in STEPS:
        if problem.per_node or step not in ("choose_pilots", "take_copies"):
            run = getattr(problem, step)
            assert_equal(run(triton_kernels), run(reference), step)


def test_the_dial_turns_round_after_all_its_marks():
    """More than 2^16 tokens, in blocks large enough to interpret."""
    rank_KT = torch.stack([torch.randint(2, 4, (2**16 + 40,)), torch.randint(0, 4, (2**16 + 40,))]).int()
    ranks = problem_of("2x2", "few", per_gpu=True, per_node=True).ranks
    with forcing({"pilots": Config(blocks={"BLOCK_T": 2**14})}):
        found = triton_kernels.choose_pilots(rank_KT, ranks)
    assert_equal(found, reference.choose_pilots(rank_KT, ranks), "pilots")


@pytest.mark.parametrize(("world", "top_k"), [("2x4", 4), ("4x2", 7), ("2x3 interleaved", 2)])
def test_pilots_follow_uneven_loads(world: str, top_k: int):
    """Many tokens, most of them with an expert of one rank: every round moves some of them."""
    problem = problem_of(world, "few", per_gpu=True, per_node=True)
    scores = torch.rand(300, problem.num_ranks)
    scores[:, -1] += 0.5
    rank_KT = scores.argsort(dim=1, descending=True)[:, :top_k].t().int().contiguous()
    blocks = {"pilots": Config(blocks={"BLOCK_T": 64}), "pilot_weights": Config(blocks={"BLOCK_B": 4})}
    with forcing(blocks):
        found = triton_kernels.choose_pilots(rank_KT, problem.ranks)
    assert_equal(found, reference.choose_pilots(rank_KT, problem.ranks), "pilots")


@pytest.mark.parametrize("power", [1, 2])
def test_weights_follow_loads_of_several_blocks_to_the_last_unit(power: int):
    ranks = problem_of("2x4", "few", per_gpu=True, per_node=True).ranks
    table = torch.randint(0, 9, (5, 8), dtype=torch.int32)
    table[:, 3], table[:, 6] = 0, 300
    weights = torch.randint(1, 2**20, (8,), dtype=torch.int32)
    found = route_pilots._follow(table, weights, ranks, power=power)
    expected = reference_route._follow(weights.long(), table.sum(dim=0), ranks, power=power)
    assert found.tolist() == expected.tolist()
    assert int(found.max()) == 2**20


def test_more_ways_than_counters_are_sorted():
    """Counts of 2048 ways come in parts; a way's last slot may be in the last part."""
    ids = torch.randint(-1, 2048, (9, 5)).int()
    ids[8, 4] = 2047
    assert_equal(triton_kernels.sort_and_count(ids, 2048), reference.sort_and_count(ids, 2048), "ways")


def test_messages_lie_in_any_layout():
    """What arrives for one of several chunks of tokens are columns of a wider matrix."""
    problem = problem_of("2x2", "skewed", per_gpu=True, per_node=True)
    wide = torch.cat([problem.message, problem.message.flip(0)], dim=1)
    part = wide.chunk(2, dim=1)[1]
    assert not part.is_contiguous()
    expected = reference.message_starts(part, num_places=2)
    assert_equal(triton_kernels.message_starts(part, num_places=2), expected, "starts")
    sizes = reference.message_sizes(problem.message, part, num_places=2)
    assert_equal(triton_kernels.message_sizes(problem.message, part, num_places=2), sizes, "sizes")
    inbox = replace(
        problem.inbox(), message_WC=torch.cat([problem.message, wide], dim=1)[:, : problem.message.shape[1]]
    )
    assert not inbox.message_WC.is_contiguous()
    sizes = dict(width=2, num_rows=problem.num_rows, num_assigned=problem.num_assigned)
    expected = reference.take_assignments(inbox, **sizes)
    assert_equal(triton_kernels.take_assignments(inbox, **sizes), expected, "assignments")


def test_pilots_take_ten_launches_whatever_the_world():
    for world in ("2x2", "4x2"):
        problem = problem_of(world, "few", per_gpu=True, per_node=True)
        with counting() as counts:
            problem.choose_pilots(triton_kernels)
        assert counts == {"pilot_candidates": 1, "draw_pilots": 5, "follow_loads": 4}


@pytest.mark.parametrize("backend", [reference, triton_kernels], ids=["twins", "kernels"])
def test_the_examples_in_the_docstrings(backend: Any):
    def ints(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    slots, tokens = ints([3, 0, 1, 2]), torch.tensor([1, 2])
    assert backend.ranks_of_slots(slots, tokens, num_ranks=2, top_k=2).tolist() == [[1, 2], [1, 0]]
    ranks = problem_of("2x2", "few", per_gpu=True, per_node=True).ranks
    hop_KT = backend.choose_pilots(ints([[2], [3], [0]]), ranks)
    assert hop_KT.tolist() in ([[2], [2], [0]], [[3], [3], [0]])
    shared = backend.share_rows(ints([[3], [1], [2]]), ints([[3], [1], [3]]), ranks)
    assert shared.first_ids_TK.tolist() == [[3, 1, -1]]
    assert shared.second_ids_TK.tolist() == [[-1, -1, 6]]
    assert [shared.leader_KT.tolist(), shared.last_leader_KT.tolist()] == [[[0], [1], [0]], [[0], [1], [2]]]
    messages = torch.tensor([[1, 2, 0, 3], [4, 0, 5, 6]])
    starts = backend.message_starts(messages, num_places=1)
    assert starts.by_rank_WC.tolist() == [[0, 0, 1, 0], [0, 2, 4, 3]]
    assert starts.by_column_WC.tolist() == [[0, 0, 5, 0], [1, 2, 5, 3]]
    assert [starts.references_W2.tolist(), starts.totals_C.tolist()] == [[[0, 2], [5, 5]], [5, 2, 5, 9]]
    sizes = backend.message_sizes(torch.tensor([[2, 3]]), torch.tensor([[4, 5]]), num_places=0)
    assert sizes.tolist() == [2, 4, 3, 5, 3, 5, 5]

    def inbox(message: Any, references: Any, num_places: int) -> Inbox:
        starts = backend.message_starts(torch.tensor(message), num_places=num_places)
        return Inbox(
            message_WC=torch.tensor(message),
            starts=starts,
            references_N=ints(references),
            begins_W2=starts.references_W2,
        )

    taken = backend.take_assignments(inbox([[1, 2], [1, 1]], [0, 1, 0], 0), width=2, num_rows=2, num_assigned=3)
    assert [x.tolist() for x in taken] == [[0, 1, 2], [0, 0, 1], [[0, 1], [2, 3]]]
    copied = backend.take_copies(inbox([[2, 1, 0, 0]], [3], 1), width=2, num_first=2, num_copies=1)
    assert [x.tolist() for x in copied] == [[3], [[0, 3], [1, 2]]]


def test_what_does_not_fit_is_named():
    problem = problem_of("2x2", "few", per_gpu=True, per_node=True)

    def meta(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    with recording("gfx90a"):
        with pytest.raises(ValueError, match=r"num_bins \(8193\)"):
            triton_kernels.sort_and_count(meta(3, 2), 8193)
        with pytest.raises(ValueError, match=r"experts \(5\) must be a multiple of num_ranks \(2\)"):
            triton_kernels.ranks_of_slots(meta(6), meta(5), num_ranks=2, top_k=3)
        with pytest.raises(ValueError, match=r"rank_KT \(torch.int64"):
            triton_kernels.choose_pilots(meta(2, 3, dtype=torch.int64), problem.ranks)
        with pytest.raises(ValueError, match=r"2147483648 slots"):
            triton_kernels.choose_pilots(meta(8, 2**28), problem.ranks)
        with pytest.raises(ValueError, match=r"num_ranks \(4\) must be a multiple of num_places \(3\)"):
            triton_kernels.choose_pilots(meta(2, 3), replace(problem.ranks, num_places=3))
        with pytest.raises(ValueError, match=r"hop_KT .* as rank_KT is: \(2, 3\)"):
            triton_kernels.share_rows(meta(2, 3), meta(2, 4), problem.ranks)
        with pytest.raises(ValueError, match=r"first_W \(3,\)"):
            triton_kernels.route_message(meta(3), meta(8), meta(8), problem.ranks)
        with pytest.raises(ValueError, match=r"messages must be .*found \(4, 5\)"):
            triton_kernels.message_starts(meta(4, 5, dtype=torch.int64), num_places=2)
        with pytest.raises(ValueError, match=r"received_WC"):
            triton_kernels.message_sizes(meta(4, 6, dtype=torch.int64), meta(4, 6), num_places=2)
    inbox = problem.inbox()
    with pytest.raises(ValueError, match=r"references_N \(2,\) must be contiguous and hold 2 and 1"):
        triton_kernels.pack_references(meta(2), meta(2), meta(1), inbox.starts, inbox.begins_W2)
    with pytest.raises(ValueError, match=r"width \(0\)"):
        triton_kernels.take_assignments(inbox, width=0, num_rows=1, num_assigned=1)
    with pytest.raises(ValueError, match=r"begins_W2 \(3, 2\)"):
        triton_kernels.take_copies(replace(inbox, begins_W2=inbox.begins_W2[:3]), width=2, num_first=1, num_copies=1)
    one_hop = problem_of("1x4", "few", per_gpu=True, per_node=True)
    with pytest.raises(ValueError, match=r"num_places \(0\)"):
        triton_kernels.take_copies(one_hop.inbox(), width=2, num_first=1, num_copies=1)
