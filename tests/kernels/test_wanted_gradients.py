"""The experts' backward computes what is wanted of it, the same bits as with all the rest, and reads no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_expert_mlp_kernels import CASES, FIELDS, Problem, problem
from torch import Tensor

from xmoe.kernels import reference, triton_kernels
from xmoe.kernels.launch import counting
from xmoe.kernels.reference import ExpertWeights, WantedGradients

WANTED: list[tuple[bool, set[str]]] = [
    (True, set()),
    (False, set(FIELDS)),
    (True, {"down"}),
    (False, {"up", "gate_bias"}),
    (True, {"up_bias", "down_bias", "gate_bias"}),
    (False, {"gate"}),
]


def backward(side: Any, p: Problem, wanted: WantedGradients | None) -> tuple[Tensor | None, Tensor, ExpertWeights]:
    """Of ``wanted``, given no more than it says it reads."""
    given: dict[str, Any] = {"experts": p.experts, "activation": p.activation}
    _, up, gate = side.expert_mlp_forward(p.x, *p.plan, **given)
    x = p.x if wanted is None or wanted.reads_rows else None
    if wanted is not None and not wanted.rows:
        given["experts"] = ExpertWeights(up=[], down=p.experts.down, down_bias=p.experts.down_bias)
    return side.expert_mlp_backward(p.upstream, x, *p.plan, **given, up_MF=up, gate_MF=gate, wanted=wanted)


def check(found: Any, every: Any, *, rows: bool, chosen: set[str]) -> None:
    assert torch.equal(found[1], every[1])
    assert (found[0] is not None) == rows
    if rows:
        assert torch.equal(found[0], every[0])
    for field in FIELDS:
        got, expected = getattr(found[2], field), getattr(every[2], field)
        assert len(got) == (len(expected) if field in chosen else 0), field
        for one, other in zip(got, expected, strict=False):
            assert torch.equal(one, other), field


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_twin_computes_what_is_wanted(activation: str):
    p = problem(*CASES["k=2, drops, an expert without rows"](), activation=activation, biased=True)
    every = backward(reference, p, None)
    for rows, kinds in WANTED:
        chosen = {field for field in kinds if getattr(p.experts, field)}
        found = backward(reference, p, WantedGradients(rows=rows, kinds=frozenset(chosen)))
        check(found, every, rows=rows, chosen=chosen)


def test_the_kernels_compute_what_is_wanted():
    p = problem(*CASES["k=E"](), biased=True, sizes=(5, 6))
    every = backward(triton_kernels, p, None)
    for rows, chosen in [(True, set()), (False, {"up", "down", "gate_bias"}), (True, {"gate", "down_bias"})]:
        with counting() as launches:
            found = backward(triton_kernels, p, WantedGradients(rows=rows, kinds=frozenset(chosen)))
        check(found, every, rows=rows, chosen=chosen)
        assert launches["grouped_wgrad"] == len(chosen & {"up", "gate", "down"})
        assert launches["grouped_dgrad"] == rows
        assert launches["segment_sums"] == len(chosen & {"up_bias", "gate_bias", "down_bias"})
