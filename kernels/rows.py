"""Rows by index, their sum by token, dot products of rows, and sums over the rows of one expert."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Cost, Launch, arch_of, launch
from .tuning import config_for


@triton.jit
def _gather_rows_kernel(x, slot_ids, weights, out, top_k, width, BLOCK_D: tl.constexpr):
    """Program (n, j) writes block j of row ``slot_ids[n] // top_k`` of x, times ``weights[n]``, to row n of out.

    Example: x rows a, b, top_k=2, slots [3, 0], no weights gives rows b, a.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    source = tl.cast(tl.load(slot_ids + row) // top_k, tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < width
    values = tl.load(x + source * width + columns, mask=inside, other=0.0)
    if weights is not None:
        values = values.to(tl.float32) * tl.load(weights + row)
    tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=inside)


def gather_rows(x_TD: Tensor, slot_ids_N: Tensor, top_k: int, weights_N: Tensor | None = None) -> Tensor:
    """``out[n] = x[slot_ids[n] // top_k]``, times ``weights[n]`` where given: ``[N, D]`` in x's dtype."""
    _check_rows("x_TD", x_TD)
    num_rows, width = slot_ids_N.numel(), x_TD.shape[1]
    _check_top_k(top_k)
    _check_per_row("weights_N", weights_N, num_rows)
    x_TD, slot_ids_N = x_TD.contiguous(), slot_ids_N.contiguous()
    weights_N = weights_N.contiguous() if weights_N is not None else None
    out_ND = x_TD.new_empty((num_rows, width))
    config = config_for("gather", arch=arch_of(x_TD), dtype=x_TD.dtype, width=width, rows=num_rows)
    blocks = triton.cdiv(width, config.blocks["BLOCK_D"])
    row_bytes = width * x_TD.element_size()
    launch(
        Launch(
            op="gather",
            kernel=_gather_rows_kernel,
            grid=(num_rows, blocks),
            arguments=dict(x=x_TD, slot_ids=slot_ids_N, weights=weights_N, out=out_ND, top_k=top_k, width=width),
            config=config,
            cost=Cost(
                bytes_read=num_rows * (row_bytes + blocks * _bytes_of_each(slot_ids_N, weights_N)),
                bytes_written=num_rows * row_bytes,
                flops=0 if weights_N is None else num_rows * width,
            ),
        )
    )
    return out_ND


@triton.jit
def _combine_rows_kernel(
    rows, places, weights, out, num_rows, top_k, width, GROUP_K: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Program (t, j) sums block j of the rows ``places[t]``, each times its weight, in order, and writes it once.

    ``GROUP_K`` loads are in flight at a time. The loop's end is no constant: compilers would load all rows at once,
    and spill. The last group may reach past the last choice, which it then reads again and leaves out.

    Example: rows a, b, c, places [[1, 2], [0, 3]], no weights gives rows b + c, a.
    """
    token = tl.cast(tl.program_id(0), tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < width
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for first in range(0, top_k, GROUP_K):
        # All of the group's scalars before its first row: their latencies overlap, too.
        group_places = ()
        group_weights = ()
        for k in tl.static_range(GROUP_K):
            slot = token * top_k + tl.minimum(first + k, top_k - 1)
            group_places += (tl.load(places + slot),)
            if weights is not None:
                group_weights += (tl.load(weights + slot),)
        for k in tl.static_range(GROUP_K):
            place = tl.where(first + k < top_k, group_places[k], -1)
            place_of_lane = tl.broadcast_to(place, (BLOCK_D,))
            mask = inside & (place_of_lane >= 0) & (place_of_lane < num_rows)
            values = tl.load(rows + tl.cast(place, tl.int64) * width + columns, mask=mask, other=0.0).to(tl.float32)
            if weights is not None:
                values = tl.where(mask, values * group_weights[k], 0.0)
            total += values
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


def combine_rows(rows_ND: Tensor, places_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """``out[t] = sum over k of rows[places[t, k]]``, each times ``weights[t, k]`` where given: ``[T, D]``.

    In rows' dtype. Places outside ``[0, N)`` hold no row; every other row has one place.
    """
    _check_rows("rows_ND", rows_ND)
    if places_TK.dim() != 2 or (weights_TK is not None and weights_TK.shape != places_TK.shape):
        found = tuple(weights_TK.shape) if weights_TK is not None else None
        raise ValueError(f"places_TK {tuple(places_TK.shape)} and weights_TK {found} must both be [T, K]")
    (num_rows, width), (num_tokens, top_k) = rows_ND.shape, places_TK.shape
    rows_ND, places_TK = rows_ND.contiguous(), places_TK.contiguous()
    weights_TK = weights_TK.contiguous() if weights_TK is not None else None
    out_TD = rows_ND.new_empty((num_tokens, width))
    config = config_for("combine", arch=arch_of(rows_ND), dtype=rows_ND.dtype, width=width, rows=num_tokens)
    # Groups of equal size: 10 rows are 5 and 5, not 8 and 2 and 6 times none.
    groups = triton.cdiv(max(top_k, 1), config.blocks["GROUP_K"])
    group_k = triton.cdiv(max(top_k, 1), groups)
    config = replace(config, blocks={**config.blocks, "GROUP_K": group_k})
    blocks = triton.cdiv(width, config.blocks["BLOCK_D"])
    row_bytes = width * rows_ND.element_size()
    index_bytes = num_tokens * (groups * group_k if top_k else 0) * _bytes_of_each(places_TK, weights_TK)
    launch(
        Launch(
            op="combine",
            kernel=_combine_rows_kernel,
            grid=(num_tokens, blocks),
            arguments=dict(
                rows=rows_ND,
                places=places_TK,
                weights=weights_TK,
                out=out_TD,
                num_rows=num_rows,
                top_k=top_k,
                width=width,
            ),
            config=config,
            cost=Cost(
                bytes_read=num_rows * row_bytes + blocks * index_bytes,
                bytes_written=num_tokens * row_bytes,
                flops=num_rows * width * (1 if weights_TK is None else 2),
            ),
        )
    )
    return out_TD


@triton.jit
def _row_dot_kernel(a, b, slot_ids, out, top_k, width, BLOCK_D: tl.constexpr):
    """Program n writes the dot product of row n of a with row ``slot_ids[n] // top_k`` of b.

    Example: a rows (1, 2), (3, 4), b row (1, 1), top_k=2, slots [1, 0] gives 3, 7.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    other_row = tl.cast(tl.load(slot_ids + row) // top_k, tl.int64)
    a_row, b_row = a + row * width, b + other_row * width
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for start in range(0, width, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        inside = columns < width
        a_values = tl.load(a_row + columns, mask=inside, other=0.0).to(tl.float32)
        b_values = tl.load(b_row + columns, mask=inside, other=0.0).to(tl.float32)
        total += a_values * b_values
    tl.store(out + row, tl.sum(total, axis=0))


def row_dot(a_ND: Tensor, b_TD: Tensor, slot_ids_N: Tensor, top_k: int) -> Tensor:
    """``out[n] = sum over d of a[n, d] * b[slot_ids[n] // top_k, d]``, float32 ``[N]``."""
    _check_rows("a_ND", a_ND)
    _check_rows("b_TD", b_TD)
    _check_top_k(top_k)
    (num_rows, width), num_ids = a_ND.shape, slot_ids_N.numel()
    if b_TD.shape[1] != width or b_TD.dtype != a_ND.dtype:
        raise ValueError(
            f"a_ND ({width} wide, {a_ND.dtype}) and b_TD ({b_TD.shape[1]} wide, {b_TD.dtype}) must be of one width "
            "and dtype"
        )
    if num_ids != num_rows:
        raise ValueError(f"a_ND has {num_rows} rows, slot_ids_N {num_ids} entries")
    a_ND, b_TD, slot_ids_N = a_ND.contiguous(), b_TD.contiguous(), slot_ids_N.contiguous()
    out_N = a_ND.new_empty((num_rows,), dtype=torch.float32)
    config = config_for("row_dot", arch=arch_of(a_ND), dtype=a_ND.dtype, width=width, rows=num_rows)
    launch(
        Launch(
            op="row_dot",
            kernel=_row_dot_kernel,
            grid=(num_rows,),
            arguments=dict(a=a_ND, b=b_TD, slot_ids=slot_ids_N, out=out_N, top_k=top_k, width=width),
            config=config,
            cost=Cost(
                bytes_read=num_rows * (2 * width * a_ND.element_size() + slot_ids_N.element_size()),
                bytes_written=num_rows * 4,
                flops=2 * num_rows * width,
            ),
        )
    )
    return out_N


@triton.jit
def _segment_sums_kernel(rows, row_ids, weights, offsets, out, width, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Program (j, x) sums block j of the rows of segment x, in an order fixed by the blocks.

    Example: rows (1, 1), (2, 0), offsets [0, 1, 1, 2], no ids, no weights gives (1, 1), (0, 0), (2, 0).
    """
    segment = tl.cast(tl.program_id(1), tl.int64)
    columns = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    local = tl.arange(0, BLOCK_M)
    start, end = tl.load(offsets + segment), tl.load(offsets + segment + 1)
    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for first in range(start, end, BLOCK_M):
        is_row = local < end - first
        places = tl.cast(first, tl.int64) + local
        found = places
        if row_ids is not None:
            found = tl.cast(tl.load(row_ids + places, mask=is_row, other=0), tl.int64)
        mask = is_row[:, None] & (columns < width)[None, :]
        values = tl.load(rows + found[:, None] * width + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if weights is not None:
            values *= tl.load(weights + places, mask=is_row, other=0.0)[:, None]
        total += values
    sums = tl.sum(total, axis=0).to(out.dtype.element_ty)
    tl.store(out + segment * width + columns, sums, mask=columns < width)


def segment_sums(
    rows: Tensor, offsets_e1: Tensor, *, row_ids_M: Tensor | None = None, weights_M: Tensor | None = None
) -> Tensor:
    """``out[x] = sum over m in [offsets[x], offsets[x + 1]) of weights[m] * rows[row_ids[m]]``, ``[e, D]``.

    In rows' dtype, summed in float32; without ``row_ids_M`` row m itself, without ``weights_M`` unweighted.
    """
    _check_rows("rows", rows)
    rows, offsets_e1 = rows.contiguous(), offsets_e1.contiguous()
    row_ids_M = row_ids_M.contiguous() if row_ids_M is not None else None
    weights_M = weights_M.contiguous() if weights_M is not None else None
    width, num_segments = rows.shape[1], offsets_e1.numel() - 1
    num_rows = rows.shape[0] if row_ids_M is None else row_ids_M.numel()
    _check_per_row("weights_M", weights_M, num_rows)
    out = rows.new_empty((num_segments, width))
    config = config_for("segment_sums", arch=arch_of(rows), dtype=rows.dtype, width=width, rows=num_rows)
    blocks = triton.cdiv(width, config.blocks["BLOCK_D"])
    index_bytes = num_rows * _bytes_of_each(row_ids_M, weights_M) + 2 * num_segments * offsets_e1.element_size()
    launch(
        Launch(
            op="segment_sums",
            kernel=_segment_sums_kernel,
            grid=(blocks, num_segments),
            arguments=dict(rows=rows, row_ids=row_ids_M, weights=weights_M, offsets=offsets_e1, out=out, width=width),
            config=config,
            cost=Cost(
                bytes_read=num_rows * width * rows.element_size() + blocks * index_bytes,
                bytes_written=num_segments * width * rows.element_size(),
                flops=num_rows * width * (1 if weights_M is None else 2),
            ),
        )
    )
    return out


def _bytes_of_each(*tensors: Tensor | None) -> int:
    return sum(tensor.element_size() for tensor in tensors if tensor is not None)


def _check_rows(name: str, rows: Tensor) -> None:
    if rows.dim() != 2:
        raise ValueError(f"{name} must be [rows, width], found shape {tuple(rows.shape)}")


def _check_per_row(name: str, values: Tensor | None, num_rows: int) -> None:
    if values is not None and tuple(values.shape) != (num_rows,):
        raise ValueError(f"{name} must have one entry for each of {num_rows} rows, found shape {tuple(values.shape)}")


def _check_top_k(top_k: int) -> None:
    if top_k < 1:
        raise ValueError(f"top_k ({top_k}) must be at least 1")
