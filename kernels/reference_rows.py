"""PyTorch twins of the row kernels: rows by index, their sum by token, sums over the rows of one expert."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .dtypes import accumulator_dtype


def gather_rows(x_TD: Tensor, slot_ids_N: Tensor, top_k: int, weights_N: Tensor | None = None) -> Tensor:
    """``out[n] = x[slot_ids[n] // top_k]``, times ``weights[n]`` where given: ``[N, D]`` in x's dtype.

    Example: x rows a, b, K=2, slots [3, 0] gives rows b, a.
    """
    rows_ND = x_TD.index_select(0, slot_ids_N // top_k)
    if weights_N is None:
        return rows_ND
    return (rows_ND.to(accumulator_dtype(x_TD.dtype)) * weights_N[:, None]).to(x_TD.dtype)


def combine_rows(rows_ND: Tensor, places_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """``out[t] = sum over k of rows[places[t, k]]``, each times ``weights[t, k]`` where given: ``[T, D]``.

    In rows' dtype. Places outside ``[0, N)`` hold no row. Summed in the order of k in at least float32: each token
    is written once, nothing is atomic.

    Example: rows a, b, c, places [[1, 2], [0, 3]] gives rows b + c, a.
    """
    num_rows, width = rows_ND.shape
    dtype = accumulator_dtype(rows_ND.dtype)
    is_row_TK = (places_TK >= 0) & (places_TK < num_rows)
    index_TK = torch.where(is_row_TK, places_TK, num_rows)
    padded = torch.cat([rows_ND, rows_ND.new_zeros(1, width)])
    total = rows_ND.new_zeros((places_TK.shape[0], width), dtype=dtype)
    for choice in range(places_TK.shape[1]):
        rows_TD = padded.index_select(0, index_TK[:, choice])
        if weights_TK is None:
            total += rows_TD
        else:
            weights_T = torch.where(is_row_TK[:, choice], weights_TK[:, choice], 0)
            total += rows_TD.to(dtype) * weights_T[:, None].to(dtype)
    return total.to(rows_ND.dtype)


def row_dot(a_ND: Tensor, b_TD: Tensor, slot_ids_N: Tensor, top_k: int) -> Tensor:
    """``out[n] = sum over d of a[n, d] * b[slot_ids[n] // top_k, d]``, ``[N]`` in at least float32.

    Example: a rows (1, 2), (3, 4), b row (1, 1), K=2, slots [1, 0] gives [3, 7].
    """
    dtype = accumulator_dtype(a_ND.dtype)
    return (a_ND.to(dtype) * b_TD.index_select(0, slot_ids_N // top_k).to(dtype)).sum(dim=1)


def segment_sums(
    rows: Tensor, offsets_e1: Tensor, *, row_ids_M: Tensor | None = None, weights_M: Tensor | None = None
) -> Tensor:
    """``out[x] = sum over m in [offsets[x], offsets[x + 1]) of weights[m] * rows[row_ids[m]]``, ``[e, D]``.

    In rows' dtype, summed in at least float32; without ``row_ids_M`` row m itself, without ``weights_M`` unweighted.
    An empty segment gives exact zeros.

    Example: rows (1, 1), (2, 0), offsets [0, 1, 1, 2] gives (1, 1), (0, 0), (2, 0).
    """
    dtype = accumulator_dtype(rows.dtype)
    sums = rows.new_zeros((offsets_e1.numel() - 1, rows.shape[1]), dtype=dtype)
    for segment, (start, end) in enumerate(itertools.pairwise(offsets_e1.tolist())):
        part = rows[start:end] if row_ids_M is None else rows.index_select(0, row_ids_M[start:end])
        part = part.to(dtype)
        sums[segment] = (part if weights_M is None else part * weights_M[start:end, None]).sum(dim=0)
    return sums.to(rows.dtype)
