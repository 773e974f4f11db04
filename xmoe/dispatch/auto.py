"""``"dispatch": "auto"``: the dispatcher that the cost model predicts to be the fastest on the links as measured."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch.distributed as dist

from ..config import ConfigError
from ..cost import Layer, choose_dispatch
from ..groups import host_names
from ..links import NOT_MEASURED, find_links
from ..topology import NodeLayout
from .hierarchical import Levels

logger = logging.getLogger(__name__)


def agreed_dispatch(group: dist.ProcessGroup, layout: NodeLayout, layer: Layer) -> Literal["flat"] | Levels:
    """The choice for layers like ``layer`` by the link figures of the group's first rank. A collective of the group.

    Flat where nobody measured the links (``xmoe bench links``): figures of another machine would be a guess. Raises,
    on every rank of the group, what the first rank met: ConfigError where the file it was told to read is bad.
    """
    hosts = host_names(group)
    found: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            found = [find_links(hosts)]
        except ConfigError as error:
            found = [error]
    dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    if isinstance(found[0], ConfigError):
        raise found[0]
    links, source = found[0]
    if source == NOT_MEASURED:
        return "flat"
    choice = choose_dispatch(layout, layer, links)
    predicted = ", ".join(f"{estimate.dispatch} {estimate.seconds * 1e3:.3g} ms" for estimate in choice.estimates)
    logger.info("dispatch %r for %s by the links in %s; predicted: %s", choice.dispatch, layer, source, predicted)
    return "flat" if choice.dispatch == "local" else choice.dispatch
