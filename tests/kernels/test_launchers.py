"""What holds for every launcher: how tensors lie in memory and in which order programs run changes no bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from harness import program_order
from launcher_cases import CASES, Case, Problem
from torch import Tensor

from xmoe.kernels import launch
from xmoe.kernels.triton_kernels import gather_rows

PROBLEM = Problem(tokens=19, width=40, expert_width=24, top_k=2, counts=(17, 0, 1, 18))


def tensors_of(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif is_dataclass(result):
        yield from tensors_of([getattr(result, field.name) for field in fields(result)])
    elif isinstance(result, tuple | list):
        for part in result:
            yield from tensors_of(part)


def run(case: Case, problem: Problem) -> list[Tensor]:
    torch.manual_seed(0)
    return list(tensors_of(case.run(problem)))


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert expected
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_the_same_for_strided_tensors_and_programs_in_reverse(case: Case):
    """Reversed, every two programs change places; that none touches what another writes is ``test_traffic.py``'s."""
    expected = run(case, PROBLEM)
    with program_order("reversed"):
        assert_equal(run(case, replace(PROBLEM, strided=True)), expected)


def test_a_kernel_runs_on_its_tensors_device(monkeypatch: pytest.MonkeyPatch):
    events: list[Any] = []

    @contextlib.contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        events.append(x)
        yield
        events.append("left")

    def run(call: launch.Launch) -> None:
        events.append(call.name)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(launch, "_run", run)
    x = torch.randn(3, 7)
    gather_rows(x, torch.tensor([0, 2], dtype=torch.int32), 1)
    assert events[0] is x
    assert events[1:] == ["gather_rows", "left"]
