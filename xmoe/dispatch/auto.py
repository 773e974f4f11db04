"""``"dispatch": "auto"``: the dispatcher that the cost model predicts to be the fastest on the links as measured."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Literal

import torch
import torch.distributed as dist

from ..cost import Layer, choose_dispatch, classes_used
from ..groups import host_names, hosts_of_job, raise_together
from ..links import Links, Setting, find_links
from ..ops.collectives import carriers
from ..topology import NodeLayout
from .hierarchical import Levels

logger = logging.getLogger(__name__)


def agreed_dispatch(
    group: dist.ProcessGroup, layout: NodeLayout, layer: Layer, *, device: torch.device
) -> Literal["flat"] | Levels:
    """The choice for layers like ``layer`` by the link figures of the group's first rank. A collective of the group.

    Flat where nobody measured these links (``xmoe bench links``): figures of another machine, or of other links of
    this one, would be a guess. Raises, on every rank of the group, what the first rank met, of whatever kind:
    ConfigError where the file it was told to read is bad.
    """
    hosts = host_names(group)
    found: list[tuple[Links, str] | None] = [None]
    error: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            backend, name = carriers(group, device)
            setting = Setting(ranks_per_node=_sharers(hosts, layout), backend=backend, device=name)
            found = [find_links(hosts, setting, needed=classes_used(layout))]
        except Exception as met:  # of whatever kind: the other ranks wait for this one
            error = met
    raise_together(error, group=group)
    dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    if found[0] is None:
        return "flat"
    links, source = found[0]
    choice = choose_dispatch(layout, layer, links)
    predicted = ", ".join(f"{estimate.dispatch} {estimate.seconds * 1e3:.3g} ms" for estimate in choice.estimates)
    logger.info("dispatch %r for %s by the links in %s; predicted: %s", choice.dispatch, layer, source, predicted)
    return "flat" if choice.dispatch == "local" else choice.dispatch


def _sharers(hosts: list[str], layout: NodeLayout) -> int:
    """How many of the job's ranks share a node, and so the node's way out: those of other groups send as well.

    Where ``ranks_per_node`` lays nodes otherwise than the hosts do, or the job's hosts were not gathered (a layer
    without xmoe.initialize), the group's own ranks stand for the job's.
    """
    job = hosts_of_job()
    if job is None or NodeLayout.from_hosts(hosts, equal=False) != layout:
        return max(map(len, layout.members))
    return max(Counter(job).values())
