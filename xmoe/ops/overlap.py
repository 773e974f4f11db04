"""Runs that pause while an exchange is under way, and what to compute then.

    chunk 0   leave ~~         experts  ~~  sum
    chunk 1            leave ~~~~~~~~~  experts  ~~  sum         ~~ an exchange under way
    shared      shared

Autograd runs backward in the reverse order of forward, and backward of a stage that ends an exchange begins one
(``xmoe.ops.relay``): the same picture, read from right to left, is that of backward. (Exchanges of chunks behind other
chunks' experts: Tutel, arXiv 2206.03382. There chunks are of an expert's capacity; here of tokens, so that a token's
row still goes to each node once.)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

V = TypeVar("V")
W = TypeVar("W")

# Runs until it returns; at each pause an exchange is under way.
Pausing = Generator[None, None, V]


def overlapped(runs: Sequence[Pausing[V]], meanwhile: Callable[[], W]) -> tuple[list[V], W]:
    """What the runs return, each one step behind the one before, and what ``meanwhile`` returns.

    ``meanwhile`` is called in the first run's first pause. In every step the youngest run goes first: its exchange is
    under way while the older ones compute. The order is the same on all ranks, whose runs pause equally often.
    """
    found: dict[int, V] = {}
    under_way: list[int] = []
    aside: list[W] = []
    for index in range(len(runs)):
        under_way = _advance(runs, [index, *under_way], found)
        if not aside:
            aside.append(meanwhile())
    while under_way:
        under_way = _advance(runs, under_way, found)
    return [found[index] for index in range(len(runs))], aside[0]


def together(one: Pausing[V], other: Pausing[W]) -> Pausing[tuple[V, W]]:
    """Both, step by step, so that their exchanges are under way at once."""
    runs: list[Pausing[Any]] = [one, other]
    found: dict[int, Any] = {}
    under_way = _advance(runs, [0, 1], found)
    while under_way:
        yield
        under_way = _advance(runs, under_way, found)
    return found[0], found[1]


def within(run: Pausing[V], context: Callable[[], AbstractContextManager[Any]]) -> Pausing[V]:
    """``run``, every step of it within a context of its own, its pauses in none."""
    found: dict[int, V] = {}
    while True:
        with context():
            _advance([run], [0], found)
        if found:
            return found[0]
        yield


def to_end(run: Pausing[V]) -> V:
    """What ``run`` returns, with nothing done in its pauses."""
    found: dict[int, V] = {}
    while not found:
        _advance([run], [0], found)
    return found[0]


def _advance(runs: Sequence[Pausing[V]], under_way: list[int], found: dict[int, V]) -> list[int]:
    """Takes each of these runs to its next pause; returns those that have not ended."""
    for index in under_way:
        try:
            next(runs[index])
        except StopIteration as end:
            found[index] = end.value
    return [index for index in under_way if index not in found]
