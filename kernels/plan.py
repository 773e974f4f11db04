"""The plan of a forward, made on the device: assignments sorted by expert, and the tiles of the grouped GEMMs.

The sort is a counting sort in three launches: every block of slots counts its experts, a scan over the blocks turns
counts into places, and every block places its slots. Integers only, nothing atomic, nothing read back by the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Cost, Launch, arch_of, launch
from .ragged import TileSchedule
from .tuning import Config, config_for


@triton.jit
def _block_counts_kernel(
    ids, table, num_slots, num_bins, BINS: tl.constexpr, PARTS: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Program b counts the ids of block b into row b of the table, BINS bins at a time; negative ids are not counted.

    Example: ids [2, 0, 2, -1], blocks of 2, 3 bins gives rows [1, 0, 1], [0, 0, 1].
    """
    block = tl.cast(tl.program_id(0), tl.int64)
    first = block * BLOCK_S
    local = tl.arange(0, BLOCK_S)
    found = tl.cast(tl.load(ids + first + local, mask=local < num_slots - first, other=-1), tl.int32)
    for part in tl.static_range(PARTS):
        bins = part * BINS + tl.arange(0, BINS)
        local = found - part * BINS
        counts = tl.histogram(local, BINS, mask=(local >= 0) & (local < BINS))
        tl.store(table + block * num_bins + bins, counts, mask=bins < num_bins)


@triton.jit
def _block_offsets_kernel(table, num_blocks, num_bins, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr):
    """Program j replaces counts by the counts of all blocks before, for its bins; row ``num_blocks`` gets the totals.

    Example: rows [1, 0, 1], [0, 0, 1] become [0, 0, 0], [1, 0, 1], and [1, 0, 2] follows.
    """
    bins = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    local = tl.arange(0, BLOCK_B)
    before = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        blocks = tl.cast(first + local, tl.int64)
        mask = (blocks < num_blocks)[:, None] & (bins < num_bins)[None, :]
        places = table + blocks[:, None] * num_bins + bins[None, :]
        counts = tl.load(places, mask=mask, other=0)
        tl.store(places, before[None, :] + tl.cumsum(counts, axis=0) - counts, mask=mask)
        before += tl.sum(counts, axis=0)
    tl.store(table + tl.cast(num_blocks, tl.int64) * num_bins + bins, before, mask=bins < num_bins)


@triton.jit
def _place_slots_kernel(
    ids, table, slot_ids, places, num_slots, num_blocks, num_bins, BINS: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Program b sorts block b's slots by expert and writes each to its place: the places of one expert before.

    Example: one block of ids [1, 0, -1, 1] sorts to slots 1, 0, 3, 2; with totals [1, 2] these are their places.
    """
    block = tl.cast(tl.program_id(0), tl.int64)
    first = block * BLOCK_S
    local = tl.arange(0, BLOCK_S)
    inside = local < num_slots - first
    found = tl.cast(tl.load(ids + first + local, mask=inside, other=-1), tl.int32)
    # Dropped slots follow all experts, and what lies past the last slot follows them.
    expert = tl.where(inside, tl.where(found < 0, BINS, found), BINS + 1)
    key = tl.sort(expert * BLOCK_S + local)  # distinct, so the order of equal experts is the slots'
    expert, slot = key // BLOCK_S, key % BLOCK_S

    bins = tl.arange(0, BINS)
    is_bin = bins < num_bins
    row = table + block * num_bins
    before = tl.load(row + bins, mask=is_bin, other=0)
    here = tl.load(row + num_bins + bins, mask=is_bin, other=0) - before
    totals = tl.load(table + tl.cast(num_blocks, tl.int64) * num_bins + bins, mask=is_bin, other=0)
    # From a slot's rank in its sorted block to its place: where the expert begins, plus its slots of blocks before,
    # less where it begins in the block.
    shift = before + tl.cumsum(totals - here, axis=0) - (totals - here)
    shift_of_dropped = tl.sum(totals - before - here, axis=0) + tl.cast(first, tl.int32)
    shift = tl.gather(shift, tl.minimum(expert, BINS - 1), axis=0)
    place = local + tl.where(expert < BINS, shift, shift_of_dropped)
    inside = expert <= BINS
    tl.store(slot_ids + place, tl.cast(first, tl.int32) + slot, mask=inside)
    tl.store(places + first + slot, place, mask=inside)


# Counters that lie in registers at once, and bins whose starts do: with more of either, lanes have no room.
_MAX_COUNTERS, _MAX_BINS = 1024, 8192


def count_ids(ids: Tensor, num_bins: int) -> Tensor:
    """int64 ``[num_bins]``: how often each id occurs; negative ids are not counted."""
    ids = ids.contiguous()
    return _block_offsets(ids, num_bins, config=_config(ids, num_bins))[-1].to(torch.int64)


def sort_slots(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Slots in the order of their experts, and where each went: two int32 ``[T*K]``.

    ``slot_ids_S``  slots sorted by expert, ties by slot, dropped slots (-1) last
    ``places_S``    the inverse: ``slot_ids[places[s]] == s``
    """
    slot_ids_S, places_S, _ = sort_and_count(ids_TK, num_experts)
    return slot_ids_S, places_S


def sort_and_count(ids_TK: Tensor, num_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`sort_slots`, and how many slots each bin has: int32 ``[num_bins]``."""
    ids_TK = ids_TK.contiguous()
    config = _config(ids_TK, num_bins)
    table = _block_offsets(ids_TK, num_bins, config=config)
    num_slots, num_blocks = ids_TK.numel(), table.shape[0] - 1
    slot_ids_S = ids_TK.new_empty((num_slots,), dtype=torch.int32)
    places_S = torch.empty_like(slot_ids_S)
    launch(
        Launch(
            op="plan",
            kernel=_place_slots_kernel,
            grid=(num_blocks,),
            arguments=dict(
                ids=ids_TK,
                table=table,
                slot_ids=slot_ids_S,
                places=places_S,
                num_slots=num_slots,
                num_blocks=num_blocks,
                num_bins=num_bins,
                BINS=triton.next_power_of_2(num_bins),
            ),
            config=config,
            cost=Cost(
                bytes_read=num_slots * ids_TK.element_size() + 3 * num_blocks * num_bins * 4,
                bytes_written=2 * num_slots * 4,
            ),
        )
    )
    return slot_ids_S, places_S, table[-1]


def _config(ids: Tensor, num_bins: int) -> Config:
    if not 1 <= num_bins <= _MAX_BINS or ids.numel() >= 2**31:
        raise ValueError(
            f"num_bins ({num_bins}) must be in 1..{_MAX_BINS}, and the number of ids ({ids.numel()}) below 2^31"
        )
    return config_for("plan", arch=arch_of(ids), dtype=torch.int32, width=num_bins, rows=ids.numel())


def _block_offsets(ids: Tensor, num_bins: int, *, config: Config) -> Tensor:
    """int32 ``[blocks + 1, num_bins]``: ids of each bin in all blocks before; the last row has the totals."""
    num_slots = ids.numel()
    num_blocks = triton.cdiv(num_slots, config.blocks["BLOCK_S"])
    table = ids.new_empty((num_blocks + 1, num_bins), dtype=torch.int32)
    table_bytes = num_blocks * num_bins * 4
    launch(
        Launch(
            op="plan",
            kernel=_block_counts_kernel,
            grid=(num_blocks,),
            arguments=dict(
                ids=ids,
                table=table,
                num_slots=num_slots,
                num_bins=num_bins,
                BINS=min(triton.next_power_of_2(num_bins), _MAX_COUNTERS),
                PARTS=triton.cdiv(num_bins, _MAX_COUNTERS),
            ),
            config=config,
            cost=Cost(bytes_read=num_slots * ids.element_size(), bytes_written=table_bytes),
        )
    )
    scan = config_for("plan_offsets", arch=arch_of(ids), dtype=torch.int32, width=num_bins, rows=num_blocks)
    launch(
        Launch(
            op="plan_offsets",
            kernel=_block_offsets_kernel,
            grid=(triton.cdiv(num_bins, scan.blocks["BLOCK_E"]),),
            arguments=dict(table=table, num_blocks=num_blocks, num_bins=num_bins),
            config=scan,
            cost=Cost(bytes_read=table_bytes, bytes_written=table_bytes + num_bins * 4),
        )
    )
    return table


@triton.jit
def _tile_schedule_kernel(
    counts,
    offsets,
    tile_expert,
    tile_row,
    num_tiles,
    num_experts,
    max_tiles,
    block_m,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program x writes the tiles of expert x and where its rows end; the last one also what is left of the lists.

    Example: counts [3, 0, 2], block_m=2: program 2 finds 3 rows and 2 tiles before it, and writes tile 2 at row 3.
    """
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    count = tl.cast(tl.load(counts + experts, mask=experts < num_experts, other=0), tl.int32)
    tiles = (count + block_m - 1) // block_m
    first_row = tl.sum(tl.where(experts < expert, count, 0), axis=0)
    first_tile = tl.sum(tl.where(experts < expert, tiles, 0), axis=0)
    own_rows = tl.sum(tl.where(experts == expert, count, 0), axis=0)
    own_tiles = tl.sum(tl.where(experts == expert, tiles, 0), axis=0)
    if expert == 0:
        tl.store(offsets, 0)
    tl.store(offsets + expert + 1, first_row + own_rows)
    is_last = expert == num_experts - 1
    if is_last:
        tl.store(num_tiles, first_tile + own_tiles)
    end = tl.where(is_last, max_tiles - first_tile, own_tiles)
    for start in range(0, end, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)
        mask = tile < end
        tl.store(tile_expert + first_tile + tile, tl.broadcast_to(expert, (BLOCK_T,)), mask=mask)
        tl.store(tile_row + first_tile + tile, first_row + tile * block_m, mask=mask)


def tile_schedule(counts_e: Tensor, *, block_m: int, num_rows: int) -> TileSchedule:
    """The tiles of ``num_rows == counts.sum()`` rows; nothing is read back to the host. See :class:`TileSchedule`."""
    if counts_e.dim() != 1 or not counts_e.numel() or block_m < 1:
        raise ValueError(f"counts_e must be [e], found {tuple(counts_e.shape)}, and block_m ({block_m}) at least 1")
    counts_e = counts_e.contiguous()
    num_experts = counts_e.numel()
    max_tiles = num_rows // block_m + num_experts
    sizes = {"offsets_e1": num_experts + 1, "tile_expert": max_tiles, "tile_row": max_tiles, "num_tiles": 1}
    found = {name: counts_e.new_empty((size,), dtype=torch.int32) for name, size in sizes.items()}
    launch(
        Launch(
            op="tile_schedule",
            kernel=_tile_schedule_kernel,
            grid=(num_experts,),
            arguments=dict(
                counts=counts_e,
                offsets=found["offsets_e1"],
                tile_expert=found["tile_expert"],
                tile_row=found["tile_row"],
                num_tiles=found["num_tiles"],
                num_experts=num_experts,
                max_tiles=max_tiles,
                block_m=block_m,
                EXPERTS=triton.next_power_of_2(num_experts),
            ),
            config=config_for("tile_schedule", arch=arch_of(counts_e), dtype=torch.int32, width=num_experts),
            cost=Cost(
                bytes_read=num_experts**2 * counts_e.element_size(),
                bytes_written=(num_experts + 2 + 2 * max_tiles) * 4,
            ),
        )
    )
    return TileSchedule(**found, max_tiles=max_tiles, num_rows=num_rows, block_m=block_m)
