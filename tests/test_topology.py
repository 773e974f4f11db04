"""Which ranks share a node: any order of ranks, and what is refused."""

import pytest

from xmoe.config import ConfigError
from xmoe.topology import NodeLayout


def test_ranks_in_any_order():
    layout = NodeLayout.from_hosts(["b", "a", "b", "a"])
    assert layout.nodes == (0, 1, 0, 1)
    assert layout.members == ((0, 2), (1, 3))
    assert layout.places == (0, 0, 1, 1)
    assert (layout.num_ranks, layout.num_nodes, layout.ranks_per_node) == (4, 2, 2)


@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "nodes"),
    [
        (range(4), 2, (0, 0, 1, 1)),
        (range(4), 8, (0, 0, 0, 0)),
        ([4, 5, 6, 7], 4, (0, 0, 0, 0)),
        ([0, 4, 8, 12], 4, (0, 1, 2, 3)),
        ([2, 3, 4, 5], 4, (0, 0, 1, 1)),
    ],
)
def test_nodes_are_of_the_job_not_of_the_group(ranks, ranks_per_node, nodes):
    assert NodeLayout.from_ranks_per_node(ranks, ranks_per_node).nodes == nodes


def test_unequal_hosts_are_refused_with_their_numbers():
    with pytest.raises(ConfigError, match=r"unequal numbers of the 3 ranks of .* \(x: 2, y: 1\).*'flat' or 'gpu'") as e:
        NodeLayout.from_hosts(["x", "x", "y"])
    assert e.value.path == "xmoe.ranks_per_node"
    layout = NodeLayout.from_hosts(["x", "x", "y"], equal=False)
    assert layout.members == ((0, 1), (2,))


def test_unequal_nodes_are_refused_with_their_numbers():
    with pytest.raises(
        ConfigError, match=r"is 3: lays the 4 ranks .*\(0, 1, 2, 3\) unequally on nodes \(3 on node 0, 1"
    ):
        NodeLayout.from_ranks_per_node(range(4), 3)
    with pytest.raises(ConfigError, match=r"\(1, 2, 3, 4, 5, 6, 7, 8, \.\.\.\) unequally"):
        NodeLayout.from_ranks_per_node(range(1, 11), 4)
    assert NodeLayout.from_ranks_per_node(range(4), 3, equal=False).nodes == (0, 0, 0, 1)
