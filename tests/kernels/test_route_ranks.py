"""Four ranks on two nodes plan their dispatch by the kernels, in Triton's interpreter, as they do by the twins."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from xmoe.dispatch.make import make_dispatcher
from xmoe.kernels import reference
from xmoe.kernels.launch import counting
from xmoe.ops._backend import use_kernels
from xmoe.ops.collectives import Exchange
from xmoe.testing import run_ranks
from xmoe.types import TokenBuffer

NUM_EXPERTS, TOP_K = 8, 3


def _buffer(tokens: int, seed: int) -> TokenBuffer:
    scores = torch.rand(tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
    ids_TK = scores.argsort(dim=1)[:, :TOP_K].int()
    slot_ids_S, places_S, counts_E = reference.sort_and_count(ids_TK, NUM_EXPERTS)
    return TokenBuffer(
        slot_ids_S=slot_ids_S,
        places_S=places_S,
        combine_weights_S=torch.rand(tokens * TOP_K),
        tokens_per_expert_E=counts_E.long(),
        num_tokens=tokens,
        top_k=TOP_K,
    )


def _assert_same(found: Any, expected: Any) -> None:
    for field in fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, Tensor):
            assert torch.equal(one, other), field.name
        elif is_dataclass(other):
            _assert_same(one, other)
        else:
            assert one == other, field.name


def _plans(num_chunks: int) -> int:
    rank = dist.get_rank()
    exchange = Exchange(group=dist.group.WORLD, label="test", timeout_s=100.0)
    dispatcher = make_dispatcher(
        "node+gpu", exchange, ranks_per_node=2, device=torch.device("cpu"), num_chunks=num_chunks
    )
    buffers = [_buffer(0 if rank == chunk else 4 + 3 * rank, 10 * rank + chunk) for chunk in range(num_chunks)]
    with use_kernels("torch"):
        expected = dispatcher.plan(buffers)
    with use_kernels("triton"), harness.checked_interpreter(), counting() as launches:
        found = dispatcher.plan(buffers)
    for plan, wanted in zip(found, expected, strict=True):
        _assert_same(plan, wanted)
    return launches.total()


@pytest.mark.dist
def test_four_ranks_plan_by_the_kernels_as_by_the_twins():
    assert run_ranks(4, _plans, 2, timeout_s=100.0) == [2 * 26] * 4
