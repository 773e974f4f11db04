"""What the routing kernels share: tiles of ``[K, T]`` tensors, whose tokens come last, and how wide they are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import arch_of
from .reference_route import RankMap
from .tuning import Config, config_for


@triton.jit
def slot_tile(num_tokens, top_k, CHOICES: tl.constexpr, BLOCK_T: tl.constexpr):
    """``(choice, token, inside)`` of a program's tokens: ``[CHOICES, 1]``, ``[1, BLOCK_T]`` and ``[CHOICES, BLOCK_T]``.

    Example: 3 tokens, top_k 1, CHOICES=1, BLOCK_T=2: program 1 has tokens [[2, 3]] and inside [[1, 0]].
    """
    choice = tl.arange(0, CHOICES)[:, None]
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[None, :]
    return choice, token, (choice < top_k) & (token < num_tokens)


@triton.jit
def load_slots(x, choice, token, inside, num_tokens, other):
    """A tile of x ``[K, T]``.

    Example: x [[5, 6]], choice [[0]], token [[1, 2]] gives [[6, other]].
    """
    return tl.load(x + tl.cast(choice, tl.int64) * num_tokens + token, mask=inside, other=other)


@triton.jit
def load_choice(x, choice, token, num_tokens, other):
    """The tokens' row ``choice``, one number, of x ``[K, T]``: ``[1, BLOCK_T]``.

    Example: x [[5, 6], [7, 8]], choice 1, token [[1, 2]] gives [[8, other]].
    """
    return tl.load(x + tl.cast(choice, tl.int64) * num_tokens + token, mask=token < num_tokens, other=other)


@triton.jit
def slot_numbers(choice, token, top_k):
    """``token * top_k + choice``, int64: where a slot's entry lies in a ``[T, K]`` tensor.

    Example: choice [[0], [1]], token [[3]], top_k 2 gives [[6], [7]].
    """
    return tl.cast(token, tl.int64) * top_k + choice


def tile_config(op: str, x_KT: Tensor) -> Config:
    """The configuration of a kernel of such tiles, by the power of two that K is padded to."""
    top_k, num_tokens = x_KT.shape
    return config_for(
        op, arch=arch_of(x_KT), dtype=torch.int32, width=triton.next_power_of_2(top_k), rows=num_tokens * top_k
    )


def check_slots(ranks: RankMap, **tensors_KT: Tensor) -> tuple[Tensor, ...]:
    """The tensors, contiguous. Raises ValueError unless all are int32, of one shape ``[K, T]``, and have an entry for
    each of fewer than 2^31 slots."""
    (first, shape), *_ = ((name, tuple(x.shape)) for name, x in tensors_KT.items())
    for name, x in tensors_KT.items():
        if x.dtype != torch.int32 or x.dim() != 2 or tuple(x.shape) != shape or not x.shape[0]:
            raise ValueError(f"{name} ({x.dtype}, {tuple(x.shape)}) must be int32 [K, T] as {first} is: {shape}")
    slots = shape[0] * shape[1]
    if slots * max(ranks.num_places, shape[0]) >= 2**31:
        raise ValueError(f"{first} has {slots} slots: times {max(ranks.num_places, shape[0])} they must be below 2^31")
    return tuple(x.contiguous() for x in tensors_KT.values())
