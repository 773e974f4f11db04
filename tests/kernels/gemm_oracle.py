"""Ragged problems of the grouped GEMMs, and their results in float64, one row after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from xmoe.kernels import reference
from xmoe.kernels.ragged import Stacked, TileSchedule, stack

# Rows of each expert, and widths (out, in): off every block, below and above one, on the edge, none, and only ones.
COUNTS = [(17, 0, 1, 40), (0, 63, 0), (16, 32), (7,), (1, 1), (0, 0)]
WIDTHS = [(33, 20), (16, 67), (63, 32), (7, 1), (1, 7), (20, 16)]
PROBLEMS = list(zip(COUNTS, WIDTHS, strict=True))


def schedule_of(counts: tuple[int, ...], *, block_m: int = 16) -> TileSchedule:
    return reference.tile_schedule(torch.tensor(counts), block_m=block_m, num_rows=sum(counts))


def owners(counts: tuple[int, ...]) -> list[int]:
    """The expert of each row."""
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


def matrices(num_experts: int, *sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of every expert, of entries that keep sums near one, in memory of their own: not next to each other."""
    return [(torch.randn(*sizes) * sizes[-1] ** -0.5).to(dtype) for _ in range(num_experts)]


def side_by_side(parts: list[Tensor]) -> Stacked:
    return stack(list(torch.stack(parts)))


def held(rows: Tensor, *, spare: int = 5) -> tuple[Tensor, Tensor]:
    """``rows`` scattered among ``spare`` more that are NaN, and the int32 ids at which they lie."""
    ids = torch.randperm(len(rows) + spare)[: len(rows)]
    scattered = torch.full((len(rows) + spare, rows.shape[1]), float("nan"), dtype=rows.dtype)
    scattered[ids] = rows
    return scattered, ids.int()


def linear(rows: Tensor, weights: list[Tensor], counts: tuple[int, ...], biases: list[Tensor] | None = None) -> Tensor:
    """``W_e @ row (+ bias_e)`` of each row, float64."""
    out = torch.zeros(len(rows), weights[0].shape[0], dtype=torch.float64)
    for m, expert in enumerate(owners(counts)):
        out[m] = weights[expert].double() @ rows[m].double()
        if biases is not None:
            out[m] += biases[expert].double()
    return out


def act(up: Tensor, gate: Tensor | None, activation: str) -> Tensor:
    """The activation from its definition, differentiable."""
    if gate is not None:
        return gate / (1 + torch.exp(-gate)) * up
    if activation == "relu":
        return up * (up > 0)
    if activation == "gelu":
        return 0.5 * up * (1 + torch.erf(up / 2**0.5))
    return 0.5 * up * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (up + 0.044715 * up**3)))
