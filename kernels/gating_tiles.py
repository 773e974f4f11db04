"""What the gating kernels share: where a program's tokens lie, how a tile is loaded, how numbers are ranked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import arch_of
from .tuning import Config, config_for

EPS = tl.constexpr(2.0**-23)
LOG2_E = tl.constexpr(1.4426950408889634)
# Ranks below those of every number: of what is chosen already, and of what must not be.
TAKEN = tl.constexpr(-(2**31))
BARRED = tl.constexpr(-(2**31) + 1)


@triton.jit
def program_tokens(part_tokens, part_programs, BLOCK_T: tl.constexpr, TILES: tl.constexpr):
    """``(part, first, end)``: this program's tokens, first to end, lie in one part.

    Example: parts of 5 tokens, BLOCK_T * TILES = 4: programs 0 to 3 have tokens 0-3, 4, 5-8, 9.
    """
    program = tl.program_id(0)
    part = program // part_programs
    local = (program % part_programs) * (BLOCK_T * TILES)
    return part, part * part_tokens + local, part * part_tokens + tl.minimum(local + BLOCK_T * TILES, part_tokens)


@triton.jit
def load_logits(logits, token, inside, expert, valid, num_experts):
    """A ``[tokens, columns]`` tile of logits, minus infinity in columns of no expert, and 0 in rows of no token."""
    places = tl.cast(token, tl.int64)[:, None] * num_experts + expert[None, :]
    x = tl.load(logits + places, mask=inside[:, None] & valid[None, :], other=0.0)
    return tl.where(valid[None, :], x, float("-inf"))


@triton.jit
def load_used(used, token, inside):
    """Which of the tokens count: those of the mask, or all."""
    if used is not None:
        inside = inside & (tl.load(used + token, mask=inside, other=0) != 0)
    return inside


@triton.jit
def power_of(x, largest):
    """``exp(x - largest)`` for x at most largest, by the hardware's power of 2: at worst 7e-6 off where x - largest
    is -88 and the power 1e-38, and 1e-7 where it is -1. The library's exponential takes a dozen registers more."""
    return tl.exp2((x - largest[:, None]) * LOG2_E)


@triton.jit
def softmax_parts(x):
    """``(largest, exp(x - largest), its sum)`` of each row."""
    largest = tl.max(x, 1)
    powers = power_of(x, largest)
    return largest, powers, tl.sum(powers, 1)


@triton.jit
def rank_of(x):
    """int32 that orders as float32 x does: both zeros are equal, NaN is above all; never TAKEN or BARRED.

    Example: -1.0, 0.0, 1.0 give -1065353217, 0, 1065353216.
    """
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, bits)


@triton.jit
def number_of(rank):
    """The float32 of a rank."""
    return tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)


@triton.jit
def take_best(ranks, WIDTH: tl.constexpr):
    """``(column, the ranks with that one taken)`` of each row's best, the lowest column of equal ones.

    Example: ranks [5, 7, 7] give column 1 and [5, TAKEN, 7].
    """
    column = tl.arange(0, WIDTH)[None, :]
    best = tl.max(ranks, 1)
    found = tl.min(tl.where(ranks == best[:, None], column, WIDTH), 1)
    return found, tl.where(column == found[:, None], TAKEN, ranks)


@dataclass(frozen=True, kw_only=True)
class Programs:
    """How the tokens of B parts are spread over programs, as :func:`program_tokens` finds them.

    ``part_tokens``  tokens of a part
    ``each``         programs of a part; ``total`` of all parts
    ``tiles``        tiles of BLOCK_T tokens that all programs load
    """

    part_tokens: int
    each: int
    total: int
    tiles: int

    @classmethod
    def of(cls, num_tokens: int, num_parts: int, config: Config) -> Programs:
        part, block = num_tokens // max(num_parts, 1), config.blocks["BLOCK_T"]
        each = triton.cdiv(part, block * config.blocks["TILES"])
        return cls(part_tokens=part, each=each, total=num_parts * each, tiles=num_parts * triton.cdiv(part, block))


def gate_config(op: str, logits_TE: Tensor, *, columns: int, dear: bool = False) -> Config:
    """The configuration for tiles of ``columns``: half as many tokens where a number takes more registers.

    That is where the kernel says so, and where rows start off multiples of 16: each number then has an address.
    """
    dear = dear or logits_TE.shape[1] % 16 != 0
    return config_for(op, arch=arch_of(logits_TE), dtype=logits_TE.dtype, width=columns * (1 + dear))


def check_logits(logits_TE: Tensor) -> Tensor:
    """The logits, contiguous. Raises ValueError when they are not float32."""
    if logits_TE.dtype != torch.float32:
        raise ValueError(f"logits are {logits_TE.dtype}, but the gating kernels take torch.float32")
    return logits_TE.contiguous()


def mask_bytes(used_T: Tensor | None) -> Tensor | None:
    """A bool mask as bytes, without a copy."""
    return None if used_T is None else used_T.contiguous().view(torch.uint8)
