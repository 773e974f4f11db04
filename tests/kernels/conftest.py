"""Kernels run here in an interpreter that computes and checks as tests/kernels/harness.py says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

import harness


@pytest.fixture(autouse=True)
def _checked_interpreter() -> Iterator[None]:
    with harness.checked_interpreter():
        yield


@pytest.fixture(autouse=True)
def _poison_integers(_poison_empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers that nobody wrote are no row of anything: an address made of one is out of bounds."""
    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, harness.poisoned_integers(getattr(owner, name)))
