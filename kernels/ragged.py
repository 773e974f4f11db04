"""Ragged data of grouped GEMMs: where each expert's rows lie, how they are cut into tiles, where weights lie.

Rows of all experts follow each other without padding. Padding exists in the schedule only: a tile of ``block_m`` rows
may reach past its expert's last row, and nothing there is read as data or written.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_NOT_32_BITS = 2**31


@dataclass(frozen=True, kw_only=True)
class TileSchedule:
    """Tiles of ``block_m`` rows, in the order of their experts; everything on the device.

    ``offsets_e1``   int32 ``[e + 1]``: ``offsets[0] = 0``, ``offsets[x + 1] = offsets[x] + counts[x]``; the last is M
    ``tile_expert``  int32 ``[max_tiles]``; expert of each tile, valid below ``num_tiles``
    ``tile_row``     int32 ``[max_tiles]``; first row of each tile, valid below ``num_tiles``. Its rows end at
                     ``min(tile_row + block_m, offsets[tile_expert + 1])``
    ``num_tiles``    int32 ``[1]``: ``sum over x of ceil(counts[x] / block_m)``
    ``max_tiles``    host bound on ``num_tiles``: ``M // block_m + e``
    ``num_rows``     host, M

    Example: counts [3, 0, 2], block_m=2 gives offsets [0, 3, 3, 5], experts [0, 0, 2], rows [0, 2, 3], 3 tiles.
    """

    offsets_e1: Tensor
    tile_expert: Tensor
    tile_row: Tensor
    num_tiles: Tensor
    max_tiles: int
    num_rows: int
    block_m: int

    @property
    def num_experts(self) -> int:
        return self.offsets_e1.numel() - 1


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """One matrix of every expert, at equal distances: expert x's starts ``x * stride`` elements after ``first``.

    ``first``  ``[out, in]`` (or a bias, ``[out]``), contiguous: the first expert's own tensor, or an alias of it
    """

    first: Tensor
    stride: int
    num_experts: int

    def __post_init__(self) -> None:
        # On AMD, Triton takes offsets for 32 bits wide where a tensor's storage is below 2 GB, and computes them so.
        # Storage ends with the first matrix; this attribute is how Triton is told what a pointer really reaches.
        reach = ((self.num_experts - 1) * self.stride + self.first.numel()) * self.first.element_size()
        if self.stride < 0:
            reach = _NOT_32_BITS
        alias = self.first.detach()
        alias.ptr_range = lambda: reach
        object.__setattr__(self, "first", alias)


def kernel_arguments(**matrices: Stacked | None) -> dict[str, Tensor | int | None]:
    """``name`` and ``name_stride`` of every one, as a kernel takes them: None and 0 of what there is not.

    Example: ``up=...`` of stride 6 and ``gate=None`` give up, its first matrix, up_stride 6, gate None, gate_stride 0.
    """
    arguments: dict[str, Tensor | int | None] = {}
    for name, found in matrices.items():
        arguments[name] = found.first if found is not None else None
        arguments[f"{name}_stride"] = found.stride if found is not None else 0
    return arguments


def stack(weights: Sequence[Tensor]) -> Stacked:
    """The experts' matrices as one :class:`Stacked`: by their addresses where these are equally spaced, else a copy.

    Parameters allocated one after the other, or flattened by ZeRO, are equally spaced. Others are copied at each
    call, which costs the memory of one more set of weights while the layer runs.
    """
    first = weights[0]
    if all(weight.is_contiguous() for weight in weights) and not first.is_meta:
        size = first.element_size()
        distances = [weight.data_ptr() - first.data_ptr() for weight in weights]
        stride = distances[1] // size if len(weights) > 1 else first.numel()
        if all(distance == index * stride * size for index, distance in enumerate(distances)):
            return Stacked(first=first, stride=stride, num_experts=len(weights))
        logger.debug("%d expert matrices of shape %s are not equally spaced: copied", len(weights), tuple(first.shape))
    return Stacked(first=torch.stack(list(weights))[0], stride=first.numel(), num_experts=len(weights))
