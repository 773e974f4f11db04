"""Grouped GEMMs of the backward to inputs: gradients of each expert's rows times its ``[out, in]`` weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation_math import activate_with_slopes
from .launch import Cost, Launch, launch
from .ragged import Stacked, TileSchedule, kernel_arguments
from .reference_activation import Activation
from .reference_gemm import check_dgrad, check_dgrad_activated
from .tiles import Persistent, multiply, row_pointers, rows_of_tile, tile_at


@triton.jit
def _rows_of_weights(weight, expert, stride, first_column, width, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Pointers ``[BLOCK_K, BLOCK_N]`` to the expert's weights ``[inner, width]``; columns past the last are the first.

    Of a width divisible by 16 the remainder keeps runs of 16 columns: loads stay 16 bytes wide.

    Example: one expert, weights [[1, 2, 3]], first column 2, BLOCK_N=2 points at [[3, 1]].
    """
    columns = (first_column + tl.arange(0, BLOCK_N)) % width
    tile = weight + tl.cast(expert, tl.int64) * stride
    return tile + (tl.arange(0, BLOCK_K)[:, None] * width + columns[None, :])


@triton.jit
def _grouped_dgrad_kernel(
    d_out,
    weight,
    second_d_out,
    second_weight,
    out,
    tile_expert,
    tile_row,
    offsets,
    num_tiles,
    weight_stride,
    second_weight_stride,
    width,
    inner,
    HAS_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_XCD: tl.constexpr,
    ADVANCE: tl.constexpr,
):
    """Programs take tiles ``out[BLOCK_M rows of one expert, BLOCK_N]`` in turn: d_out @ W, plus a second such product.

    Example: one expert with weights [[3, 4]] and second weights [[10, 20]], d_out [[2]], second [[1]] gives [[16, 28]].
    """
    row_tiles, column_tiles = tl.load(num_tiles), tl.cdiv(width, BLOCK_N)
    for index in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_at(index, row_tiles, column_tiles, GROUP_M, NUM_XCD)
        expert, first, height = rows_of_tile(tile_expert, tile_row, offsets, row_tile, BLOCK_M)
        first_column = column_tile * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        a = row_pointers(d_out, None, first, height, inner, BLOCK_M, BLOCK_K)
        w = _rows_of_weights(weight, expert, weight_stride, first_column, width, BLOCK_N, BLOCK_K)
        acc, _ = multiply(a, w, None, inner, width, acc, None, HAS_TAIL, ADVANCE, BLOCK_K)
        if second_d_out is not None:
            a = row_pointers(second_d_out, None, first, height, inner, BLOCK_M, BLOCK_K)
            w = _rows_of_weights(second_weight, expert, second_weight_stride, first_column, width, BLOCK_N, BLOCK_K)
            acc, _ = multiply(a, w, None, inner, width, acc, None, HAS_TAIL, ADVANCE, BLOCK_K)

        local, columns = tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
        places = out + first * width + (local[:, None] * width + columns[None, :])
        inside = (local[:, None] < height) & (columns[None, :] < width)
        tl.store(places, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row_dot_bias(rows, bias, inner, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """``sum over k of rows[m, k] * bias[k]``, float32 ``[BLOCK_M]``; rows point at the first block of columns.

    Example: rows [[1, 2]], bias (3, 4) gives (11).
    """
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for done in tl.range(0, inner, BLOCK_K, num_stages=1):
        values = tl.load(rows + done, mask=k[None, :] < inner - done, other=0.0).to(tl.float32)
        factors = tl.load(bias + done + k, mask=k < inner - done, other=0.0).to(tl.float32)
        total += tl.sum(values * factors[None, :], axis=1)
    return total


@triton.jit
def _through_activation(
    d_hidden, up, gate, weight, hidden, d_up, d_gate, tile, places, inside, ACTIVATION: tl.constexpr
):
    """Writes hidden, d_up and d_gate at ``tile + places`` where ``inside``; returns its part of the rows' d_weight.

    Example: relu, d_hidden [[6]], up 4, weight 0.5 writes hidden 2, d_up 3 and returns (24).
    """
    up_value = tl.load(up + tile + places, mask=inside, other=0.0).to(tl.float32)
    gate_value = tl.load(gate + tile + places, mask=inside, other=0.0).to(tl.float32) if gate is not None else None
    act, slope_up, slope_gate = activate_with_slopes(up_value, gate_value, ACTIVATION)
    d_act = d_hidden * weight[:, None]
    tl.store(hidden + tile + places, (act * weight[:, None]).to(hidden.dtype.element_ty), mask=inside)
    tl.store(d_up + tile + places, (d_act * slope_up).to(d_up.dtype.element_ty), mask=inside)
    if gate is not None:
        tl.store(d_gate + tile + places, (d_act * slope_gate).to(d_gate.dtype.element_ty), mask=inside)
    return tl.sum(tl.where(inside, d_hidden * act, 0.0), axis=1)


@triton.jit
def _grouped_dgrad_activated_kernel(
    dy,
    row_ids,
    down,
    down_bias,
    up,
    gate,
    weights,
    hidden,
    d_up,
    d_gate,
    d_weights,
    tile_expert,
    tile_row,
    offsets,
    num_tiles,
    down_stride,
    down_bias_stride,
    num_rows,
    width,
    inner,
    ACTIVATION: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_XCD: tl.constexpr,
    ADVANCE: tl.constexpr,
):
    """Programs take tiles of ``d_hidden = dy @ W_down`` in turn and go on through the activation, computed again.

    ``d_hidden`` is never written. ``d_weights[column tile, m]`` is the part of the sum over f of d_hidden * act that
    lies in the column tile; the first has the down projection's bias times dy as well.

    Example: relu, dy = [[3]], down weights [[2]], up 4, weight 0.5: d_hidden 6, hidden 2, d_up 3, d_weights 24.
    """
    row_tiles, column_tiles = tl.load(num_tiles), tl.cdiv(width, BLOCK_N)
    for index in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_at(index, row_tiles, column_tiles, GROUP_M, NUM_XCD)
        expert, first, height = rows_of_tile(tile_expert, tile_row, offsets, row_tile, BLOCK_M)
        first_column = column_tile * BLOCK_N
        a = row_pointers(dy, row_ids, first, height, inner, BLOCK_M, BLOCK_K)
        w = _rows_of_weights(down, expert, down_stride, first_column, width, BLOCK_N, BLOCK_K)
        d_weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
        if down_bias is not None:  # noqa: SIM102 (known to the compiler, unlike the column tile)
            if column_tile == 0:
                d_weight = _row_dot_bias(a, down_bias + expert * down_bias_stride, inner, BLOCK_M, BLOCK_K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        d_hidden, _ = multiply(a, w, None, inner, width, acc, None, HAS_TAIL, ADVANCE, BLOCK_K)

        local, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N // 2)
        real = local < height
        weight = tl.load(weights + first + local, mask=real, other=0.0)
        tile = first * width + first_column
        places = local[:, None] * width + columns[None, :]
        # In two halves: all of a tile's activations at once are more registers than a program has.
        left, right = tl.split(d_hidden.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1))
        inside = real[:, None] & (columns[None, :] < width - first_column)
        d_weight += _through_activation(left, up, gate, weight, hidden, d_up, d_gate, tile, places, inside, ACTIVATION)
        tile += BLOCK_N // 2
        inside = real[:, None] & (columns[None, :] < width - first_column - BLOCK_N // 2)
        d_weight += _through_activation(right, up, gate, weight, hidden, d_up, d_gate, tile, places, inside, ACTIVATION)
        tl.store(d_weights + tl.cast(column_tile, tl.int64) * num_rows + first + local, d_weight, mask=real)


def grouped_dgrad(
    d_out: Tensor, weight: Stacked, schedule: TileSchedule, *, second: tuple[Tensor, Stacked] | None = None
) -> Tensor:
    """``out[m] = d_out[m] @ W_e (+ second_d_out[m] @ second_W_e)``, rounded once; see the twin."""
    check_dgrad(d_out, weight, schedule, second=second)
    d_out, (inner, width) = d_out.contiguous(), weight.first.shape
    out = d_out.new_empty((schedule.num_rows, width))
    second_d_out, second_weight = second if second is not None else (None, None)
    num_products = 1 if second is None else 2
    run = Persistent.of("grouped_dgrad", d_out, schedule, width=width, inner=inner)
    launch(
        Launch(
            op="grouped_dgrad",
            kernel=_grouped_dgrad_kernel,
            grid=(run.programs,),
            arguments=dict(
                d_out=d_out,
                second_d_out=second_d_out.contiguous() if second_d_out is not None else None,
                out=out,
                **kernel_arguments(weight=weight, second_weight=second_weight),
                **run.arguments(),
            ),
            config=run.config,
            cost=Cost(
                bytes_read=run.product_bytes(rows=num_products, weights=num_products, gathered=False),
                bytes_written=out.nbytes,
                flops=run.flops(num_products),
            ),
        )
    )
    return out


def grouped_dgrad_activated(
    dy_RD: Tensor,
    down: Stacked,
    schedule: TileSchedule,
    *,
    row_ids_M: Tensor,
    up_MF: Tensor,
    gate_MF: Tensor | None,
    weights_M: Tensor,
    activation: Activation,
    down_bias: Stacked | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """hidden, d_up, d_gate and d_weights (float32) from the gradient of the experts' output; see the twin."""
    check_dgrad_activated(dy_RD, down, schedule, row_ids_M, up_MF, gate_MF, weights_M, activation, down_bias=down_bias)
    dy_RD, (inner, width) = dy_RD.contiguous(), down.first.shape
    up_MF, gate_MF = up_MF.contiguous(), gate_MF.contiguous() if gate_MF is not None else None
    hidden_MF, d_up_MF = torch.empty_like(up_MF), torch.empty_like(up_MF)
    d_gate_MF = torch.empty_like(gate_MF) if gate_MF is not None else None
    run = Persistent.of("grouped_dgrad_activated", dy_RD, schedule, width=width, inner=inner)
    parts = up_MF.new_empty((run.column_tiles, schedule.num_rows), dtype=torch.float32)
    num_values = 1 if gate_MF is None else 2
    read = run.product_bytes(rows=1, weights=1, gathered=True) + num_values * up_MF.nbytes + parts.nbytes
    if down_bias is not None:
        read += run.row_tiles * (schedule.block_m + 1) * inner * dy_RD.element_size()
    launch(
        Launch(
            op="grouped_dgrad_activated",
            kernel=_grouped_dgrad_activated_kernel,
            grid=(run.programs,),
            arguments=dict(
                dy=dy_RD,
                row_ids=row_ids_M.contiguous(),
                up=up_MF,
                gate=gate_MF,
                weights=weights_M.contiguous(),
                hidden=hidden_MF,
                d_up=d_up_MF,
                d_gate=d_gate_MF,
                d_weights=parts,
                num_rows=schedule.num_rows,
                ACTIVATION=activation,
                **kernel_arguments(down=down, down_bias=down_bias),
                **run.arguments(),
            ),
            config=run.config,
            cost=Cost(
                bytes_read=read,
                bytes_written=(1 + num_values) * up_MF.nbytes + parts.nbytes,
                flops=run.flops(1),
            ),
        )
    )
    return hidden_MF, d_up_MF, d_gate_MF, parts.sum(0)
