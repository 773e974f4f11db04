"""Dispatch and combine on an emulated cluster, forward and backward: xmoe's dispatchers against DeepSpeed's exchanges.

    python benchmarks/bench_dispatch.py [--json] [--rounds 5]
    python benchmarks/bench_dispatch.py --cluster 2x4,4x2 --k 1,2,4,8 --link-mbit 100,400 --speedup-picture speedup.png
    python benchmarks/bench_dispatch.py --routing skewed --dtype bf16

Nodes are network namespaces joined by links of a fixed rate, ranks are processes that talk over gloo; a rank's
neighbours on its node are reached over loopback (``xmoe.testing_cluster``). Needs root and iproute2. What is emulated
is the ratio between links and not the speed of any machine: processors are shared by all ranks, so what a dispatcher
computes costs more here than on nodes of their own.

Every contestant works on the same rows, experts and weights with the same dtype on the wire, and must give the output
and the gradients of the closed form, in float64, before anything is timed. A time is the median over interleaved
rounds of the slowest rank's; ``spread`` in a line of JSON holds the least and the greatest of the rounds. Bytes are
counted where the calls of the transport are made, and at the nodes' interfaces.

Skewed routing draws experts by Zipf's law, of exponent 1 unless ``--popularity`` says another: the expert of place i,
from 0, with odds 1 / (i + 1), a token's k experts being distinct. Places are dealt to experts by a shuffle of fixed
seed, and every contestant gets the same selections.

Figures of the metrics:

    dispatch.time                           seconds of dispatch + combine, forward and backward
    dispatch.speedup_over_flat              time of one row for each (token, expert), over this one
    dispatch.speedup_over_deepspeed         time of deepspeed.moe's exchange (padded, dropping nothing), over this one
    dispatch.speedup_over_autoep            time of AutoEP's exchange, over this one
    dispatch.inter_node_rows_over_lower_bound  rows that crossed, over distinct (token, remote node) pairs
    dispatch.counted_over_interface_bytes   bytes counted as crossing, over bytes that left the nodes' interfaces
    dispatch.host_syncs_per_layer           device-to-host reads of one forward
    dispatch.flat_exchange_over_link        rate of flat's row exchange alone, busiest way of a node, over the link's
    dispatch.loopback_over_link             rate of an exchange among the ranks of one node, over the link's
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from common import Result, fail, report, versions
from dispatch_pictures import case_key, draw_speedups, draw_times
from rich.console import Console
from rich.progress import track
from rich.table import Table

from xmoe.testing_cluster import ClusterShape, EmulatedCluster, RankFailure, unavailable

try:
    from dispatch_ranks import Case, Measured
    from dispatch_timing import median_of_slowest, slowest_of_rounds
except ModuleNotFoundError as error:
    fail(f"the benchmark needs the package {error.name!r}: pip install -r requirements/test.txt")

OURS = ("piper", "gpu", "node", "node+gpu")
PEERS = ("flat", "deepspeed", "autoep")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "float32": "float32", "bfloat16": "bfloat16"}
PRELOAD = ("torch", "deepspeed", "xmoe.integrations.deepspeed", "dispatch_ranks")


def total(measured: list[Measured], name: str, what: str) -> int:
    return sum(getattr(rank.counted[name], what) for rank in measured)


def results_of(case: Case, measured: list[Measured]) -> list[Result]:
    """Every metric of one case."""
    base: dict[str, Any] = {
        "nodes": case.nodes,
        "ranks_per_node": case.ranks_per_node,
        "k": case.k,
        "link_mbit_per_s": case.link_mbit_per_s,
        "E": case.experts,
        "H": case.hidden,
        "T": case.tokens,
        "dtype": case.dtype,
        "routing": "skewed" if case.popularity else "uniform",
        "popularity": case.popularity,
    }
    rounds = {name: slowest_of_rounds([rank.seconds[name] for rank in measured]) for name in case.contestants}
    results = [*link_results(case, measured, base)]
    for name in case.contestants:
        setting = {**base, "dispatch": name}
        results.append(
            Result(
                metric="dispatch.time",
                value=statistics.median(rounds[name]),
                unit="s",
                better="lower",
                setting={**setting, "rounds": case.rounds},
                spread=(min(rounds[name]), max(rounds[name])),
            )
        )
        results += [
            speedup(f"dispatch.speedup_over_{peer}", rounds[peer], rounds[name], setting)
            for peer in PEERS
            if peer in rounds and (name not in PEERS or peer == "flat" != name)
        ]
        results += count_results(case, measured, name, setting)
    return results


def speedup(metric: str, peers_s: list[float], own_s: list[float], setting: dict[str, Any]) -> Result:
    """Ratio of the medians; the spread is that of the rounds' own ratios, which the ratio of medians lies within."""
    ratios = [peer / own for peer, own in zip(peers_s, own_s, strict=True)]
    return Result(
        metric=metric,
        value=statistics.median(peers_s) / statistics.median(own_s),
        unit="ratio",
        better="higher",
        setting=setting,
        spread=(min(ratios), max(ratios)),
    )


def count_results(case: Case, measured: list[Measured], name: str, setting: dict[str, Any]) -> list[Result]:
    """Rows, bytes and host reads of one contestant."""
    pairs = sum(rank.crossing_pairs for rank in measured)
    leaders = measured[:: case.ranks_per_node]  # an interface's count is the same on each rank of its node
    crossing = total(measured, name, "crossing_bytes")
    rows = total(measured, name, "crossing_rows")
    if name not in ("deepspeed", "autoep") and rows != 4 * (planned := total(measured, name, "planned_rows")):
        fail(f"{name}: plans of {planned} crossing rows moved {rows} in four exchanges")
    found = (
        # Rows cross four times: out and back, forward and backward.
        ("dispatch.inter_node_rows_over_lower_bound", rows / (4 * pairs), "ratio"),
        ("dispatch.counted_over_interface_bytes", crossing / total(leaders, name, "interface_bytes"), "ratio"),
        ("dispatch.crossing_bytes", crossing, "B"),
        ("dispatch.staying_bytes", total(measured, name, "staying_bytes"), "B"),
        ("dispatch.host_syncs_per_layer", max(rank.counted[name].host_syncs for rank in measured), "reads"),
    )
    return [
        Result(
            metric=metric,
            value=value,
            unit=unit,
            better="higher" if metric.endswith("interface_bytes") else "lower",
            setting=setting,
        )
        for metric, value, unit in found
    ]


def link_results(case: Case, measured: list[Measured], base: dict[str, Any]) -> list[Result]:
    """How much of its link flat's row exchange uses, and how much faster the way inside a node is."""
    link_bytes_per_s = case.link_mbit_per_s * 1e6 / 8
    by_way: dict[tuple[int, str], int] = defaultdict(int)  # a link carries its rate each way
    for rank, found in enumerate(measured):
        for way, moved_bytes in zip(("sent", "received"), found.flat_exchange_bytes, strict=True):
            by_way[rank // case.ranks_per_node, way] += moved_bytes
    flat_s = median_of_slowest([rank.flat_exchange_s for rank in measured])
    results = [("dispatch.flat_exchange_over_link", max(by_way.values()) / flat_s / link_bytes_per_s)]
    inside = measured[: case.ranks_per_node]
    if case.ranks_per_node > 1:
        inside_s = median_of_slowest([rank.loopback_s for rank in inside])
        moved = sum(rank.loopback_bytes for rank in inside)
        results.append(("dispatch.loopback_over_link", moved / inside_s / link_bytes_per_s))
    return [
        Result(metric=metric, value=value, unit="ratio", better="higher", setting=base) for metric, value in results
    ]


COLUMNS = {
    "time (s)": "dispatch.time",
    "over flat": "dispatch.speedup_over_flat",
    "over deepspeed": "dispatch.speedup_over_deepspeed",
    "over autoep": "dispatch.speedup_over_autoep",
    "rows / bound": "dispatch.inter_node_rows_over_lower_bound",
    "crossing MB": "dispatch.crossing_bytes",
    "staying MB": "dispatch.staying_bytes",
    "counted / interface": "dispatch.counted_over_interface_bytes",
    "host syncs": "dispatch.host_syncs_per_layer",
}


def show(results: list[Result], used: Mapping[str, str | None]) -> None:
    """A table for each case, a line for each contestant."""
    console = Console() if sys.stdout.isatty() else Console(width=140)  # a file has no width of its own
    cases: dict[tuple[Any, ...], dict[str, dict[str, Result]]] = defaultdict(lambda: defaultdict(dict))
    for result in results:
        cases[case_key(result)][result.setting.get("dispatch", "")][result.metric] = result
    for lines in cases.values():
        links = lines.pop("")
        setting = next(iter(links.values())).setting
        title = ", ".join(f"{key}={value}" for key, value in setting.items())
        caption = ", ".join(f"{metric} {result.value:.3g}" for metric, result in links.items())
        table = Table(title=title, caption=caption)
        table.add_column("dispatch")
        for heading in COLUMNS:
            table.add_column(heading, justify="right")
        for name, found in lines.items():
            values = []
            for metric in COLUMNS.values():
                value = found[metric].value / (1e6 if found[metric].unit == "B" else 1) if metric in found else None
                values.append("" if value is None else f"{value:.3g}")
            table.add_row(name, *values)
        console.print(table)
    console.print(", ".join(f"{name} {version}" for name, version in used.items()))


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An option's values, separated by commas; the option itself may be given several words as well."""

    def parsed(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    parsed.__name__ = f"list of {kind.__name__}"  # for argparse's message
    return parsed


def cluster_size(text: str) -> tuple[int, int]:
    nodes, _, ranks = text.partition("x")
    return int(nodes), int(ranks)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    for names, kind, default, about in (
        (("--clusters", "--cluster"), cluster_size, [(2, 4), (4, 2)], "NODESxRANKS of a node: 2x4,4x2"),
        (("--links", "--link-mbit"), float, [200.0], "Mbit/s of each node's link, each way"),
        (("--k",), int, [8], "experts a token"),
    ):
        parser.add_argument(*names, type=listed(kind), nargs="+", default=[default], help=about)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each rank")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of rows on every wire")
    parser.add_argument("--routing", choices=["uniform", "skewed"], help="of which experts tokens draw; uniform")
    parser.add_argument("--popularity", type=float, help="exponent of skewed routing; 1")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each contestant")
    parser.add_argument(
        "--contestants", nargs="+", choices=[*PEERS, *OURS], default=[*PEERS, *OURS], help="flat takes part always"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one setting")
    parser.add_argument("--picture", type=Path, help="draw time over flat's against redundancy into this file")
    parser.add_argument("--speedup-picture", type=Path, help="draw speedup over flat against redundancy into this file")
    options = parser.parse_args()
    for name in ("clusters", "links", "k"):
        setattr(options, name, [value for values in getattr(options, name) for value in values])
    if options.routing == "uniform" and options.popularity:
        parser.error("--popularity is of skewed routing")
    if options.popularity is None:
        options.popularity = 1.0 if options.routing == "skewed" else 0.0
    return options


def case_of(options: argparse.Namespace, nodes: int, ranks: int, link: float, k: int) -> Case:
    return Case(
        nodes=nodes,
        ranks_per_node=ranks,
        experts=options.experts,
        k=k,
        hidden=options.hidden,
        tokens=options.tokens,
        dtype=DTYPES[options.dtype],
        popularity=options.popularity,
        link_mbit_per_s=link,
        rounds=options.rounds,
        timeout_s=options.timeout,
        contestants=tuple(dict.fromkeys(["flat", *options.contestants])),
    )


def main() -> None:
    options = parse()
    if reason := unavailable():
        print(f"skipped: {reason}", file=sys.stderr)
        return
    used = {**versions("torch", "deepspeed"), "load_average_before": f"{os.getloadavg()[0]:.2f}"}
    results: list[Result] = []
    console = Console(stderr=True)
    settings = [(*size, link, k) for size in options.clusters for link in options.links for k in options.k]
    cluster, size = None, None
    try:
        for nodes, ranks, link, k in track(settings, "measuring", console=console, transient=True):
            if size != (nodes, ranks):
                if cluster is not None:
                    cluster.close()
                shape = ClusterShape(num_nodes=nodes, ranks_per_node=ranks, link_mbit_per_s=link)
                cluster, size = EmulatedCluster(shape, preload=PRELOAD), (nodes, ranks)
            cluster.set_link_rate(link)
            case = case_of(options, nodes, ranks, link, k)
            results += results_of(case, cluster.run("dispatch_ranks:measure", case, timeout_s=options.timeout).values)
    except RankFailure as error:
        fail(str(error))
    finally:
        if cluster is not None:
            cluster.close()
    if options.json:
        report(results, as_json=True, used=used, title="")
    else:
        show(results, used)
    if options.picture is not None:
        draw_times(results, options.picture, used)
    if options.speedup_picture is not None:
        draw_speedups(results, options.speedup_picture, used)


if __name__ == "__main__":
    main()
