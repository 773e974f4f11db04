"""What dispatch and combine of one mixture-of-experts layer cost, by formulas: rows, bytes and seconds.

Rows follow from how far a token's k experts spread (:class:`Fanout`), seconds from the links
(:mod:`xmoe.links`): the transfers of a layer follow one another, and within one the links inside a node and those
between nodes work at the same time, so

    seconds = sum over transfers of max over link classes of (messages * latency + bytes / bandwidth)

Every rank is taken to send and to receive alike, which skewed routing makes too optimistic for every dispatcher.
Copies within a rank cost nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .links import Link, LinkClass, Links
from .topology import NodeLayout

DispatchName = Literal["local", "flat", "gpu", "node", "node+gpu"]

# What is sent besides the rows.
_WEIGHT_BYTES = 4  # float32
_REFERENCE_BYTES = 4  # int32
_COUNT_BYTES = 8  # int64
# What a row shared by several experts must save: expanding and summing it on the way is not in the model.
_MARGIN = 0.05


@dataclass(frozen=True, kw_only=True)
class ByLink:
    """A quantity of one rank (rows, bytes) split by the links it takes; ``own`` never leaves the rank."""

    own: float
    intra_node: float
    inter_node: float

    @property
    def total(self) -> float:
        return self.own + self.intra_node + self.inter_node

    def times(self, factor: float) -> ByLink:
        return ByLink(own=self.own * factor, intra_node=self.intra_node * factor, inter_node=self.inter_node * factor)

    def plus(self, other: ByLink) -> ByLink:
        return ByLink(
            own=self.own + other.own,
            intra_node=self.intra_node + other.intra_node,
            inter_node=self.inter_node + other.inter_node,
        )


def expected_distinct(num_experts: int, top_k: int, num_domains: int) -> float:
    """Mean number of domains that hold one of ``top_k`` distinct experts drawn evenly from ``num_experts``.

    Each domain (rank or node) holds ``E/n`` experts and is missed with probability ``C(E - E/n, k) / C(E, k)``:

        n * (1 - C(E - E/n, k) / C(E, k))

    This is the model behind X-MoE's redundancy per node (arXiv 2508.13337, Fig. 4) and the share of rows that a
    dispatcher saves by sending once per GPU.

    Example: 4 experts in 2 domains, k = 2: C(2, 2) / C(4, 2) = 1/6, and 2 * 5/6 = 1.667.
    """
    per_domain = _per_domain(num_experts, top_k, num_domains)
    sets = math.comb(num_experts, top_k)
    return num_domains * (sets - math.comb(num_experts - per_domain, top_k)) / sets  # integers, rounded once


def expected_redundancy(num_experts: int, top_k: int, num_domains: int) -> float:
    """Share of the (token, expert) rows that sending once per domain saves: ``1 - expected_distinct / k``.

    Between nodes, the sender's own left out, the share is the same: every node is hit with one probability.
    """
    return 1.0 - expected_distinct(num_experts, top_k, num_domains) / top_k


def _per_domain(num_experts: int, top_k: int, num_domains: int) -> int:
    if num_domains < 1 or num_experts % num_domains:
        raise ValueError(f"num_experts ({num_experts}) is not divisible by the number of domains ({num_domains})")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be from 1 to num_experts ({num_experts})")
    return num_experts // num_domains


@dataclass(frozen=True, kw_only=True)
class Fanout:
    """How far one token's assignments spread over a group; means over the tokens.

    ``assignments``        experts a token is sent to: k, or less where some are dropped
    ``ranks``, ``nodes``   distinct ranks and nodes that hold them, the sender's own included
    ``pilot_assignments``  of the assignments on a node that has any, how many lie on the node's pilot rank: one of
                           those that hold some, each as often
    """

    assignments: float
    ranks: float
    nodes: float
    pilot_assignments: float

    def __post_init__(self) -> None:
        room = 1.0 + 1e-9  # counted redundancies are rounded
        if not 0 < self.nodes <= self.ranks * room <= self.assignments * room**2:
            raise ValueError(
                f"nodes ({self.nodes}), ranks ({self.ranks}) and assignments ({self.assignments}) of a token must be "
                "positive and in rising order"
            )

    @classmethod
    def uniform(cls, layout: NodeLayout, *, num_experts: int, top_k: int) -> Fanout:
        """Of ``top_k`` distinct experts, every set of them as likely. Raises ValueError for impossible sizes."""
        nodes = expected_distinct(num_experts, top_k, layout.num_nodes)
        return cls(
            assignments=top_k,
            ranks=expected_distinct(num_experts, top_k, layout.num_ranks),
            nodes=nodes,
            pilot_assignments=_mean_share(layout, num_experts=num_experts, top_k=top_k) * layout.num_nodes / nodes,
        )

    @classmethod
    def measured(cls, *, assignments: float, rank_redundancy: float, node_redundancy: float) -> Fanout:
        """From counted redundancies, ``1 - distinct / assignments``; a pilot holds what a rank that is hit holds."""
        ranks = assignments * (1.0 - rank_redundancy)
        return cls(
            assignments=assignments,
            ranks=ranks,
            nodes=assignments * (1.0 - node_redundancy),
            pilot_assignments=assignments / ranks,
        )


def _mean_share(layout: NodeLayout, *, num_experts: int, top_k: int) -> float:
    """Mean over tokens of a/d on one node: its a assignments over the d ranks that hold them, 0 where there are none.

    C(g, d) * sum over j of (-1)^(d-j) C(d, j) C(j e, a) of the C(g e, a) sets of a experts lie on exactly d of the
    node's g ranks, e experts each (inclusion and exclusion); the node's a of the k are hypergeometric.
    """
    ranks, per_rank = layout.ranks_per_node, num_experts // layout.num_ranks
    elsewhere = num_experts - ranks * per_rank
    share = 0.0
    for a in range(1, min(top_k, ranks * per_rank) + 1):
        others = math.comb(elsewhere, top_k - a)
        for d in range(1, min(a, ranks) + 1):
            exactly = sum((-1) ** (d - j) * math.comb(d, j) * math.comb(j * per_rank, a) for j in range(d + 1))
            share += a / d * (math.comb(ranks, d) * exactly * others / math.comb(num_experts, top_k))
    return share


def rows_per_token(dispatch: DispatchName, layout: NodeLayout, fanout: Fanout) -> tuple[ByLink, ...]:
    """Mean rows for one token of each hop on the way out, by link; the way back takes the same.

    With W ranks on n nodes, g to a node, and a token's k assignments on D ranks of d nodes:

        flat       k to ranks all alike: k/W own, k (g-1)/W within the node, k (W-g)/W to others
        gpu        the same with D for k: one row to each rank that holds any of its experts
        node       one row to each other node, d (n-1)/n, to its pilot there; to the own node as flat does. Then each
                   pilot passes on one row for each of the node's assignments that is not on the pilot itself
        node+gpu   the same with D for k: a pilot passes on D/d - 1 rows

    Sources: X-MoE's redundancy-bypassing dispatch (arXiv 2508.13337, section 4.2) for one row per node; rows per GPU
    follow in the same way from the distinct ranks.
    """
    to_one_rank = (fanout.ranks if dispatch.endswith("gpu") else fanout.assignments) / layout.num_ranks
    neighbours = layout.ranks_per_node - 1
    if dispatch == "local":
        return ()
    if dispatch in ("flat", "gpu"):
        remote = layout.num_ranks - layout.ranks_per_node
        return (ByLink(own=to_one_rank, intra_node=to_one_rank * neighbours, inter_node=to_one_rank * remote),)
    pilots = fanout.nodes / layout.num_nodes * (layout.num_nodes - 1)
    for_remote = to_one_rank * layout.ranks_per_node * (layout.num_nodes - 1)
    staying = pilots * (1.0 if dispatch == "node+gpu" else fanout.pilot_assignments)
    return (
        ByLink(own=to_one_rank, intra_node=to_one_rank * neighbours, inter_node=pilots),
        ByLink(own=0.0, intra_node=for_remote - staying, inter_node=0.0),
    )


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one rank puts into one layer: ``tokens`` of ``hidden_size`` values of ``item_bytes`` bytes."""

    num_experts: int
    top_k: int
    hidden_size: int
    tokens: int
    item_bytes: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < (0 if name == "tokens" else 1):
                raise ValueError(f"{name} ({value}) is too small")


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective of a layer, by the name that its report has, as one rank sees it.

    ``num_bytes``  sent, by link
    ``seconds``    predicted
    """

    name: str
    num_bytes: ByLink
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A dispatcher's predicted cost for one layer on one rank.

    ``rows``       by link, over all hops of one direction
    ``transfers``  in their order, those of backward after those of forward
    """

    dispatch: DispatchName
    rows: ByLink
    transfers: tuple[Transfer, ...]

    @property
    def seconds(self) -> float:
        return sum(transfer.seconds for transfer in self.transfers)

    @property
    def num_bytes(self) -> ByLink:
        total = ByLink(own=0.0, intra_node=0.0, inter_node=0.0)
        for transfer in self.transfers:
            total = total.plus(transfer.num_bytes)
        return total


def estimate(
    dispatch: DispatchName,
    layout: NodeLayout,
    layer: Layer,
    links: Links,
    *,
    fanout: Fanout | None = None,
    backward: bool = True,
) -> Estimate:
    """Cost of dispatch and combine of one layer, forward and (unless told otherwise) backward.

    ``fanout`` defaults to uniform routing. Raises ValueError where the experts do not divide among the ranks.
    """
    if fanout is None:
        fanout = Fanout.uniform(layout, num_experts=layer.num_experts, top_k=layer.top_k)
    hops = [rows.times(layer.tokens) for rows in rows_per_token(dispatch, layout, fanout)]
    transfers: list[Transfer] = []
    if hops:
        assigned = rows_per_token("flat", layout, fanout)[0].times(layer.tokens)
        transfers += _forward(dispatch, layout, layer, hops, assigned, links)
        transfers += _backward(layout, layer, hops, assigned, links) if backward else []
    rows = ByLink(own=0.0, intra_node=0.0, inter_node=0.0)
    for hop in hops:
        rows = rows.plus(hop)
    return Estimate(dispatch=dispatch, rows=rows, transfers=tuple(transfers))


def _forward(
    dispatch: DispatchName, layout: NodeLayout, layer: Layer, hops: list[ByLink], assigned: ByLink, links: Links
) -> Iterator[Transfer]:
    """Counts; where rows serve several assignments, which row serves which; weights; rows, hop by hop out and home."""
    counts = layer.num_experts // layout.num_ranks
    if dispatch != "flat":
        counts += 1 + (2 * layout.ranks_per_node if len(hops) > 1 else 0)
    each = ByLink(own=1, intra_node=layout.ranks_per_node - 1, inter_node=layout.num_ranks - layout.ranks_per_node)
    yield _transfer("exchange of counts", layout, links, each.times(_COUNT_BYTES * counts))
    if dispatch != "flat":
        # The source names the row of each assignment to its expert's rank, and each copy to the pilot that makes it.
        copies = ByLink(own=0.0, intra_node=0.0, inter_node=sum(hop.intra_node for hop in hops[1:]))
        references = assigned.plus(copies).times(_REFERENCE_BYTES)
        yield _transfer("exchange of references", layout, links, references)
    yield _transfer("dispatch of weights", layout, links, assigned.times(_WEIGHT_BYTES))
    yield from _rows("dispatch of rows", layout, layer, hops, links)
    yield from _rows("combine of rows", layout, layer, hops, links, homeward=True)


def _backward(
    layout: NodeLayout, layer: Layer, hops: list[ByLink], assigned: ByLink, links: Links
) -> Iterator[Transfer]:
    """The results' gradients go out as the rows did; the rows' and the weights' gradients come home."""
    yield from _rows("combine of rows: backward", layout, layer, hops, links)
    yield from _rows("dispatch of rows: backward", layout, layer, hops, links, homeward=True)
    yield _transfer("dispatch of weights: backward", layout, links, assigned.times(_WEIGHT_BYTES))


def _rows(
    name: str, layout: NodeLayout, layer: Layer, hops: list[ByLink], links: Links, *, homeward: bool = False
) -> Iterator[Transfer]:
    order = range(len(hops))
    for index in reversed(order) if homeward else order:
        num_bytes = hops[index].times(layer.hidden_size * layer.item_bytes)
        hop = f"{name}, second hop" if index else name
        yield _transfer(hop, layout, links, num_bytes, within_node=index > 0)


def _transfer(name: str, layout: NodeLayout, links: Links, num_bytes: ByLink, *, within_node: bool = False) -> Transfer:
    peers = layout.ranks_per_node - 1
    remote = 0 if within_node else layout.num_ranks - layout.ranks_per_node
    seconds = max(
        _seconds(links.intra_node, "inside a node", messages=peers, num_bytes=num_bytes.intra_node),
        _seconds(links.inter_node, "between nodes", messages=remote, num_bytes=num_bytes.inter_node),
    )
    return Transfer(name=name, num_bytes=num_bytes, seconds=seconds)


def _seconds(link: Link | None, where: str, *, messages: int, num_bytes: float) -> float:
    if not messages:
        return 0.0
    if link is None:
        raise ValueError(f"the ranks have links {where}, and there are no figures for them")
    return link.seconds(messages=messages, num_bytes=num_bytes)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The dispatcher to use, and what was predicted for each that could be used."""

    dispatch: DispatchName
    estimates: tuple[Estimate, ...]


def classes_used(layout: NodeLayout) -> frozenset[LinkClass]:
    """The classes of links whose figures :func:`choose_dispatch` needs."""
    layout = _taken_for(layout)
    inside: set[LinkClass] = {"intra_node"} if layout.ranks_per_node > 1 else set()
    between: set[LinkClass] = {"inter_node"} if layout.num_nodes > 1 else set()
    return frozenset(inside | between)


def _taken_for(layout: NodeLayout) -> NodeLayout:
    """Nodes with unequal numbers of ranks count as nodes of one rank each."""
    if any(len(ranks) != layout.ranks_per_node for ranks in layout.members):
        return NodeLayout(nodes=tuple(range(layout.num_ranks)))
    return layout


def choose_dispatch(
    layout: NodeLayout, layer: Layer, links: Links, *, fanout: Fanout | None = None, backward: bool = True
) -> Choice:
    """The dispatcher with the fastest prediction; flat where none is more than 5 % faster than it.

    Levels that change nothing are no candidates: on one node, or with one rank to each, that is all but flat and gpu;
    a single rank is local. Nodes with unequal numbers of ranks, too, leave flat and gpu, as if all links were slow
    ones. Raises ValueError where the experts do not divide among the ranks, and for a class of links that is used
    (:func:`classes_used`) and has no figures.
    """
    layout = _taken_for(layout)
    names: tuple[DispatchName, ...] = ("flat", "gpu", "node", "node+gpu")
    if layout.num_ranks == 1:
        names = ("local",)
    elif layout.num_nodes == 1 or layout.ranks_per_node == 1:
        names = ("flat", "gpu")
    estimates = tuple(estimate(name, layout, layer, links, fanout=fanout, backward=backward) for name in names)
    plain, fastest = estimates[0], min(estimates, key=lambda found: found.seconds)
    chosen = plain if plain.seconds <= (1.0 + _MARGIN) * fastest.seconds else fastest
    return Choice(dispatch=chosen.dispatch, estimates=estimates)
