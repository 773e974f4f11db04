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

import enum
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

V = TypeVar("V")
W = TypeVar("W")


class Pause(enum.Enum):
    """What is under way while a run pauses."""

    FAR = "an exchange of the whole group"
    NEAR = "an exchange among the ranks of a node, which ends soon"


# Runs until it returns, and pauses while an exchange is under way.
Pausing = Generator[Pause, None, V]


def overlapped(runs: Sequence[Pausing[V]], meanwhile: Callable[[], W]) -> tuple[list[V], W]:
    """What the runs return, each one step behind the one before, and what ``meanwhile`` returns.

    ``meanwhile`` is called in the first run's first pause. In every step a new run begins, whose first exchange is then
    under way beside all else. Of the others those go on first, oldest first, whose rows are near: what they compute
    overlaps the exchanges that the rest, youngest first, would have to wait for. The order is the same on all ranks,
    whose runs pause alike.
    """
    found: dict[int, V] = {}
    aside: list[W] = []
    pauses: dict[int, Pause] = {}
    for step in range(len(runs)):
        order = [step, *_in_order(pauses)]
        pauses = _advance(runs, order, found)
        if not aside:
            aside.append(meanwhile())
    while pauses:
        pauses = _advance(runs, _in_order(pauses), found)
    return [found[index] for index in range(len(runs))], aside[0]


def _in_order(pauses: dict[int, Pause]) -> list[int]:
    near = sorted(index for index, pause in pauses.items() if pause is Pause.NEAR)
    return [*near, *sorted(pauses.keys() - set(near), reverse=True)]


def together(one: Pausing[V], other: Pausing[W]) -> Pausing[tuple[V, W]]:
    """Both, step by step, so that their exchanges are under way at once; it pauses as ``one`` does."""
    runs: list[Pausing[Any]] = [one, other]
    found: dict[int, Any] = {}
    pauses = _advance(runs, [0, 1], found)
    while pauses:
        yield pauses.get(0, Pause.FAR)
        pauses = _advance(runs, sorted(pauses), found)
    return found[0], found[1]


def within(run: Pausing[V], context: Callable[[], AbstractContextManager[Any]]) -> Pausing[V]:
    """``run``, every step of it within a context of its own, its pauses in none."""
    found: dict[int, V] = {}
    while True:
        with context():
            pauses = _advance([run], [0], found)
        if found:
            return found[0]
        yield pauses[0]


def to_end(run: Pausing[V]) -> V:
    """What ``run`` returns, with nothing done in its pauses."""
    found: dict[int, V] = {}
    while not found:
        _advance([run], [0], found)
    return found[0]


def _advance(runs: Sequence[Pausing[V]], order: Sequence[int], found: dict[int, V]) -> dict[int, Pause]:
    """Takes each of these runs to its next pause; returns those that have not ended, with their pauses."""
    pauses = {}
    for index in order:
        try:
            pauses[index] = next(runs[index])
        except StopIteration as end:
            found[index] = end.value
    return pauses
