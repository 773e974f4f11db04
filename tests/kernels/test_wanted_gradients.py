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

SIDES = {"twin": reference, "kernels": triton_kernels}
KINDS: dict[str, tuple[bool, set[str]]] = {
    "rows only": (True, set()),
    "experts only": (False, set(FIELDS)),
    "rows, down": (True, {"down"}),
    "up, gate's bias": (False, {"up", "gate_bias"}),
    "biases": (True, {"up_bias", "down_bias", "gate_bias"}),
    "gate": (False, {"gate"}),
}


def backward(side: Any, p: Problem, wanted: WantedGradients | None) -> tuple[Tensor | None, Tensor, ExpertWeights]:
    """Of ``wanted``, given no more than it says it reads."""
    given: dict[str, Any] = {"experts": p.experts, "activation": p.activation}
    _, up, gate = side.expert_mlp_forward(p.x, *p.plan, **given)
    x = p.x if wanted is None or wanted.reads_rows else None
    if wanted is not None and not wanted.rows:
        given["experts"] = ExpertWeights(up=[], down=p.experts.down, down_bias=p.experts.down_bias)
    return side.expert_mlp_backward(p.upstream, x, *p.plan, **given, up_MF=up, gate_MF=gate, wanted=wanted)


SOME = [("kernels", kinds, "swiglu") for kinds in ("rows only", "up, gate's bias", "biases")]


@pytest.mark.parametrize(
    ("side", "kinds", "activation"), [*(("twin", kinds, a) for kinds in KINDS for a in ("swiglu", "gelu")), *SOME]
)
def test_what_is_wanted_is_the_same_and_the_rest_is_missing(side: str, kinds: str, activation: str):
    p = problem(*CASES["k=2, drops, an expert without rows"](), activation=activation, biased=True)
    rows, chosen = KINDS[kinds]
    chosen = {field for field in chosen if getattr(p.experts, field)}
    every = backward(SIDES[side], p, None)
    with counting() as launches:
        found = backward(SIDES[side], p, WantedGradients(rows=rows, kinds=frozenset(chosen)))
    assert torch.equal(found[1], every[1])
    assert (found[0] is not None) == rows
    if rows:
        assert torch.equal(found[0], every[0])
    for field in FIELDS:
        got, expected = getattr(found[2], field), getattr(every[2], field)
        assert len(got) == (len(expected) if field in chosen else 0), field
        for one, other in zip(got, expected, strict=False):
            assert torch.equal(one, other), field
    if side == "kernels":
        assert launches["grouped_wgrad"] == len(chosen & {"up", "gate", "down"})
        assert launches["grouped_dgrad"] == rows
