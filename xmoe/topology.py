"""Which ranks of a group share a node. Plain Python: the dispatchers, the cost model and the planner all ask here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cached_property

from pydantic import BaseModel, ConfigDict

from .config import ConfigError


class NodeLayout(BaseModel):
    """The node of each rank of a group, in any order of the ranks; unless asked otherwise equally many on each node.

    ``nodes``  node of each rank; nodes are numbered by their first rank: ``nodes[0] == 0``

    Example: hosts a, b, a, b give nodes (0, 1, 0, 1), members ((0, 2), (1, 3)) and places (0, 0, 1, 1).
    """

    model_config = ConfigDict(frozen=True)

    nodes: tuple[int, ...]

    @classmethod
    def from_hosts(cls, hosts: Sequence[Hashable], *, equal: bool = True) -> NodeLayout:
        """Ranks of one host name share a node. Raises ConfigError where nodes hold unequal numbers, if ``equal``."""
        numbers: dict[Hashable, int] = {}
        nodes = tuple(numbers.setdefault(host, len(numbers)) for host in hosts)
        sizes = Counter(hosts)
        if equal and len(set(sizes.values())) > 1:
            listing = ", ".join(f"{host}: {sizes[host]}" for host in numbers)
            raise ConfigError(
                "xmoe.ranks_per_node",
                None,
                f"the hosts hold unequal numbers of the {len(nodes)} ranks of an expert-parallel group ({listing}): "
                "start equally many ranks on each, choose another ep_size, give ranks_per_node as a number that "
                "divides every host's, or dispatch 'flat' or 'gpu'",
            )
        return cls(nodes=nodes)

    @classmethod
    def from_ranks_per_node(cls, ranks: Sequence[int], ranks_per_node: int, *, equal: bool = True) -> NodeLayout:
        """``ranks`` are the members' ranks in the whole job, rank r on node ``r // ranks_per_node``.

        Raises ConfigError where nodes hold unequal numbers of the ranks, if ``equal``.
        """
        hosts = [rank // ranks_per_node for rank in ranks]
        sizes = Counter(hosts)
        if equal and len(set(sizes.values())) > 1:
            listing = ", ".join(f"{size} on node {host}" for host, size in sizes.items())
            raise ConfigError(
                "xmoe.ranks_per_node",
                ranks_per_node,
                f"lays the {len(hosts)} ranks of an expert-parallel group ({_short(ranks)}) unequally on nodes "
                f"({listing}); every node must hold equally many",
            )
        return cls.from_hosts(hosts, equal=equal)

    @property
    def num_ranks(self) -> int:
        return len(self.nodes)

    @property
    def num_nodes(self) -> int:
        return len(self.members)

    @property
    def ranks_per_node(self) -> int:
        """Of the first node, and of every node where they are equal."""
        return len(self.members[0])

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, ascending."""
        return tuple(
            tuple(rank for rank, other in enumerate(self.nodes) if other == node) for node in range(max(self.nodes) + 1)
        )

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The place of each rank among the ranks of its node."""
        return tuple(self.members[node].index(rank) for rank, node in enumerate(self.nodes))


def _short(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else shown + ", ..."
