"""Rows of real plans under uniform routing are those the cost model predicts, link by link and hop by hop."""

import pytest
import torch
from hierarchy import LEVELS, buffers_of, plans_of, routing_of

from xmoe.cost import Fanout, expected_redundancy, rows_per_token
from xmoe.topology import NodeLayout

TOKENS = 300


def sent(plans, layout):
    """Rows of one token, ``(own, intra-node, inter-node)`` of the first hop and the second's: means over all ranks."""
    found = torch.zeros(4)
    for rank, plan in enumerate(plans):
        for peer, rows in enumerate(plan.first.send_splits):
            found[0 if peer == rank else 1 if layout.nodes[peer] == layout.nodes[rank] else 2] += rows
        found[3] += sum(plan.second.send_splits) if plan.second is not None else 0
    return found / (TOKENS * layout.num_ranks)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(
    ("num_nodes", "ranks_per_node", "num_experts", "k"), [(2, 4, 64, 8), (4, 2, 64, 8), (2, 4, 256, 8), (4, 2, 16, 3)]
)
def test_rows_under_uniform_routing(levels, num_nodes, ranks_per_node, num_experts, k):
    layout = NodeLayout.from_ranks_per_node(range(num_nodes * ranks_per_node), ranks_per_node)
    routings = [routing_of(TOKENS, num_experts, k, "random", seed) for seed in range(layout.num_ranks)]
    found = sent(plans_of(buffers_of(routings), layout, levels), layout)
    hops = rows_per_token(levels, layout, Fanout.uniform(layout, num_experts=num_experts, top_k=k))
    passed_on = hops[1].intra_node if len(hops) > 1 else 0.0
    expected = torch.tensor([hops[0].own, hops[0].intra_node, hops[0].inter_node, passed_on])
    # A token's k draws are of one kind or not: their number's deviation is at most sqrt(k)/2. Four standard errors.
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * (k / (TOKENS * layout.num_ranks)) ** 0.5)
    if "node" in levels:
        remote = k * (num_nodes - 1) / num_nodes
        saved = 1 - float(found[2]) / remote
        assert saved == pytest.approx(expected_redundancy(num_experts, k, num_nodes), abs=0.01)
