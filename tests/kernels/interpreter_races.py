"""Races within one launch: who wrote, and who read, every item of its tensors.

Programs of a launch run in any order and at once. What one of them writes no other may read or write; what a program
wrote it may read back only after a barrier, since another thread of it may have done the writing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from interpreter_floats import KernelFault


@dataclass
class _Shadow:
    """Who touched each item of a tensor: 0 nobody, p + 1 program p; in ``reader`` -1 stands for several."""

    writer: np.ndarray
    fence: np.ndarray
    reader: np.ndarray


class Races:
    """Told of every access of one launch to the item numbers ``places`` of a tensor; raises at the first conflict."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        self._fences = 0
        self._shadows: dict[int, _Shadow] = {}

    def barrier(self) -> None:
        self._fences += 1

    def load(self, program: int, *, name: str, start: int, items: int, places: np.ndarray) -> None:
        shadow, mine = self._shadow(start, items), program + 1
        writer = shadow.writer[places]
        if ((writer != 0) & (writer != mine)).any():
            raise KernelFault(f"{self._kernel}: a program reads of {name} what another one writes")
        if ((writer == mine) & (shadow.fence[places] == self._fences)).any():
            raise KernelFault(f"{self._kernel}: a program reads back what it wrote to {name}, without a barrier")
        reader = shadow.reader[places]
        shadow.reader[places] = np.where((reader == 0) | (reader == mine), mine, -1)

    def store(self, program: int, *, name: str, start: int, items: int, places: np.ndarray, values: np.ndarray) -> None:
        shadow, mine = self._shadow(start, items), program + 1
        for kind, others in (("writes", shadow.writer[places]), ("reads", shadow.reader[places])):
            if ((others != 0) & (others != mine)).any():
                raise KernelFault(f"{self._kernel}: a program writes of {name} what another one {kind}")
        order = places.argsort(kind="stable")
        same = np.diff(places[order]) == 0
        if (same & (values[order][1:] != values[order][:-1])).any():
            raise KernelFault(f"{self._kernel}: lanes of one store to {name} disagree about an item")
        shadow.writer[places] = mine
        shadow.fence[places] = self._fences

    def _shadow(self, start: int, items: int) -> _Shadow:
        if start not in self._shadows:
            self._shadows[start] = _Shadow(*(np.zeros(items, np.int32) for _ in range(3)))
        return self._shadows[start]
