"""Measures the links between the ranks of a job: what ``xmoe bench links`` runs on every rank.

Two patterns, over the links inside a node and over those between nodes:

    all-to-all       every rank sends to all its peers of the class at once, as dispatch does; this is what is kept
    point-to-point   two ranks alone, there and back: the link without its neighbours' traffic
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .links import Fit, Point, Setting, fit_link
from .ops.collectives import Begun, Exchange, carriers, exchange_rows, sum_over_ranks

logger = logging.getLogger(__name__)

Pattern = Literal["all-to-all", "point-to-point"]
LinkClass = Literal["intra-node", "inter-node"]

_SMALLEST_BYTES = 1024
_TIMEOUT_S = 120.0
_SECONDS_A_SIZE = 2.0
_FEWEST_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One pattern over one class of links: the times of all sizes, and the link fitted to them."""

    pattern: Pattern
    link_class: LinkClass
    points: tuple[Point, ...]
    fit: Fit


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """Measurements of one job; those for which it has no two ranks, or whose times show no bandwidth, are missing.

    ``hosts`` the nodes' names, each once, in the order of their first ranks
    """

    hosts: tuple[str, ...]
    setting: Setting
    measurements: tuple[Measurement, ...]

    def fit_of(self, pattern: Pattern, link_class: LinkClass) -> Fit | None:
        found = (m.fit for m in self.measurements if (m.pattern, m.link_class) == (pattern, link_class))
        return next(found, None)


def measure_links(device: torch.device, *, max_bytes: int, rounds: int, host: str | None = None) -> LinkReport:
    """Measures on all ranks of the process group and returns the same report on each. A collective.

    ``max_bytes`` is the most that one rank sends at once; ``host`` stands for this machine's name. Raises ValueError,
    on every rank, for a single rank, nodes with unequal numbers of ranks, or all-to-alls that show no bandwidth.
    """
    nodes = _nodes(host or socket.gethostname())
    bench = _Bench(device, nodes, rounds=rounds)
    sizes = list(_sizes(max_bytes))
    found: list[Measurement] = []
    for pattern, link_class, run, messages in bench.patterns():
        points = [bench.time(run, messages, size) for size in sizes]
        try:  # every rank has the same points, so that all raise or none does
            fit = fit_link(points)
        except ValueError as error:
            problem = f"{pattern} over {link_class} links: {error} (--max-mib)"
            if pattern == "all-to-all":
                raise ValueError(problem) from error
            logger.warning("%s", problem)
            continue
        found.append(Measurement(pattern=pattern, link_class=link_class, points=tuple(points), fit=fit))
    backend, name = carriers(bench.all.group, device)
    setting = Setting(ranks_per_node=len(bench.nodes[0]), backend=backend, device=name)
    return LinkReport(hosts=tuple(nodes), setting=setting, measurements=tuple(found))


def _sizes(max_bytes: int) -> Iterator[int]:
    size = _SMALLEST_BYTES
    while size <= max_bytes:
        yield size
        size *= 4


def _nodes(host: str) -> dict[str, list[int]]:
    """Ranks by host name; the same on every rank."""
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, host)
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    if len(names) == 1:
        raise ValueError("a single rank has no links: start at least two, with torchrun, srun or mpiexec")
    if len({len(ranks) for ranks in nodes.values()}) > 1:
        counts = ", ".join(f"{name} has {len(ranks)}" for name, ranks in nodes.items())
        raise ValueError(f"every node must run as many ranks: {counts}")
    return nodes


class _Bench:
    """Runs and times the patterns. ``nodes`` as :func:`_nodes` gives them."""

    def __init__(self, device: torch.device, nodes: dict[str, list[int]], *, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.nodes = list(nodes.values())
        groups = [dist.new_group(ranks) for ranks in self.nodes]  # by every rank, also those of other nodes
        self.own_node = next(index for index, ranks in enumerate(self.nodes) if self.rank in ranks)
        assert dist.group.WORLD is not None
        self.all = Exchange(group=dist.group.WORLD, label="xmoe bench links", timeout_s=_TIMEOUT_S)
        self.node = Exchange(group=groups[self.own_node], label="xmoe bench links: node", timeout_s=_TIMEOUT_S)

    def patterns(self) -> Iterator[tuple[Pattern, LinkClass, Callable[[int], float], int]]:
        """What this job can measure: the function that runs one size once and its number of messages."""
        ranks = self.nodes[0]
        if len(ranks) > 1:
            yield "all-to-all", "intra-node", self._within_nodes, len(ranks) - 1
            yield "point-to-point", "intra-node", self._there_and_back(ranks[0], ranks[1]), 1
        if len(self.nodes) > 1:
            yield "all-to-all", "inter-node", self._between_nodes, self.world - len(ranks)
            yield "point-to-point", "inter-node", self._there_and_back(ranks[0], self.nodes[1][0]), 1

    def time(self, run: Callable[[int], float], messages: int, num_bytes: int) -> Point:
        """The slowest rank's seconds, in the quickest quarter of the rounds: others use machines too.

        ``num_bytes`` is rounded down to whole messages.
        """
        each = max(num_bytes // messages, 1)
        self._slowest([run(each)])  # connections, and the pages of new buffers
        (once,) = self._slowest([run(each)])
        rounds = max(min(self.rounds, int(_SECONDS_A_SIZE / max(once, 1e-9))), _FEWEST_ROUNDS)
        seconds = sorted(self._slowest([run(each) for _ in range(rounds)]))
        return Point(messages=messages, num_bytes=each * messages, seconds=seconds[rounds // 4])

    def _slowest(self, seconds: Sequence[float]) -> list[float]:
        everywhere = torch.zeros(self.world, len(seconds), dtype=torch.float64)
        everywhere[self.rank] = torch.tensor(seconds, dtype=torch.float64)
        slowest: list[float] = sum_over_ranks(everywhere.to(self.device), self.all).amax(dim=0).tolist()
        return slowest

    def _within_nodes(self, each: int) -> float:
        splits = [0 if rank == self.rank else each for rank in self.nodes[self.own_node]]
        return self._timed(lambda: self._exchange(splits, self.node))

    def _between_nodes(self, each: int) -> float:
        splits = [0 if rank in self.nodes[self.own_node] else each for rank in range(self.world)]
        return self._timed(lambda: self._exchange(splits, self.all))

    def _exchange(self, splits: list[int], exchange: Exchange) -> None:
        rows = torch.zeros(sum(splits), dtype=torch.uint8, device=self.device)
        exchange_rows(rows, splits, splits, exchange)

    def _there_and_back(self, first: int, second: int) -> Callable[[int], float]:
        def run(each: int) -> float:
            if self.rank not in (first, second):
                self._timed(lambda: None)
                return 0.0
            block = torch.zeros(each, dtype=torch.uint8, device=self.device)
            turns = [dist.isend, dist.irecv] if self.rank == first else [dist.irecv, dist.isend]
            peer = second if self.rank == first else first
            return self._timed(lambda: self._take_turns(turns, block, peer)) / 2

        return run

    def _take_turns(self, turns: Sequence[Callable[..., object]], block: Tensor, peer: int) -> None:
        for turn in turns:
            Begun(turn(block, peer), self.all.named("point to point"), block.device).finish()

    def _timed(self, run: Callable[[], object]) -> float:
        """Seconds of one call that all ranks start together."""
        sum_over_ranks(torch.zeros(1, device=self.device), self.all)
        self._synchronize()
        started = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
