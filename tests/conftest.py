"""Fixtures of every test: one seed, and uninitialised memory that shows when it is read."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from typing import Any

# Before anything imports Triton: kernels are defined for its interpreter, or for a device, once in a process.
os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch

SEED = 1234


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA or ROCm device; torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def poisoned(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """``allocate`` with NaN in floating results: a row that nobody writes cannot pass for zeros."""

    @functools.wraps(allocate)
    def allocate_nan(*args: Any, **kwargs: Any) -> Any:
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point() and tensor.device.type != "meta":
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return allocate_nan


@pytest.fixture(autouse=True)
def _poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
