"""Grouped GEMMs of the forward: rows of each expert times its ``[out, in]`` weights, rows gathered while loading."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation_math import activate
from .launch import Cost, Launch, launch
from .ragged import Stacked, TileSchedule, kernel_arguments
from .reference_activation import Activation
from .reference_gemm import check_activated, check_forward
from .tiles import Persistent, multiply, row_pointers, rows_of_tile, tile_at


@triton.jit
def _columns_of_weights(
    weight, expert, stride, inner, first_column, width, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Pointers ``[BLOCK_K, BLOCK_N]`` to the expert's weights ``[width, inner]``, transposed; past the last, copies.

    Example: one expert, weights [[1, 2], [3, 4]], first column 1, blocks of 2 points at [[3, 3], [4, 4]].
    """
    local = tl.minimum(tl.arange(0, BLOCK_N), width - first_column - 1)
    tile = weight + (tl.cast(expert, tl.int64) * stride + tl.cast(first_column, tl.int64) * inner)
    return tile + (local[None, :] * inner + tl.arange(0, BLOCK_K)[:, None])


@triton.jit
def _load_bias(bias, expert, stride, columns, width):
    """The expert's bias at ``columns``, float32, zeros past the last.

    Example: bias (1, 2), columns (1, 2) gives (2, 0).
    """
    return tl.load(bias + tl.cast(expert, tl.int64) * stride + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def _grouped_forward_kernel(
    a,
    row_ids,
    weight,
    bias,
    bias_scale,
    out,
    tile_expert,
    tile_row,
    offsets,
    num_tiles,
    weight_stride,
    bias_stride,
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
    """Programs take tiles ``out[BLOCK_M rows of one expert, BLOCK_N]`` in turn: a @ W.T, plus scale * bias.

    Example: two rows [[1], [2]] of experts 0 and 1 with weights [[3]] and [[4]] give [[3], [8]].
    """
    row_tiles, column_tiles = tl.load(num_tiles), tl.cdiv(width, BLOCK_N)
    for index in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_at(index, row_tiles, column_tiles, GROUP_M, NUM_XCD)
        expert, first, height = rows_of_tile(tile_expert, tile_row, offsets, row_tile, BLOCK_M)
        first_column = column_tile * BLOCK_N
        a_tile = row_pointers(a, row_ids, first, height, inner, BLOCK_M, BLOCK_K)
        w_tile = _columns_of_weights(weight, expert, weight_stride, inner, first_column, width, BLOCK_N, BLOCK_K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        acc, _ = multiply(a_tile, w_tile, None, inner, 1, acc, None, HAS_TAIL, ADVANCE, BLOCK_K)

        local, columns = tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
        if bias is not None:
            added = _load_bias(bias, expert, bias_stride, columns, width)[None, :]
            if bias_scale is not None:
                added = added * tl.load(bias_scale + first + local, mask=local < height, other=0.0)[:, None]
            acc += added
        places = out + first * width + (local[:, None] * width + columns[None, :])
        inside = (local[:, None] < height) & (columns[None, :] < width)
        tl.store(places, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _grouped_forward_activated_kernel(
    x,
    row_ids,
    up,
    gate,
    up_bias,
    gate_bias,
    weights,
    hidden,
    up_out,
    gate_out,
    tile_expert,
    tile_row,
    offsets,
    num_tiles,
    up_stride,
    gate_stride,
    up_bias_stride,
    gate_bias_stride,
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
    """Programs take tiles of the pre-activations and of ``hidden = weight * act`` in turn; x is read once for both.

    The activation sees the pre-activations as they are stored, so that backward computes the same one again.

    Example: relu, x = [[3]] of weight 0.5 and up weights [[2]] gives up 6, hidden 3.
    """
    row_tiles, column_tiles = tl.load(num_tiles), tl.cdiv(width, BLOCK_N)
    for index in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_at(index, row_tiles, column_tiles, GROUP_M, NUM_XCD)
        expert, first, height = rows_of_tile(tile_expert, tile_row, offsets, row_tile, BLOCK_M)
        first_column = column_tile * BLOCK_N
        x_tile = row_pointers(x, row_ids, first, height, inner, BLOCK_M, BLOCK_K)
        up_tile = _columns_of_weights(up, expert, up_stride, inner, first_column, width, BLOCK_N, BLOCK_K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        gate_tile, acc_gate, gate_value = None, None, None
        if gate is not None:
            gate_tile = _columns_of_weights(gate, expert, gate_stride, inner, first_column, width, BLOCK_N, BLOCK_K)
            acc_gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        acc, acc_gate = multiply(x_tile, up_tile, gate_tile, inner, 1, acc, acc_gate, HAS_TAIL, ADVANCE, BLOCK_K)

        local, columns = tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
        inside = (local[:, None] < height) & (columns[None, :] < width)
        tile = first * width
        places = local[:, None] * width + columns[None, :]
        if up_bias is not None:
            acc += _load_bias(up_bias, expert, up_bias_stride, columns, width)[None, :]
        value = acc.to(up_out.dtype.element_ty)
        tl.store(up_out + tile + places, value, mask=inside)
        if gate is not None:
            if gate_bias is not None:
                acc_gate += _load_bias(gate_bias, expert, gate_bias_stride, columns, width)[None, :]
            gate_value = acc_gate.to(gate_out.dtype.element_ty)
            tl.store(gate_out + tile + places, gate_value, mask=inside)
            gate_value = gate_value.to(tl.float32)
        act = activate(value.to(tl.float32), gate_value, ACTIVATION)
        weight = tl.load(weights + first + local, mask=local < height, other=0.0)
        tl.store(hidden + tile + places, (act * weight[:, None]).to(hidden.dtype.element_ty), mask=inside)


def grouped_forward(
    a: Tensor,
    weight: Stacked,
    schedule: TileSchedule,
    *,
    row_ids_M: Tensor | None = None,
    bias: Stacked | None = None,
    bias_scale_M: Tensor | None = None,
) -> Tensor:
    """``out[m] = a[row_ids[m]] @ W_e.T + bias_scale[m] * bias_e``; see the twin."""
    check_forward(a, weight, schedule, row_ids_M=row_ids_M, bias=bias, bias_scale_M=bias_scale_M)
    a, (width, inner) = a.contiguous(), weight.first.shape
    out = a.new_empty((schedule.num_rows, width))
    run = Persistent.of("grouped_forward", a, schedule, width=width, inner=inner)
    read = run.product_bytes(rows=1, weights=1, gathered=row_ids_M is not None)
    if bias is not None:
        read += run.row_tiles * width * out.element_size()
        read += 4 * run.column_tiles * schedule.num_rows * (bias_scale_M is not None)
    launch(
        Launch(
            op="grouped_forward",
            kernel=_grouped_forward_kernel,
            grid=(run.programs,),
            arguments=dict(
                a=a,
                row_ids=row_ids_M.contiguous() if row_ids_M is not None else None,
                bias_scale=bias_scale_M.contiguous() if bias_scale_M is not None else None,
                out=out,
                **kernel_arguments(weight=weight, bias=bias),
                **run.arguments(),
            ),
            config=run.config,
            cost=Cost(bytes_read=read, bytes_written=out.nbytes, flops=run.flops(1)),
        )
    )
    return out


def grouped_forward_activated(
    x_RD: Tensor,
    up: Stacked,
    gate: Stacked | None,
    schedule: TileSchedule,
    *,
    row_ids_M: Tensor,
    weights_M: Tensor,
    activation: Activation,
    up_bias: Stacked | None = None,
    gate_bias: Stacked | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``hidden[m] = weights[m] * act(x[row_ids[m]] @ W_up.T + bias_up)``, and the pre-activations; see the twin."""
    check_activated(x_RD, up, gate, schedule, row_ids_M, weights_M, activation, up_bias=up_bias, gate_bias=gate_bias)
    x_RD, (width, inner) = x_RD.contiguous(), up.first.shape
    hidden_MF, up_MF = (x_RD.new_empty((schedule.num_rows, width)) for _ in range(2))
    gate_MF = torch.empty_like(up_MF) if gate is not None else None
    num_weights = 1 if gate is None else 2
    run = Persistent.of("grouped_forward_activated", x_RD, schedule, width=width, inner=inner, matrices=num_weights)
    read = run.product_bytes(rows=1, weights=num_weights, gathered=True)
    read += 4 * run.column_tiles * schedule.num_rows
    read += ((up_bias is not None) + (gate_bias is not None)) * run.row_tiles * width * x_RD.element_size()
    launch(
        Launch(
            op="grouped_forward_activated",
            kernel=_grouped_forward_activated_kernel,
            grid=(run.programs,),
            arguments=dict(
                x=x_RD,
                row_ids=row_ids_M.contiguous(),
                weights=weights_M.contiguous(),
                hidden=hidden_MF,
                up_out=up_MF,
                gate_out=gate_MF,
                ACTIVATION=activation,
                **kernel_arguments(up=up, gate=gate, up_bias=up_bias, gate_bias=gate_bias),
                **run.arguments(),
            ),
            config=run.config,
            cost=Cost(bytes_read=read, bytes_written=(1 + num_weights) * up_MF.nbytes, flops=run.flops(num_weights)),
        )
    )
    return hidden_MF, up_MF, gate_MF
