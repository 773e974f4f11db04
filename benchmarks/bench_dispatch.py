"""Dispatch and combine on an emulated cluster, forward and backward: xmoe's dispatchers against DeepSpeed's exchanges.

    python benchmarks/bench_dispatch.py [--json] [--rounds 5]
    python benchmarks/bench_dispatch.py --k 1 2 4 8 --links 100 400 --picture dispatch.png

Nodes are network namespaces joined by links of a fixed rate, ranks are processes that talk over gloo; a rank's
neighbours on its node are reached over loopback (``xmoe.testing_cluster``). Needs root and iproute2. What is emulated
is the ratio between links and not the speed of any machine: processors are shared by all ranks, so what a dispatcher
computes costs more here than on nodes of their own.

Every contestant works on the same rows, experts and weights with the same dtype on the wire, and must give the output
and the gradients of the closed form before anything is timed. A time is the median over interleaved rounds of the
slowest rank's. Bytes are counted where the calls of the transport are made, and at the nodes' interfaces.

Figures of the metrics:

    dispatch.time                           seconds of dispatch + combine, forward and backward
    dispatch.speedup_over_flat              time of one row for each (token, expert), over this one
    dispatch.speedup_over_deepspeed         time of deepspeed.moe's exchange (padded, dropping nothing), over this one
    dispatch.speedup_over_autoep            time of AutoEP's exchange, over this one
    dispatch.inter_node_rows_over_lower_bound  rows that crossed, over distinct (token, remote node) pairs
    dispatch.counted_over_interface_bytes   bytes counted as crossing, over bytes that left the nodes' interfaces
    dispatch.host_syncs_per_layer           device-to-host reads of one forward
    dispatch.flat_exchange_over_link        rate of flat's row exchange alone at the busiest node, over the link's
    dispatch.loopback_over_link             rate of an exchange among the ranks of one node, over the link's
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from common import Result, fail, report, versions
from rich.console import Console
from rich.progress import track
from rich.table import Table

from xmoe.testing_cluster import ClusterShape, EmulatedCluster, RankFailure, unavailable

try:
    from dispatch_ranks import Case, Measured, median_of_slowest
except ModuleNotFoundError as error:
    fail(f"the benchmark needs the package {error.name!r}: pip install -r requirements/test.txt")

OURS = ("piper", "gpu", "node", "node+gpu")
PEERS = ("flat", "deepspeed", "autoep")
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
        "popularity": case.popularity,
    }
    times = {name: median_of_slowest([rank.seconds[name] for rank in measured]) for name in case.contestants}
    results = [*link_results(case, measured, base)]
    for name in case.contestants:
        setting = {**base, "dispatch": name}
        results.append(
            Result(
                metric="dispatch.time",
                value=times[name],
                unit="s",
                better="lower",
                setting={**setting, "rounds": case.rounds},
            )
        )
        if name not in PEERS:
            results += [
                Result(
                    metric=f"dispatch.speedup_over_{peer}",
                    value=times[peer] / times[name],
                    unit="ratio",
                    better="higher",
                    setting=setting,
                )
                for peer in PEERS
                if peer in times
            ]
        results += count_results(case, measured, name, setting)
    return results


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
    by_node: dict[int, int] = defaultdict(int)
    for rank, found in enumerate(measured):
        by_node[rank // case.ranks_per_node] += found.flat_exchange_bytes
    flat_s = median_of_slowest([rank.flat_exchange_s for rank in measured])
    results = [("dispatch.flat_exchange_over_link", max(by_node.values()) / flat_s / link_bytes_per_s)]
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
    console = Console()
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


def case_key(result: Result) -> tuple[Any, ...]:
    """What results of one case have in common."""
    return tuple(value for key, value in result.setting.items() if key not in ("dispatch", "rounds"))


def draw(results: list[Result], path: Path) -> None:
    """Time against redundancy (the share of flat's crossing rows that repeat), a panel for each cluster and link.

    Times are over flat's, so that cases of different k share an axis; if bytes between nodes were all that counts,
    a token's row sent once to each node would follow the dashed line.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    flat_s = {case_key(found): found.value for found in of_flat(results, "dispatch.time")}
    redundancy = {
        case_key(found): 1 - 1 / found.value for found in of_flat(results, "dispatch.inter_node_rows_over_lower_bound")
    }
    panels: dict[tuple[Any, ...], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if result.metric == "dispatch.time":
            case, setting = case_key(result), result.setting
            panel = panels[setting["nodes"], setting["ranks_per_node"], setting["link_mbit_per_s"]]
            panel[setting["dispatch"]].append((redundancy[case], result.value / flat_s[case]))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False)
    for axis, ((nodes, ranks, link), lines) in zip(axes[0], panels.items(), strict=True):
        axis.plot([0, 1], [1, 0], linestyle="--", color="grey", label="crossing bytes alone")
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        axis.set(
            title=f"{nodes} nodes x {ranks} ranks, {link:g} Mbit/s",
            xlabel="redundancy of flat's crossing rows",
            ylabel="dispatch + combine, both directions: time over flat's",
            xlim=(0, 1),
            ylim=(0, None),
        )
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def of_flat(results: list[Result], metric: str) -> list[Result]:
    return [result for result in results if result.metric == metric and result.setting["dispatch"] == "flat"]


def cluster_size(text: str) -> tuple[int, int]:
    nodes, _, ranks = text.partition("x")
    return int(nodes), int(ranks)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--clusters", type=cluster_size, nargs="+", default=[(2, 4), (4, 2)], metavar="NODESxRANKS")
    parser.add_argument("--links", type=float, nargs="+", default=[200.0], help="Mbit/s of each node's link, each way")
    parser.add_argument("--k", type=int, nargs="+", default=[8], help="experts a token")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each rank")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--popularity", type=float, default=0.0, help="expert x is drawn with odds (x + 1) ** -s")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each contestant")
    parser.add_argument(
        "--contestants", nargs="+", choices=[*PEERS, *OURS], default=[*PEERS, *OURS], help="flat takes part always"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one setting")
    parser.add_argument("--picture", type=Path, help="draw time against redundancy into this file")
    return parser.parse_args()


def case_of(options: argparse.Namespace, nodes: int, ranks: int, link: float, k: int) -> Case:
    return Case(
        nodes=nodes,
        ranks_per_node=ranks,
        experts=options.experts,
        k=k,
        hidden=options.hidden,
        tokens=options.tokens,
        dtype=options.dtype,
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
        draw(results, options.picture)


if __name__ == "__main__":
    main()
