"""Weight gradients of grouped GEMMs: one matrix of every expert, summed over the expert's own rows (ragged K)."""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from .launch import Cost, Launch, arch_of, launch
from .ragged import TileSchedule
from .reference_wgrad import check_wgrad
from .tiles import tile_at
from .tuning import compute_units, config_for

# More than a compute unit holds at once: experts' loads differ, and a unit that is done early takes the next program.
_PROGRAMS_PER_UNIT = 4


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
    out_tiles = tl.cdiv(out_width, BLOCK_OUT)
    in_tiles = tl.cdiv(in_width, BLOCK_IN)
    k = tl.arange(0, BLOCK_ROWS)
    # Programs are dealt to the dies in turn. In each round a die takes one run of tiles, which share rows; runs of
    # all rounds would leave the dies as unequal as the experts' loads.
    program, programs = tl.program_id(0), tl.num_programs(0)
    die = program % NUM_XCD
    first = die * (programs // NUM_XCD) + tl.minimum(die, programs % NUM_XCD) + program // NUM_XCD
    for index in range(first, num_experts * out_tiles * in_tiles, programs):
        row_tile, in_tile = tile_at(index, num_experts * out_tiles, in_tiles, GROUP_OUT, 1)
        expert = row_tile // out_tiles
        first_out = row_tile % out_tiles * BLOCK_OUT
        first_in = in_tile * BLOCK_IN
        # Of a width divisible by 16 the remainder keeps runs of 16 columns: loads stay 16 bytes wide.
        o = (first_out + tl.arange(0, BLOCK_OUT)) % out_width
        i = (first_in + tl.arange(0, BLOCK_IN)) % in_width
        start = tl.load(offsets + expert)
        count = tl.load(offsets + expert + 1) - start
        row = tl.cast(start, tl.int64)
        # Both sides as the dot takes them, d_out transposed by its pointers.
        d_out_offsets = o[:, None] + k[None, :] * out_width
        x_offsets = k[:, None] * in_width + i[None, :]
        d_out_rows = d_out + row * out_width
        x_rows = x + row * in_width
        acc = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
        for _ in range(0, count // BLOCK_ROWS):
            if GATHER_D_OUT:
                ids = tl.cast(tl.load(row_ids + row + k), tl.int64)
                a = tl.load(d_out + (ids * out_width)[None, :] + o[:, None])
            else:
                a = tl.load(d_out_rows + d_out_offsets)
                d_out_rows += BLOCK_ROWS * out_width
            if GATHER_X:
                ids = tl.cast(tl.load(row_ids + row + k), tl.int64)
                b = tl.load(x + (ids * in_width)[:, None] + i[None, :])
            else:
                b = tl.load(x_rows + x_offsets)
                x_rows += BLOCK_ROWS * in_width
            acc = tl.dot(a, b, acc, input_precision="ieee")
            row += BLOCK_ROWS
        left = count % BLOCK_ROWS
        if left > 0:
            inside = k < left
            if GATHER_D_OUT:
                ids = tl.cast(tl.load(row_ids + row + k, mask=inside, other=0), tl.int64)
                a = tl.load(d_out + (ids * out_width)[None, :] + o[:, None], mask=inside[None, :], other=0.0)
            else:
                a = tl.load(d_out_rows + d_out_offsets, mask=inside[None, :], other=0.0)
            if GATHER_X:
                ids = tl.cast(tl.load(row_ids + row + k, mask=inside, other=0), tl.int64)
                b = tl.load(x + (ids * in_width)[:, None] + i[None, :], mask=inside[:, None], other=0.0)
            else:
                b = tl.load(x_rows + x_offsets, mask=inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        tile = out + (tl.cast(expert, tl.int64) * out_width + first_out) * in_width + first_in
        rows = tl.arange(0, BLOCK_OUT)[:, None]
        columns = tl.arange(0, BLOCK_IN)[None, :]
        places = tile + rows * in_width + columns
        edge = (rows < out_width - first_out) & (columns < in_width - first_in)
        if ACCUMULATE:
            acc += tl.load(places, mask=edge, other=0.0)
        tl.store(places, acc.to(out.dtype.element_ty), mask=edge)


def grouped_wgrad(
    d_out: Tensor,
    x: Tensor,
    schedule: TileSchedule,
    *,
    row_ids_M: Tensor | None = None,
    gathered: Literal["x", "d_out"] = "x",
    out: Tensor | None = None,
) -> Tensor:
    """``dW[e, o, i] = sum of d_out[m, o] * x[m, i] over the rows m of expert e``, ``[e, out, in]``.

    ``row_ids_M``  int32; the side named by ``gathered`` has its row for m at ``row_ids_M[m]``
    ``out``        float32 gradient to add to, which is returned; else a new tensor of the inputs' dtype

    An expert without rows gets exact zeros. Raises ValueError where shapes or dtypes do not fit.
    """
    d_out, x = d_out.contiguous(), x.contiguous()
    check_wgrad(d_out, x, schedule, row_ids_M=row_ids_M, gathered=gathered, out=out)
    num_rows, num_experts = schedule.num_rows, schedule.num_experts
    out_width, in_width = d_out.shape[1], x.shape[1]
    accumulate = out is not None
    if out is None:
        out = d_out.new_empty((num_experts, out_width, in_width))
    arch = arch_of(x)
    op = "grouped_wgrad" if row_ids_M is None else "gathered_wgrad"
    config = config_for(op, arch=arch, dtype=x.dtype, rows=num_rows, sizes=(num_experts, out_width, in_width))
    block_out, block_in = config.blocks["BLOCK_OUT"], config.blocks["BLOCK_IN"]
    tiles = triton.cdiv(out_width, block_out) * triton.cdiv(in_width, block_in)
    row_bytes = (block_out + block_in) * x.element_size() + 4 * (row_ids_M is not None)
    launch(
        Launch(
            op=op,
            kernel=_grouped_wgrad_kernel,
            grid=(min(num_experts * tiles, compute_units(arch) * _PROGRAMS_PER_UNIT),),
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
