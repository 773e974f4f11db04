"""Weight gradients of grouped GEMMs: one matrix of every expert, summed over the expert's own rows (ragged K)."""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from .launch import Cost, Launch, arch_of, launch
from .ragged import TileSchedule
from .reference_wgrad import check_wgrad
from .tiles import tile_at, units_of
from .tuning import config_for

# More than a compute unit holds at once: experts' loads differ, and a unit that is done early takes the next program.
_PROGRAMS_PER_UNIT = 4


@triton.jit
def _first_tile(NUM_XCD: tl.constexpr):
    """Where this program begins; from there it takes every ``num_programs``-th tile.

    Programs are dealt to the dies in turn. In each round a die takes one run of tiles, which share rows; runs of all
    rounds would leave the dies as unequal as the experts' loads.

    Example: 5 programs on 2 dies begin at tiles 0, 3, 1, 4, 2: the first die takes 0 to 2, the second 3 and 4.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    die = program % NUM_XCD
    return die * (programs // NUM_XCD) + tl.minimum(die, programs % NUM_XCD) + program // NUM_XCD


@triton.jit
def _load_rows(rows, row_ids, row, columns, width, left, ROW_AXIS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """``columns`` of ``BLOCK_ROWS`` rows, which lie along ``ROW_AXIS`` of the result.

    Without ``row_ids`` they follow each other from the address ``rows`` on; with ids that is where row 0 lies, and
    ``row_ids[row]`` is the first of them. ``left`` is None, or how many to load: the others are zeros.

    Example: rows at [[1, 2], [3, 4]], no ids, columns (0, 1), left 1, blocks of 2 give [[1, 2], [0, 0]] along axis 0,
    and [[1, 0], [2, 0]] along axis 1.
    """
    k = tl.arange(0, BLOCK_ROWS)
    columns = tl.expand_dims(columns, ROW_AXIS)
    if row_ids is None:
        places = rows + (columns + tl.expand_dims(k, 1 - ROW_AXIS) * width)
    elif left is None:
        ids = tl.cast(tl.load(row_ids + row + k), tl.int64)
        places = rows + tl.expand_dims(ids * width, 1 - ROW_AXIS) + columns
    else:
        ids = tl.cast(tl.load(row_ids + row + k, mask=k < left, other=0), tl.int64)
        places = rows + tl.expand_dims(ids * width, 1 - ROW_AXIS) + columns
    if left is None:
        values = tl.load(places)
    else:
        values = tl.load(places, mask=tl.expand_dims(k < left, 1 - ROW_AXIS), other=0.0)
    return values


@triton.jit
def _store_tile(acc, out, expert, first_out, first_in, out_width, in_width, ACCUMULATE: tl.constexpr):
    """Writes the part of ``acc`` that lies in the expert's matrix, added to what is there if ``ACCUMULATE``.

    Example: one expert of [[5]], acc [[1, 2], [3, 4]], first 0 and 0: [[1]], accumulated [[6]].
    """
    rows = tl.arange(0, acc.shape[0])[:, None]
    columns = tl.arange(0, acc.shape[1])[None, :]
    tile = out + (tl.cast(expert, tl.int64) * out_width + first_out) * in_width + first_in
    places = tile + rows * in_width + columns
    edge = (rows < out_width - first_out) & (columns < in_width - first_in)
    if ACCUMULATE:
        acc += tl.load(places, mask=edge, other=0.0)
    tl.store(places, acc.to(out.dtype.element_ty), mask=edge)


@triton.jit
def _grouped_wgrad_kernel(
    d_out,
    x,
    row_ids,
    offsets,
    out,
    num_experts,
    out_width,
    in_width,
    GATHER_D_OUT: tl.constexpr,
    GATHER_X: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUP_OUT: tl.constexpr,
    NUM_XCD: tl.constexpr,
):
    """Programs take tiles ``out[expert, BLOCK_OUT, BLOCK_IN]`` in turn; a tile sums d_out[m, o] * x[m, i] over m.

    m are the expert's rows ``offsets[expert]`` to ``offsets[expert + 1]``. Whole blocks of them are loaded without a
    mask, columns past a matrix's edge as copies of its first ones, which are not stored.

    Example: offsets [0, 2, 2], d_out [[1], [2]], x [[3], [4]] gives out [[[11]], [[0]]].
    """
    d_out_ids = row_ids if GATHER_D_OUT else None
    x_ids = row_ids if GATHER_X else None
    out_tiles, in_tiles = tl.cdiv(out_width, BLOCK_OUT), tl.cdiv(in_width, BLOCK_IN)
    for index in range(_first_tile(NUM_XCD), num_experts * out_tiles * in_tiles, tl.num_programs(0)):
        row_tile, in_tile = tile_at(index, num_experts * out_tiles, in_tiles, GROUP_OUT, 1)
        expert = row_tile // out_tiles
        first_out, first_in = row_tile % out_tiles * BLOCK_OUT, in_tile * BLOCK_IN
        # Of a width divisible by 16 the remainder keeps runs of 16 columns: loads stay 16 bytes wide.
        o = (first_out + tl.arange(0, BLOCK_OUT)) % out_width
        i = (first_in + tl.arange(0, BLOCK_IN)) % in_width
        start = tl.load(offsets + expert)
        count = tl.load(offsets + expert + 1) - start
        row = tl.cast(start, tl.int64)
        d_out_rows = d_out if GATHER_D_OUT else d_out + row * out_width
        x_rows = x if GATHER_X else x + row * in_width
        acc = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
        # Both sides as the dot takes them, d_out transposed by its pointers.
        for _ in range(0, count // BLOCK_ROWS):
            a = _load_rows(d_out_rows, d_out_ids, row, o, out_width, None, 1, BLOCK_ROWS)
            b = _load_rows(x_rows, x_ids, row, i, in_width, None, 0, BLOCK_ROWS)
            acc = tl.dot(a, b, acc, input_precision="ieee")
            if not GATHER_D_OUT:
                d_out_rows += BLOCK_ROWS * out_width
            if not GATHER_X:
                x_rows += BLOCK_ROWS * in_width
            row += BLOCK_ROWS
        left = count % BLOCK_ROWS
        if left > 0:
            a = _load_rows(d_out_rows, d_out_ids, row, o, out_width, left, 1, BLOCK_ROWS)
            b = _load_rows(x_rows, x_ids, row, i, in_width, left, 0, BLOCK_ROWS)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        _store_tile(acc, out, expert, first_out, first_in, out_width, in_width, ACCUMULATE)


def grouped_wgrad(
    d_out: Tensor,
    x: Tensor,
    schedule: TileSchedule,
    *,
    row_ids_M: Tensor | None = None,
    gathered: Literal["x", "d_out"] = "x",
    out: Tensor | None = None,
) -> Tensor:
    """``dW[e, o, i] = sum of d_out[m, o] * x[m, i] over the rows m of expert e``; see the twin."""
    check_wgrad(d_out, x, schedule, row_ids_M=row_ids_M, gathered=gathered, out=out)
    d_out, x = d_out.contiguous(), x.contiguous()
    num_rows, num_experts = schedule.num_rows, schedule.num_experts
    out_width, in_width = d_out.shape[1], x.shape[1]
    accumulate = out is not None
    if out is None:
        out = d_out.new_empty((num_experts, out_width, in_width))
    op = "grouped_wgrad" if row_ids_M is None else "gathered_wgrad"
    config = config_for(op, arch=arch_of(x), dtype=x.dtype, rows=num_rows, sizes=(num_experts, out_width, in_width))
    block_out, block_in = config.blocks["BLOCK_OUT"], config.blocks["BLOCK_IN"]
    tiles = triton.cdiv(out_width, block_out) * triton.cdiv(in_width, block_in)
    row_bytes = (block_out + block_in) * x.element_size() + 4 * (row_ids_M is not None)
    launch(
        Launch(
            op=op,
            kernel=_grouped_wgrad_kernel,
            grid=(min(num_experts * tiles, units_of(x) * _PROGRAMS_PER_UNIT),),
            arguments=dict(
                d_out=d_out,
                x=x,
                row_ids=row_ids_M.contiguous() if row_ids_M is not None else None,
                offsets=schedule.offsets_e1,
                out=out,
                num_experts=num_experts,
                out_width=out_width,
                in_width=in_width,
                GATHER_D_OUT=row_ids_M is not None and gathered == "d_out",
                GATHER_X=row_ids_M is not None and gathered == "x",
                ACCUMULATE=accumulate,
            ),
            config=config,
            cost=Cost(
                bytes_read=tiles * (num_rows * row_bytes + num_experts * 8) + accumulate * out.nbytes,
                bytes_written=out.nbytes,
                flops=2 * num_rows * out_width * in_width,
            ),
        )
    )
    return out
