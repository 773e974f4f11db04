"""How many rows hierarchical dispatch moves, and to whom: the published closed forms, and the balance of pilots."""

import itertools
import math

import pytest
import torch
from hierarchy import buffers_of, plans_of, routing_of

from xmoe.dispatch.hierarchical_plan import Where
from xmoe.dispatch.relayed import traffic_of
from xmoe.kernels import reference
from xmoe.topology import NodeLayout
from xmoe.types import Traffic


def total_traffic(num_nodes, ranks_per_node, *, num_experts, k, levels, tokens=64):
    layout = NodeLayout.from_ranks_per_node(range(num_nodes * ranks_per_node), ranks_per_node)
    routings = [routing_of(tokens, num_experts, k, "random", rank) for rank in range(layout.num_ranks)]
    plans = plans_of(buffers_of(routings), layout, levels)
    return sum((traffic_of(plan, layout.nodes, rank) for rank, plan in enumerate(plans)), start=Traffic())


def closed_form(num_targets, *, num_experts, k):
    """Share of a token's k rows that one for each target in use saves; experts are drawn evenly, without repeats."""
    unused = math.comb(num_experts - num_experts // num_targets, k) / math.comb(num_experts, k)
    return 1 - num_targets * (1 - unused) / k


@pytest.mark.parametrize(
    ("num_nodes", "num_experts", "k", "published"),
    [(2, 256, 8, 0.751), (4, 256, 8, 0.548), (8, 256, 8, 0.338), (2, 128, 6, 0.671), (4, 64, 6, 0.442)],
)
def test_rows_between_nodes_are_those_of_the_closed_form(num_nodes, num_experts, k, published):
    # X-MoE (arXiv 2508.13337) gives 75.1 % and 54.8 % for 256 experts, 8 of them a token, on 2 and 4 nodes.
    expected = closed_form(num_nodes, num_experts=num_experts, k=k)
    assert expected == pytest.approx(published, abs=5e-4)
    found = [
        total_traffic(num_nodes, 8, num_experts=num_experts, k=k, levels=levels) for levels in ("node", "node+gpu")
    ]
    for traffic in found:
        assert traffic.redundancy == pytest.approx(expected, abs=0.01)
    by_expert, by_gpu = found
    assert by_expert.between_nodes == by_gpu.between_nodes
    assert by_expert.inside_node > by_gpu.inside_node


@pytest.mark.parametrize(("k", "published"), [(2, 0.06), (6, 0.25)])
def test_rows_once_for_each_gpu_are_those_of_the_closed_form(k, published):
    # Zyphra gives 6 % and 25 % for 128 experts on 8 GPUs.
    expected = closed_form(8, num_experts=128, k=k)
    assert expected == pytest.approx(published, abs=6e-3)
    found = total_traffic(8, 1, num_experts=128, k=k, levels="gpu", tokens=256)
    assert found.redundancy == pytest.approx(expected, abs=0.01)
    assert 1 - (found.to_self + found.between_nodes) / found.assigned == pytest.approx(expected, abs=0.01)


def test_flat_redundancy_is_none():
    assert Traffic(between_nodes=7, assigned_remote=7, assigned=9).redundancy == 0.0
    assert Traffic().redundancy == 0.0


# Pilots: as even as the tokens' experts allow


def loads_of(rank_TK, node_of_rank, own_node):
    layout, rank = NodeLayout(nodes=tuple(node_of_rank[:-1])), node_of_rank.index(own_node)
    where = Where.of(layout, rank, per_gpu=True, per_node=True, device=torch.device("cpu"))
    pilot_KT = reference.choose_pilots(rank_TK.t().int().contiguous(), where)
    pilot_TK = pilot_KT.t()
    pairs = {(token, rank) for token, ranks in enumerate(pilot_TK.tolist()) for rank in ranks}
    num_ranks = len(node_of_rank) - 1
    return pilot_TK, [sum(rank == other for _, other in pairs) for rank in range(num_ranks)]


def lowest_possible_load(rank_TK, members):
    """Of the busiest of ``members``: any set of GPUs takes at least the tokens that can go nowhere else (Hall)."""
    candidates = [frozenset(ranks) & set(members) for ranks in rank_TK.tolist()]
    sets = itertools.chain.from_iterable(itertools.combinations(members, n) for n in range(1, len(members) + 1))
    return max(math.ceil(sum(bool(c) and c <= set(chosen) for c in candidates) / len(chosen)) for chosen in sets)


@pytest.mark.parametrize("bias", [0.0, 0.4, 0.8])
@pytest.mark.parametrize(("num_nodes", "ranks_per_node", "k"), [(2, 4, 8), (4, 4, 6), (3, 2, 4), (2, 8, 8)])
def test_pilots_are_as_even_as_the_experts_allow(num_nodes, ranks_per_node, k, bias):
    num_ranks, tokens = num_nodes * ranks_per_node, 512
    scores = torch.rand(tokens, 4 * num_ranks)
    scores[:, 4 * (num_ranks - 1)] += bias  # an expert of the last rank that nearly all tokens take
    rank_TK = scores.argsort(dim=1, descending=True)[:, :k] // 4
    node_of_rank = [rank // ranks_per_node for rank in range(num_ranks)] + [num_nodes]
    pilot_TK, loads = loads_of(rank_TK, node_of_rank, own_node=0)
    node_TK = torch.tensor(node_of_rank)[rank_TK]
    assert torch.equal(torch.tensor(node_of_rank)[pilot_TK], node_TK)
    assert torch.equal(pilot_TK[node_TK == 0], rank_TK[node_TK == 0])
    assert bool((pilot_TK[:, :, None] == rank_TK[:, None, :]).any(dim=2).all()), (
        "a pilot without an expert of its token"
    )
    for node in range(1, num_nodes):
        members = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        assert max(loads[rank] for rank in members) <= 1.15 * lowest_possible_load(rank_TK, members) + 1


def test_an_even_choice_is_not_the_first_one():
    # Without rounds of correction the favoured GPU is drawn as often as every other: the test above can fail.
    scores = torch.rand(512, 32)
    scores[:, 28] += 0.8
    rank_TK = scores.argsort(dim=1, descending=True)[:, :8] // 4
    members = range(4, 8)
    drawn_at_random = torch.stack([(rank_TK == rank).any(dim=1) for rank in members]).float()
    naive = (drawn_at_random / drawn_at_random.sum(dim=0).clamp(min=1)).sum(dim=1).max()
    assert float(naive) > 1.3 * lowest_possible_load(rank_TK, members)


def test_slots_without_experts_have_no_pilot():
    rank_TK = torch.tensor([[4, 2], [4, 4], [0, 4]])
    pilot_TK, loads = loads_of(rank_TK, [0, 0, 1, 1, 2], own_node=0)
    assert torch.equal(pilot_TK, rank_TK)
    assert loads[2] == 1
