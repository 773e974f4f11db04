"""Shared parts of grouped GEMMs: the order in which persistent programs take tiles, a tile's rows, its product,
and how many programs there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import arch_of
from .ragged import TileSchedule
from .tuning import Config, compute_units, config_for

_WARPS_PER_UNIT = 16


@triton.jit
def tile_at(index, num_row_tiles, num_column_tiles, GROUP_M: tl.constexpr, NUM_XCD: tl.constexpr):
    """Row tile and column tile of the ``index``-th of all tiles.

    Up to ``GROUP_M`` consecutive row tiles share a column before the next column follows: neighbours in this order
    read the same weights (row tiles of one expert are consecutive), and the next column reads the same rows.

    Where a chip has ``NUM_XCD`` dies with a cache each, programs are dealt to the dies in turn; a die then takes one
    run of consecutive tiles. Every tile is taken once, whatever the numbers.

    Example: 3 row tiles, 2 columns, GROUP_M=2, one die gives (0,0) (1,0) (0,1) (1,1) (2,0) (2,1). With two dies the
    indices 0, 2, 4 take the first three of these, and 1, 3, 5 the others.
    """
    total = num_row_tiles * num_column_tiles
    die = index % NUM_XCD
    position = die * (total // NUM_XCD) + tl.minimum(die, total % NUM_XCD) + index // NUM_XCD
    first = position // (GROUP_M * num_column_tiles) * GROUP_M
    within = position % (GROUP_M * num_column_tiles)
    height = tl.minimum(num_row_tiles - first, GROUP_M)
    return first + within % height, within // height


@triton.jit
def rows_of_tile(tile_expert, tile_row, offsets, row_tile, BLOCK_M: tl.constexpr):
    """Expert (int64), first row (int64) and number of rows (1 to ``BLOCK_M``) of a row tile.

    Example: counts [3, 0, 2], BLOCK_M=2, row tile 1 gives expert 0, first row 2, 1 row.
    """
    expert = tl.cast(tl.load(tile_expert + row_tile), tl.int64)
    first = tl.load(tile_row + row_tile)
    height = tl.minimum(tl.load(offsets + expert + 1) - first, BLOCK_M)
    return expert, tl.cast(first, tl.int64), height


@triton.jit
def row_pointers(a, row_ids, first, height, inner, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Pointers ``[BLOCK_M, BLOCK_K]`` to the tile's rows of ``a``, by ``row_ids`` where these are given.

    Rows past the tile's end are copies of its last: nothing is masked in the inner loop, and they are not stored.

    Example: first 4, height 1, BLOCK_M=2 points at row 4 twice, at row ``row_ids[4]`` twice with row ids.
    """
    k = tl.arange(0, BLOCK_K)
    local = tl.minimum(tl.arange(0, BLOCK_M), height - 1)
    if row_ids is None:
        pointers = a + first * inner + (local[:, None] * inner + k[None, :])
    else:
        rows = tl.cast(tl.load(row_ids + first + local), tl.int64)
        pointers = a + (rows[:, None] * inner + k[None, :])
    return pointers


@triton.jit
def _multiply_block(a, w, g, k_left, acc, acc_g, MASKED: tl.constexpr, BLOCK_K: tl.constexpr):
    """One step of :func:`multiply`; ``MASKED`` reads ``k_left`` columns of a and rows of w and g.

    Example: a = [[1, 9]], w = [[2], [9]], k_left=1, masked, acc 1 gives 3.
    """
    k = tl.arange(0, BLOCK_K)
    if MASKED:
        rows = tl.load(a, mask=k[None, :] < k_left, other=0.0)
        acc = tl.dot(rows, tl.load(w, mask=k[:, None] < k_left, other=0.0), acc, input_precision="ieee")
        if g is not None:
            acc_g = tl.dot(rows, tl.load(g, mask=k[:, None] < k_left, other=0.0), acc_g, input_precision="ieee")
    else:
        rows = tl.load(a)
        acc = tl.dot(rows, tl.load(w), acc, input_precision="ieee")
        if g is not None:
            acc_g = tl.dot(rows, tl.load(g), acc_g, input_precision="ieee")
    return acc, acc_g


@triton.jit
def multiply(a, w, g, inner, w_step, acc, acc_g, HAS_TAIL: tl.constexpr, ADVANCE: tl.constexpr, BLOCK_K: tl.constexpr):
    """``acc + a @ w`` and, where ``g`` is given, ``acc_g + a @ g``, with a read once.

    a, w and g point at the first block of ``inner`` columns and rows; the next row of w and g is ``w_step`` elements
    on. ``HAS_TAIL`` where ``inner`` is no multiple of ``BLOCK_K``: the last block alone is masked, on both sides.

    ``ADVANCE`` says how the next block is addressed, which is worth several instructions a load: pointers that move,
    or one scalar added to pointers that stay, which the loads of some chips take from a register of its own.

    Example: a = [[1, 2]], w = [[3], [4]], acc 1 gives 12.
    """
    whole = inner // BLOCK_K * BLOCK_K
    w_step = tl.cast(w_step, tl.int64)
    for done in range(0, whole, BLOCK_K):
        if ADVANCE:
            acc, acc_g = _multiply_block(a, w, g, 0, acc, acc_g, False, BLOCK_K)
            a += BLOCK_K
            w += BLOCK_K * w_step
            if g is not None:
                g += BLOCK_K * w_step
        else:
            g_done = g + done * w_step if g is not None else None
            acc, acc_g = _multiply_block(a + done, w + done * w_step, g_done, 0, acc, acc_g, False, BLOCK_K)
    if HAS_TAIL:
        if not ADVANCE:
            a += whole
            w += whole * w_step
            if g is not None:
                g += whole * w_step
        acc, acc_g = _multiply_block(a, w, g, inner - whole, acc, acc_g, True, BLOCK_K)
    return acc, acc_g


def units_of(rows: Tensor) -> int:
    """Compute units of the device that holds ``rows``, or, where none does, of the architecture in use."""
    if rows.device.type == "cuda":
        return int(torch.cuda.get_device_properties(rows.device).multi_processor_count)
    return compute_units(arch_of(rows))


def _config(op: str, rows: Tensor, *, num_experts: int, num_rows: int, width: int, inner: int, matrices: int) -> Config:
    sizes = (num_experts, width, inner)
    return config_for(op, arch=arch_of(rows), dtype=rows.dtype, width=matrices, rows=num_rows, sizes=sizes)


def tile_height(
    op: str, rows: Tensor, *, num_experts: int, num_rows: int, width: int, inner: int, matrices: int = 1
) -> int:
    """The ``block_m`` of the schedule that grouped GEMM ``op`` of these sizes is configured for.

    ``matrices``  those of each expert that a program multiplies by at once: 2 for swiglu's first GEMM
    """
    sizes = dict(num_experts=num_experts, num_rows=num_rows, width=width, inner=inner)
    return _config(op, rows, matrices=matrices, **sizes).blocks["BLOCK_M"]


@dataclass(frozen=True, kw_only=True)
class Persistent:
    """How a grouped GEMM of ``width`` columns, sums of ``inner`` products each, is launched and what it loads.

    Only the device knows how many tiles there are. The host's bound on their number sets the grid and the cost: a
    launch's cost is exact for a schedule whose ``max_tiles`` is.

    ``config``  with the schedule's tile height for BLOCK_M: rows are cut once for several launches
    ``units``   the device's compute units
    """

    config: Config
    schedule: TileSchedule
    width: int
    inner: int
    item_size: int
    units: int

    @classmethod
    def of(
        cls, op: str, rows: Tensor, schedule: TileSchedule, *, width: int, inner: int, matrices: int = 1
    ) -> Persistent:
        """The launch of kernel ``op`` on ``rows``; for ``matrices`` see :func:`tile_height`."""
        sizes = dict(num_experts=schedule.num_experts, num_rows=schedule.num_rows, width=width, inner=inner)
        found = _config(op, rows, matrices=matrices, **sizes)
        config = replace(found, blocks={**found.blocks, "BLOCK_M": schedule.block_m})
        size, units = rows.element_size(), units_of(rows)
        return cls(config=config, schedule=schedule, width=width, inner=inner, item_size=size, units=units)

    @property
    def row_tiles(self) -> int:
        return min(self.schedule.max_tiles, self.schedule.num_rows)

    @property
    def column_tiles(self) -> int:
        return triton.cdiv(self.width, self.config.blocks["BLOCK_N"])

    @property
    def programs(self) -> int:
        """Those that fill the device, or one a tile where tiles are fewer.

        Sixteen warps a compute unit, four on each of its SIMDs: what the leanest configurations reach. Programs of
        others wait for a place, which costs less than places left empty. A multiple of the dies on every chip that
        has several, so that a program's tiles stay on one.
        """
        return min(self.row_tiles * self.column_tiles, self.units * max(1, _WARPS_PER_UNIT // self.config.num_warps))

    def arguments(self) -> dict[str, Any]:
        """The kernel's arguments that say which rows are whose, and the sizes."""
        schedule = self.schedule
        return dict(
            tile_expert=schedule.tile_expert,
            tile_row=schedule.tile_row,
            offsets=schedule.offsets_e1,
            num_tiles=schedule.num_tiles,
            width=self.width,
            inner=self.inner,
            HAS_TAIL=self.inner % self.config.blocks["BLOCK_K"] != 0,
        )

    def product_bytes(self, *, rows: int, weights: int, gathered: bool) -> int:
        """Bytes read before the epilogue by tiles that take blocks of ``rows`` row and ``weights`` weight matrices.

        Copies of rows and columns past the ends are loaded and count. Each tile reads three numbers of the schedule
        and, to gather, its rows' ids; each program reads the number of tiles.
        """
        blocks = self.config.blocks
        operands = (rows * blocks["BLOCK_M"] + weights * blocks["BLOCK_N"]) * self.inner * self.item_size
        indices = 4 * (3 + gathered * blocks["BLOCK_M"])
        return self.row_tiles * self.column_tiles * (operands + indices) + 4 * self.programs

    def flops(self, weights: int) -> int:
        """Of ``weights`` products for each row."""
        return 2 * weights * self.schedule.num_rows * self.width * self.inner
