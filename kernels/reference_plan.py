"""PyTorch twins of the plan kernels: assignments counted and sorted by expert, rows of experts cut into tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from .ragged import TileSchedule


def count_ids(ids: Tensor, num_bins: int) -> Tensor:
    """int64 ``[num_bins]``: how often each id occurs; negative ids are not counted.

    Example: ids [[2, 0], [2, -1]], 3 bins gives [1, 0, 2].
    """
    flat = ids.reshape(-1).long()
    counts = flat.new_zeros(num_bins + 1)
    counts.scatter_add_(0, torch.where(flat < 0, num_bins, flat), torch.ones_like(flat))
    return counts[:num_bins]


def sort_slots(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Slots in the order of their experts, and where each went: two int32 ``[T*K]``.

    ``slot_ids_S``  slots sorted by expert, ties by slot, dropped slots (-1) last
    ``places_S``    the inverse: ``slot_ids[places[s]] == s``

    Example: ids [[1, 0], [-1, 1]] gives [1, 0, 3, 2] and [1, 0, 3, 2]; ids [[2], [0], [1]] gives [1, 2, 0] and
    [2, 0, 1].
    """
    flat = ids_TK.reshape(-1)
    key = torch.where(flat < 0, num_experts, flat).to(torch.int32)
    slot_ids_S = key.argsort(stable=True)
    return slot_ids_S.to(torch.int32), inverse_permutation(slot_ids_S)


def sort_and_count(ids_TK: Tensor, num_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`sort_slots`, and how many slots each bin has: int32 ``[num_bins]``."""
    return *sort_slots(ids_TK, num_bins), count_ids(ids_TK, num_bins).to(torch.int32)


def inverse_permutation(order: Tensor) -> Tensor:
    """int32: ``inverse[order[i]] == i``.

    Example: [1, 2, 0] gives [2, 0, 1].
    """
    places = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    return torch.empty_like(places).scatter_(0, order.long(), places)


def ranks_within_expert(ids: Tensor, priorities: Tensor, num_experts: int) -> Tensor:
    """int64, shaped like ``ids``: the place of each assignment among those of its expert, highest priority first.

    Equal priorities keep their order. Assignments of id -1 get places of their own that mean nothing.

    Example: ids [0, 1, 0, 0], priorities [.1, .5, .9, .1] gives [1, 0, 0, 2].
    """
    flat = ids.reshape(-1).long()
    key = torch.where(flat < 0, num_experts, flat)
    by_priority = priorities.reshape(-1).argsort(descending=True, stable=True)
    order = by_priority[key[by_priority].argsort(stable=True)]
    counts = count_ids(key, num_experts + 1)
    starts = counts.cumsum(0) - counts
    places = torch.empty_like(flat)
    places[order] = torch.arange(flat.numel(), device=flat.device) - starts[key[order]]
    return places.view(ids.shape)


def tile_schedule(counts_e: Tensor, *, block_m: int, num_rows: int) -> TileSchedule:
    """The tiles of ``num_rows == counts.sum()`` rows; nothing is read back to the host. See :class:`TileSchedule`.

    Example: counts [3, 0, 2], block_m=2 gives tiles of experts 0, 0, 2 at rows 0, 2, 3.
    """
    ends_e = counts_e.cumsum(0)
    tiles_e = (counts_e + (block_m - 1)) // block_m
    tile_ends_e = tiles_e.cumsum(0)
    max_tiles = num_rows // block_m + counts_e.numel()
    tiles = torch.arange(max_tiles, device=counts_e.device)
    # Past the last tile the last expert's go on: nobody reads there.
    expert = torch.searchsorted(tile_ends_e, tiles, right=True).clamp_(max=counts_e.numel() - 1)
    row = (ends_e - counts_e)[expert] + (tiles - (tile_ends_e - tiles_e)[expert]) * block_m
    return TileSchedule(
        offsets_e1=torch.nn.functional.pad(ends_e, (1, 0)).to(torch.int32),
        tile_expert=expert.to(torch.int32),
        tile_row=row.to(torch.int32),
        num_tiles=tile_ends_e[-1:].to(torch.int32),
        max_tiles=max_tiles,
        num_rows=num_rows,
        block_m=block_m,
    )
