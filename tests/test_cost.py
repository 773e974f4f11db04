"""The cost model: closed forms against enumeration, sampling and published figures; choices where they are plain."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmoe.cost import (
    ByLink,
    DispatchName,
    Fanout,
    Layer,
    choose_dispatch,
    estimate,
    expected_distinct,
    expected_redundancy,
    rows_per_token,
)
from xmoe.links import FRONTIER, Link, Links
from xmoe.topology import NodeLayout

DISPATCHERS: tuple[DispatchName, ...] = ("flat", "gpu", "node", "node+gpu")


def grid(num_nodes: int, ranks_per_node: int) -> NodeLayout:
    return NodeLayout.from_ranks_per_node(range(num_nodes * ranks_per_node), ranks_per_node)


# Closed forms


@pytest.mark.parametrize(
    ("num_experts", "top_k", "percent_by_nodes"),
    [
        # X-MoE (arXiv 2508.13337) publishes 75.1 % and measures 54.8 %; the other figures follow from the same model.
        (256, 8, {2: 75.1, 4: 54.8, 8: 33.8, 16: 18.5, 32: 9.2}),
        (128, 6, {2: 67.1, 4: 44.7, 8: 25.5, 16: 12.9, 32: 5.8}),
        (64, 6, {2: 67.1, 4: 44.2, 8: 24.4, 16: 11.4, 32: 4.0}),
        (256, 16, {2: 87.5, 4: 75.2, 8: 55.5, 16: 34.5, 32: 18.5}),
    ],
)
def test_redundancy_between_nodes(num_experts: int, top_k: int, percent_by_nodes: dict[int, float]) -> None:
    for num_nodes, percent in percent_by_nodes.items():
        found = 100 * expected_redundancy(num_experts, top_k, num_nodes)
        assert found == pytest.approx(percent, abs=0.05), f"{num_nodes} nodes"


@pytest.mark.parametrize(("top_k", "percent"), [(2, 6), (6, 25)])
def test_redundancy_per_gpu_is_the_published_share_of_rows_saved(top_k: int, percent: int) -> None:
    # Published for 8 expert-parallel GPUs and 128 experts as 6 % and 25 %.
    assert math.floor(100 * expected_redundancy(128, top_k, 8) + 0.5) == percent


def count_rows(
    dispatch: str, layout: NodeLayout, chosen: Iterable[Sequence[int]], per_rank: int, *, source: int
) -> np.ndarray:
    """Rows of each token of ``source`` by a loop, ``[tokens, hop, link]``; every possible pilot counts in part."""
    counted = []
    for experts in chosen:
        rows = np.zeros((2, 3))
        by_rank = Counter(expert // per_rank for expert in experts)
        copies = {rank: 1 if dispatch.endswith("gpu") else n for rank, n in by_rank.items()}
        own_node = layout.nodes[source]
        for rank, n in copies.items():
            if layout.nodes[rank] == own_node:
                rows[0, 0 if rank == source else 1] += n
            elif dispatch in ("flat", "gpu"):
                rows[0, 2] += n
        if dispatch.startswith("node"):
            for node in {layout.nodes[rank] for rank in by_rank} - {own_node}:
                held = {rank: n for rank, n in copies.items() if layout.nodes[rank] == node}
                rows[0, 2] += 1
                rows[1, 1] += sum(held.values()) * (1 - 1 / len(held))
        counted.append(rows)
    return np.array(counted)


def predicted(dispatch: DispatchName, layout: NodeLayout, num_experts: int, top_k: int) -> np.ndarray:
    hops = rows_per_token(dispatch, layout, Fanout.uniform(layout, num_experts=num_experts, top_k=top_k))
    rows = np.zeros((2, 3))
    for index, hop in enumerate(hops):
        rows[index] = hop.own, hop.intra_node, hop.inter_node
    return rows


@pytest.mark.parametrize("dispatch", DISPATCHERS)
@pytest.mark.parametrize(
    ("num_nodes", "ranks_per_node", "num_experts"), [(2, 2, 8), (2, 3, 6), (3, 2, 12), (1, 4, 8), (4, 1, 8)]
)
@pytest.mark.parametrize("top_k", [1, 2, 3, 6])
def test_rows_equal_the_mean_over_every_set_of_experts(
    dispatch: DispatchName, num_nodes: int, ranks_per_node: int, num_experts: int, top_k: int
) -> None:
    layout = grid(num_nodes, ranks_per_node)
    sets = itertools.combinations(range(num_experts), top_k)
    rows = count_rows(dispatch, layout, sets, num_experts // layout.num_ranks, source=layout.num_ranks - 1)
    # One source stands for all: under uniform routing only the number of its neighbours matters.
    assert rows.mean(axis=0) == pytest.approx(predicted(dispatch, layout, num_experts, top_k), abs=1e-9)


@pytest.mark.parametrize("dispatch", DISPATCHERS)
def test_rows_of_a_large_layer_equal_sampled_ones(dispatch: DispatchName) -> None:
    layout, num_experts, top_k, tokens = grid(4, 8), 256, 8, 4000
    chosen = np.random.default_rng(0).random((tokens, num_experts)).argsort(axis=1)[:, :top_k]
    rows = count_rows(dispatch, layout, chosen.tolist(), num_experts // layout.num_ranks, source=5)
    standard_error = rows.std(axis=0) / math.sqrt(tokens)
    assert (np.abs(rows.mean(axis=0) - predicted(dispatch, layout, num_experts, top_k)) <= 4 * standard_error).all()


def test_measured_redundancies_give_the_rows_that_uniform_routing_gives() -> None:
    layout, num_experts, top_k = grid(2, 4), 64, 8
    measured = Fanout.measured(
        assignments=top_k,
        rank_redundancy=expected_redundancy(num_experts, top_k, 8),
        node_redundancy=expected_redundancy(num_experts, top_k, 2),
    )
    for dispatch in ("flat", "gpu", "node+gpu"):
        found = rows_per_token(dispatch, layout, measured)
        for index, hop in enumerate(found):
            wanted = predicted(dispatch, layout, num_experts, top_k)[index]
            assert [hop.own, hop.intra_node, hop.inter_node] == pytest.approx(wanted)
    node, exact = rows_per_token("node", layout, measured), predicted("node", layout, num_experts, top_k)
    assert node[0].inter_node == pytest.approx(exact[0, 2])
    assert node[1].total == pytest.approx(exact[1].sum(), rel=0.05)


# Bytes and seconds


def test_bytes_and_seconds_of_two_nodes_by_hand() -> None:
    # 2 nodes of 2 ranks with an expert each, k = 2: a token goes to 2 ranks, on d = 2 (1 - C(2, 2) / C(4, 2)) = 5/3
    # nodes, of which half, 5/6, are remote.
    layout = grid(2, 2)
    layer = Layer(num_experts=4, top_k=2, hidden_size=100, tokens=60, item_bytes=2)
    links = Links(
        intra_node=Link(latency_s=1.0, bandwidth_bytes_per_s=1000.0),
        inter_node=Link(latency_s=2.0, bandwidth_bytes_per_s=100.0),
    )
    flat = estimate("flat", layout, layer, links, backward=False)
    assert flat.rows == ByLink(own=30, intra_node=30, inter_node=60)
    assert [(t.name, t.num_bytes, t.seconds) for t in flat.transfers] == [
        ("exchange of counts", ByLink(own=8, intra_node=8, inter_node=16), pytest.approx(2 * 2 + 0.16)),
        ("dispatch of weights", ByLink(own=120, intra_node=120, inter_node=240), pytest.approx(4 + 2.4)),
        ("dispatch of rows", ByLink(own=6000, intra_node=6000, inter_node=12000), pytest.approx(4 + 120)),
        ("combine of rows", ByLink(own=6000, intra_node=6000, inter_node=12000), pytest.approx(4 + 120)),
    ]
    assert flat.seconds == pytest.approx(4.16 + 6.4 + 124 + 124)
    both = estimate("node+gpu", layout, layer, links)
    assert [t.name for t in both.transfers] == [
        "exchange of counts",
        "exchange of references",
        "dispatch of weights",
        "dispatch of rows",
        "dispatch of rows, second hop",
        "combine of rows, second hop",
        "combine of rows",
        "combine of rows: backward",
        "combine of rows: backward, second hop",
        "dispatch of rows: backward, second hop",
        "dispatch of rows: backward",
        "dispatch of weights: backward",
    ]
    # To each rank: its rows, what it passes on to two places and gets from two, its one expert's assignments.
    assert both.transfers[0].num_bytes == ByLink(own=48, intra_node=48, inter_node=96)
    # The remote node has 1 assignment a token; 5/6 are served by pilots' rows, 1/6 by a copy.
    assert both.transfers[1].num_bytes.inter_node == pytest.approx(60 * (1 + 1 / 6) * 4)
    out, inside = both.transfers[3:5]
    assert out.num_bytes.inter_node == pytest.approx(60 * 5 / 6 * 200)
    assert out.seconds == pytest.approx(4 + 60 * 5 / 6 * 200 / 100)
    assert (inside.num_bytes.own, inside.num_bytes.inter_node) == (0, 0)
    assert inside.num_bytes.intra_node == pytest.approx(60 / 6 * 200)
    assert inside.seconds == pytest.approx(1 + 60 / 6 * 200 / 1000)
    assert [t.seconds for t in both.transfers[3:7]] == [out.seconds, inside.seconds, inside.seconds, out.seconds]
    assert [t.seconds for t in both.transfers[7:11]] == [t.seconds for t in both.transfers[3:7]]
    assert both.num_bytes.inter_node == pytest.approx(sum(t.num_bytes.inter_node for t in both.transfers))


@st.composite
def problems(draw: st.DrawFn) -> tuple[NodeLayout, Layer]:
    layout = grid(draw(st.integers(1, 6)), draw(st.integers(1, 8)))
    num_experts = layout.num_ranks * draw(st.integers(1, 6))
    layer = Layer(
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(num_experts, 12))),
        hidden_size=draw(st.integers(1, 8192)),
        tokens=draw(st.integers(0, 10_000)),
        item_bytes=draw(st.sampled_from([2, 4])),
    )
    return layout, layer


one_link = st.builds(Link, latency_s=st.floats(0, 1e-3), bandwidth_bytes_per_s=st.floats(1e6, 1e12))
any_links = st.builds(Links, intra_node=one_link, inter_node=one_link)


@given(problem=problems(), links=any_links, faster=st.floats(1.0, 100.0), inside=st.booleans())
def test_more_bandwidth_never_makes_a_dispatcher_slower(
    problem: tuple[NodeLayout, Layer], links: Links, faster: float, inside: bool
) -> None:
    def upgraded(link: Link) -> Link:
        return Link(latency_s=link.latency_s, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * faster)

    better = Links(
        intra_node=upgraded(links.intra_node) if inside else links.intra_node,
        inter_node=links.inter_node if inside else upgraded(links.inter_node),
    )
    for dispatch in DISPATCHERS:
        assert estimate(dispatch, *problem, better).seconds <= estimate(dispatch, *problem, links).seconds


@given(problem=problems())
def test_each_level_saves_rows_where_it_promises_to(problem: tuple[NodeLayout, Layer]) -> None:
    rows = {dispatch: estimate(dispatch, *problem, FRONTIER).rows for dispatch in DISPATCHERS}
    room = 1e-9 * problem[1].tokens * problem[1].top_k
    assert rows["gpu"].inter_node <= rows["flat"].inter_node + room
    assert rows["node"].inter_node <= rows["gpu"].inter_node + room
    assert rows["node+gpu"].inter_node == pytest.approx(rows["node"].inter_node)
    assert rows["node+gpu"].intra_node <= rows["node"].intra_node + room
    # Every rank that needs a token gets it once, whichever way it comes.
    assert rows["node+gpu"].total == pytest.approx(rows["gpu"].total, abs=room)
    assert rows["node"].total <= rows["flat"].total + room
    for found in rows.values():
        assert min(found.own, found.intra_node, found.inter_node) >= -room


@given(problem=problems(), links=any_links)
def test_the_choice_is_the_best_estimate_or_flat_close_to_it(problem: tuple[NodeLayout, Layer], links: Links) -> None:
    choice = choose_dispatch(*problem, links)
    seconds = {found.dispatch: found.seconds for found in choice.estimates}
    best = min(seconds.values())
    plain = seconds.get("flat", 0.0)
    assert choice.dispatch in ("flat", "local") if plain <= 1.05 * best else seconds[choice.dispatch] == best


# Choices where there is no doubt


def layer_of(**changes: int) -> Layer:
    return Layer(**{"num_experts": 256, "top_k": 8, "hidden_size": 7168, "tokens": 4096, "item_bytes": 2, **changes})


def slow_network(share: float) -> Links:
    inside = FRONTIER.intra_node
    network = Link(latency_s=5e-6, bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s * share)
    return Links(intra_node=inside, inter_node=network)


def test_a_slow_network_and_many_experts_of_a_token_call_for_both_levels() -> None:
    assert choose_dispatch(grid(2, 8), layer_of(), slow_network(1 / 8)).dispatch == "node+gpu"
    # Large layers of X-MoE's size on the machine it was made for.
    assert choose_dispatch(grid(4, 8), layer_of(), FRONTIER).dispatch == "node+gpu"


def test_one_expert_a_token_leaves_nothing_to_save() -> None:
    assert choose_dispatch(grid(2, 4), layer_of(top_k=1), slow_network(1 / 8)).dispatch == "flat"


def test_latency_alone_calls_for_the_fewest_exchanges() -> None:
    slow_start = Link(latency_s=1e-2, bandwidth_bytes_per_s=1e12)
    choice = choose_dispatch(grid(2, 4), layer_of(tokens=8), Links(intra_node=slow_start, inter_node=slow_start))
    assert choice.dispatch == "flat"


def test_a_network_as_fast_as_the_node_needs_no_pilots() -> None:
    choice = choose_dispatch(grid(2, 4), layer_of(num_experts=64), slow_network(100.0))
    assert choice.dispatch == "gpu"


def test_groups_without_levels() -> None:
    assert choose_dispatch(grid(1, 1), layer_of(), FRONTIER).dispatch == "local"
    assert choose_dispatch(grid(1, 1), layer_of(), FRONTIER).estimates[0].seconds == 0
    assert [e.dispatch for e in choose_dispatch(grid(1, 8), layer_of(), FRONTIER).estimates] == ["flat", "gpu"]
    assert choose_dispatch(grid(1, 8), layer_of(), FRONTIER).dispatch == "gpu"
    assert [e.dispatch for e in choose_dispatch(grid(8, 1), layer_of(), FRONTIER).estimates] == ["flat", "gpu"]
    unequal = NodeLayout.from_hosts(["a", "a", "a", "b"], equal=False)
    assert [e.dispatch for e in choose_dispatch(unequal, layer_of(), FRONTIER).estimates] == ["flat", "gpu"]


def test_routing_limited_to_one_node_makes_the_node_level_worth_more() -> None:
    layout, layer = grid(4, 8), layer_of()
    limited = Fanout.measured(assignments=8, rank_redundancy=0.3, node_redundancy=7 / 8)
    anywhere = choose_dispatch(layout, layer, FRONTIER)
    found = choose_dispatch(layout, layer, FRONTIER, fanout=limited)
    assert found.dispatch == "node+gpu"
    assert found.estimates[-1].seconds < anywhere.estimates[-1].seconds


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_experts": 12}, r"num_experts \(12\) is not divisible by the number of domains \(8\)"),
        ({"num_experts": 8, "top_k": 9}, r"top_k \(9\) must be from 1 to num_experts \(8\)"),
    ],
)
def test_impossible_sizes_are_named(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_dispatch(grid(2, 4), layer_of(**sizes), FRONTIER)


def test_impossible_spreads_and_layers_are_named() -> None:
    with pytest.raises(ValueError, match="in rising order"):
        Fanout.measured(assignments=4, rank_redundancy=0.5, node_redundancy=0.25)
    with pytest.raises(ValueError, match=r"item_bytes \(0\)"):
        layer_of(item_bytes=0)
    assert expected_distinct(8, 8, 4) == 4
