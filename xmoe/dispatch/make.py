"""The dispatcher of a layer from its settings, with the groups it needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist

from ..groups import host_names, part_of_group, warm_up
from ..ops.collectives import Exchange
from ..ops.relay import Route
from ..topology import NodeLayout
from .base import Dispatcher
from .flat import FlatDispatcher
from .hierarchical import HierarchicalDispatcher, Levels


def node_layout(group: dist.ProcessGroup, ranks_per_node: int | None, *, equal: bool) -> NodeLayout:
    """Nodes of the group's ranks: consecutive ranks of the job, or by host name, which is a collective of the group.

    Raises ConfigError where nodes hold unequal numbers of the ranks, if ``equal``.
    """
    if ranks_per_node is None:
        return NodeLayout.from_hosts(host_names(group), equal=equal)
    return NodeLayout.from_ranks_per_node(dist.get_process_group_ranks(group), ranks_per_node, equal=equal)


def make_dispatcher(
    name: Literal["flat"] | Levels,
    exchange: Exchange,
    *,
    ranks_per_node: int | None,
    device: torch.device,
    num_chunks: int = 1,
) -> Dispatcher:
    """The dispatcher ``name`` over ``exchange``'s group. A collective of the group.

    Communicators are made and used here, so that none is made inside a forward. Raises ConfigError, on every rank of
    the group alike, where nodes hold unequal numbers of its ranks and rows are to be shared by node.
    """
    warm_up(exchange.group, device)
    layout = node_layout(exchange.group, ranks_per_node, equal="node" in name)
    if name == "flat":
        return FlatDispatcher(exchange, nodes=layout.nodes, num_chunks=num_chunks)
    second = None
    if HierarchicalDispatcher.passes_on(layout, name):
        own = layout.members[layout.nodes[dist.get_rank(exchange.group)]]
        second = replace(exchange, group=part_of_group(exchange.group, own, device))
    return HierarchicalDispatcher(Route(first=exchange, second=second), layout, levels=name, num_chunks=num_chunks)
