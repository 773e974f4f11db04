"""What it brings to cut a layer's tokens into chunks whose exchanges overlap with other chunks' experts.

    python benchmarks/bench_overlap.py [--json] [--rounds 5] [--picture overlap.png]
    python benchmarks/bench_overlap.py --ffn 768 --link-mbit 300 --chunks 2 4 8 --dispatch gpu node+gpu
    python benchmarks/bench_overlap.py --emulate-us 150 --picture overlap-emulated.png

The whole routed layer (router, routed experts, shared experts), forward and backward, on an emulated cluster: nodes are
network namespaces joined by links of a fixed rate (``xmoe.testing_cluster``; needs root and iproute2). Before anything
is timed, outputs and gradients of every number of chunks must equal those of one chunk. Rounds are interleaved: each
runs the layer of every setting and, alone, its experts, its exchanges and its shared experts. A time is the median over
rounds of the slowest rank's.

Overlap pays where computing and exchanging take about equally long: choose ``--ffn`` and ``--link-mbit`` so that
"experts" and "exchanges" are alike. Here all ranks share few cores, and gloo's threads and the kernel's network code
need them too, so computing is slowed by what it overlaps with, more than where a device computes and the network moves
rows by itself. ``--emulate-us`` shows the other end: experts sleep for so many microseconds a row, a third of them in
forward, and leave the cores to the exchanges. Both are this machine's figures and no other's; the order of events,
which the picture shows, is the same anywhere.

    saving that is possible = min(experts, exchanges - shared)

One chunk runs the shared experts behind the first exchange already; with any number of chunks, the best that is left
is to hide the routed experts behind the other exchanges, or those behind the experts. Of that, n chunks of equal parts
can reach the share 1 - 1/n: the first chunk's exchange out and the last one's home have no experts beside them.

Figures of the metrics:

    overlap.time                    seconds of the layer, forward and backward
    overlap.wait                    seconds of them in which a rank waits for rows, mean of the ranks
    overlap.speedup_over_one_chunk  time of one chunk, over this one
    overlap.experts_alone           seconds of the routed experts, chunk by chunk, nothing being exchanged
    overlap.experts_cpu_alone       processor seconds of them, mean of the ranks: what smaller products cost
    overlap.exchanges_alone         seconds of dispatch and combine, chunk by chunk, nothing being computed
    overlap.shared_alone            seconds of the shared experts
    overlap.ideal_time              time of one chunk less the saving that is possible
    overlap.share_of_ideal_saving   what was saved over one chunk, over what is possible; negative where it is slower
    overlap.share_overlapped        of the time that an exchange was under way on rank 0, in one step: did not wait
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from common import Result, fail, report, versions
from overlap_picture import draw
from rich.console import Console
from rich.table import Table

from xmoe.testing_cluster import ClusterShape, EmulatedCluster, RankFailure, unavailable

try:
    from dispatch_timing import slowest_of_rounds
    from overlap_ranks import Case, Kind, Measured
except ModuleNotFoundError as error:
    fail(f"the benchmark needs the package {error.name!r}: pip install -r requirements/test.txt")

PRELOAD = ("torch", "overlap_ranks")
PARTS = ("experts", "exchanges", "shared")


def rounds_of(measured: list[Measured], kind: Kind) -> dict[str, list[float]]:
    """Seconds by what was timed, then round."""
    found = {"time": slowest_of_rounds([rank.layer[kind] for rank in measured])}
    for part in PARTS:
        found[f"{part}_alone"] = slowest_of_rounds([rank.parts[kind][part] for rank in measured])
    for what, by_rank in (
        ("wait", [rank.waits[kind] for rank in measured]),
        ("experts_cpu_alone", [rank.cpu[kind] for rank in measured]),
    ):
        found[what] = [statistics.mean(of_round) for of_round in zip(*by_rank, strict=True)]
    return found


def results_of(case: Case, measured: list[Measured]) -> list[Result]:
    """Every metric of every dispatcher and number of chunks."""
    results: list[Result] = []
    for name in case.dispatchers:
        one = rounds_of(measured, (name, 1))
        one_s = {what: statistics.median(values) for what, values in one.items()}
        possible_s = min(one_s["experts_alone"], one_s["exchanges_alone"] - one_s["shared_alone"])
        for chunks in case.chunks:
            rounds = rounds_of(measured, (name, chunks))
            setting = {**setting_of(case), "dispatch": name, "chunks": chunks}
            results += [_seconds(f"overlap.{what}", values, setting) for what, values in rounds.items()]
            if possible_s > 0:
                results.append(_seconds("overlap.ideal_time", [one_s["time"] - possible_s], setting))
            share = measured[0].traces[name, chunks].overlapped_share()
            results.append(_ratio("overlap.share_overlapped", share, setting))
            if chunks > 1:
                results += _against_one(one, rounds, possible_s, setting)
    return results


def _against_one(
    one: dict[str, list[float]], rounds: dict[str, list[float]], possible_s: float, setting: dict[str, Any]
) -> list[Result]:
    ratios = [first / own for first, own in zip(one["time"], rounds["time"], strict=True)]
    one_s, own_s = statistics.median(one["time"]), statistics.median(rounds["time"])
    spread = (min(ratios), max(ratios))
    results = [_ratio("overlap.speedup_over_one_chunk", one_s / own_s, setting, spread=spread)]
    if possible_s > 0:
        results.append(_ratio("overlap.share_of_ideal_saving", (one_s - own_s) / possible_s, setting))
    return results


def setting_of(case: Case) -> dict[str, Any]:
    return {
        "nodes": case.nodes,
        "ranks_per_node": case.ranks_per_node,
        "link_mbit_per_s": case.link_mbit_per_s,
        "tokens": case.tokens,
        "hidden": case.hidden,
        "ffn": case.ffn,
        "shared_ffn": case.shared_ffn,
        "experts": case.experts,
        "k": case.k,
        "dtype": "float32",
        "computing": "emulated" if case.emulated_us else "real",
        "emulated_us": case.emulated_us,
        "rounds": case.rounds,
    }


def _seconds(metric: str, rounds: list[float], setting: dict[str, Any]) -> Result:
    spread = (min(rounds), max(rounds)) if len(rounds) > 1 else None
    value = statistics.median(rounds)
    return Result(metric=metric, value=value, unit="s", better="lower", setting=setting, spread=spread)


def _ratio(metric: str, value: float, setting: dict[str, Any], spread: tuple[float, float] | None = None) -> Result:
    return Result(metric=metric, value=value, unit="ratio", better="higher", setting=setting, spread=spread)


COLUMNS = {
    "layer (s)": "time",
    "waiting (s)": "wait",
    "over one chunk": "speedup_over_one_chunk",
    "experts alone (s)": "experts_alone",
    "their CPU (s)": "experts_cpu_alone",
    "exchanges alone (s)": "exchanges_alone",
    "shared alone (s)": "shared_alone",
    "ideal (s)": "ideal_time",
    "share of ideal saving": "share_of_ideal_saving",
    "overlapped": "share_overlapped",
}


def show(case: Case, results: list[Result], used: dict[str, str | None]) -> None:
    """A table for each dispatcher, a line for each number of chunks."""
    console = Console() if sys.stdout.isatty() else Console(width=140)
    found = {(each.setting["dispatch"], each.setting["chunks"], each.metric): each.value for each in results}
    about = ", ".join(f"{key}={value}" for key, value in setting_of(case).items())
    for name in case.dispatchers:
        one_s = {part: found[name, 1, f"overlap.{part}_alone"] for part in PARTS}
        sum_s, longer_s = sum(one_s.values()), max(one_s["experts"], one_s["exchanges"])
        caption = (
            f"one chunk's parts alone: {sum_s:.3g} s added up, {longer_s:.3g} s the longer of experts and exchanges"
        )
        table = Table(title=f"{name}: {about}", caption=caption)
        for heading in ("chunks", *COLUMNS):
            table.add_column(heading, justify="right")
        for chunks in case.chunks:
            values = [found.get((name, chunks, f"overlap.{metric}")) for metric in COLUMNS.values()]
            table.add_row(str(chunks), *("" if value is None else f"{value:.3g}" for value in values))
        console.print(table)
    console.print(", ".join(f"{name} {version}" for name, version in used.items()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--cluster", default="2x2", metavar="NODESxRANKS", help="nodes, and ranks of each")
    parser.add_argument("--link-mbit", type=float, default=200.0, help="Mbit/s of each node's link, each way")
    parser.add_argument(
        "--dispatch", nargs="+", default=["flat", "node+gpu"], choices=["flat", "gpu", "node", "node+gpu"]
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4], help="1 takes part always")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--k", type=int, default=4, help="experts a token")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=512, help="width of a routed expert")
    parser.add_argument("--shared-ffn", type=int, default=512, help="width of the shared experts; 0: none")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each rank")
    parser.add_argument("--emulate-us", type=float, default=0.0, help="microseconds that experts sleep for each row")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each setting")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--picture", type=Path, help="draw bars and time lines into this file")
    return parser.parse_args()


def case_of(options: argparse.Namespace) -> Case:
    nodes, _, ranks = options.cluster.partition("x")
    return Case(
        nodes=int(nodes),
        ranks_per_node=int(ranks),
        experts=options.experts,
        k=options.k,
        hidden=options.hidden,
        ffn=options.ffn,
        shared_ffn=options.shared_ffn,
        tokens=options.tokens,
        link_mbit_per_s=options.link_mbit,
        rounds=options.rounds,
        timeout_s=options.timeout,
        dispatchers=tuple(dict.fromkeys(options.dispatch)),
        chunks=tuple(sorted({1, *options.chunks})),
        emulated_us=options.emulate_us,
    )


def main() -> None:
    options = parse()
    if reason := unavailable():
        print(f"skipped: {reason}", file=sys.stderr)
        return
    used = {**versions("torch"), "load_average_before": f"{os.getloadavg()[0]:.2f}"}
    case = case_of(options)
    shape = ClusterShape(num_nodes=case.nodes, ranks_per_node=case.ranks_per_node, link_mbit_per_s=case.link_mbit_per_s)
    try:
        with EmulatedCluster(shape, preload=PRELOAD) as cluster, Console(stderr=True).status("measuring"):
            measured = cluster.run("overlap_ranks:measure", case, timeout_s=case.timeout_s).values
    except RankFailure as error:
        fail(str(error))
    results = results_of(case, measured)
    if options.json:
        report(results, as_json=True, used=used, title="")
    else:
        show(case, results, used)
    if options.picture is not None:
        draw(results, measured[0].traces, options.picture, used)


if __name__ == "__main__":
    main()
