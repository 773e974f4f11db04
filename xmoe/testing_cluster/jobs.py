"""What travels between an emulated cluster and its owner."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


class RankFailure(AssertionError):
    """One or more ranks raised or did not finish; the message holds what each said."""


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """N nodes of R ranks each; rank r runs on node ``r // R``.

    ``link_mbit_per_s``  what a node can send and, at the same time, receive, frame headers included; None: no limit
    ``burst_bytes``      what a link that was idle lets pass at once. At least a packet before its segmentation (64 KiB)
    ``queue_s``          a packet that would wait longer at a link is dropped. Long, as retransmissions and their
                         timeouts are no part of what is measured
    """

    num_nodes: int
    ranks_per_node: int
    link_mbit_per_s: float | None = None
    burst_bytes: int = 72 * 1024
    queue_s: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= 250 or self.ranks_per_node < 1:
            raise ValueError(f"no cluster of {self.num_nodes} nodes with {self.ranks_per_node} ranks (1 to 250 nodes)")
        if self.link_mbit_per_s is not None and not 0.1 <= self.link_mbit_per_s <= 100_000:
            raise ValueError(f"link_mbit_per_s is {self.link_mbit_per_s}, must lie between 0.1 and 100000")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes and packets at one node's interfaces: ``sent`` and ``received`` at its link, ``looped`` at its loopback."""

    sent_bytes: int
    received_bytes: int
    looped_bytes: int
    sent_packets: int
    received_packets: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(
            **{field.name: getattr(self, field.name) - getattr(before, field.name) for field in fields(self)}
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank runs: a function (its file, qualified name and pickled arguments), or else a command.

    ``grace_s``  after the first failure the other ranks are given this long to end by themselves
    """

    function: tuple[str, str] | None
    arguments: bytes
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    timeout_s: float
    grace_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank ended.

    ``status``   exit status, -s after signal s, None if it was still running at the end of the time limit
    ``answer``   pickled ``(returned, value or exception)`` of a function; empty without one
    ``log``      the end of what it printed
    """

    rank: int
    node: str
    status: int | None
    answer: bytes
    log: str

    @property
    def value(self) -> Any:
        """What the function returned or raised, None if it did neither."""
        return pickle.loads(self.answer)[1] if self.answer else None


@dataclass(frozen=True, kw_only=True)
class Report:
    """A job's end: outcomes by rank, the traffic during the job by node, and its duration."""

    outcomes: list[Outcome]
    traffic: list[Traffic]
    seconds: float

    @property
    def values(self) -> list[Any]:
        """What the ranks' functions returned, by rank."""
        return [outcome.value for outcome in self.outcomes]
