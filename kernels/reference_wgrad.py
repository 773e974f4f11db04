"""PyTorch twin of the weight-gradient kernel."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor

from .dtypes import accumulator_dtype
from .ragged import TileSchedule


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

    Example: counts [2, 0], d_out [[1], [2]], x [[3], [4]] gives [[[11]], [[0]]].
    """
    check_wgrad(d_out, x, schedule, row_ids_M=row_ids_M, gathered=gathered, out=out)
    accumulator = accumulator_dtype(x.dtype)
    if row_ids_M is not None:
        x = x.index_select(0, row_ids_M) if gathered == "x" else x
        d_out = d_out.index_select(0, row_ids_M) if gathered == "d_out" else d_out
    shape = (schedule.num_experts, d_out.shape[1], x.shape[1])
    total = x.new_zeros(shape, dtype=accumulator)
    offsets = schedule.offsets_e1.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(offsets)):
        torch.mm(d_out[start:end].to(accumulator).t(), x[start:end].to(accumulator), out=total[expert])
    return total.to(x.dtype) if out is None else out.add_(total)


def check_wgrad(
    d_out: Tensor,
    x: Tensor,
    schedule: TileSchedule,
    *,
    row_ids_M: Tensor | None,
    gathered: str,
    out: Tensor | None,
) -> None:
    """Raises ValueError naming what does not fit."""
    if d_out.ndim != 2 or x.ndim != 2:
        raise ValueError(f"d_out ({tuple(d_out.shape)}) and x ({tuple(x.shape)}) must be matrices")
    if d_out.dtype != x.dtype:
        raise ValueError(f"d_out ({d_out.dtype}) and x ({x.dtype}) must have one dtype")
    if gathered not in ("x", "d_out"):
        raise ValueError(f'gathered ({gathered!r}) must be "x" or "d_out"')
    sides = {"d_out": d_out, "x": x}
    if row_ids_M is not None:
        sides.pop(gathered)
        sides["row_ids_M"] = row_ids_M
    for name, tensor in sides.items():
        if tensor.shape[0] != schedule.num_rows:
            raise ValueError(f"{name} has {tensor.shape[0]} rows, the schedule {schedule.num_rows}")
    if out is None:
        return
    shape = (schedule.num_experts, d_out.shape[1], x.shape[1])
    if tuple(out.shape) != shape or not out.is_contiguous():
        raise ValueError(f"out ({tuple(out.shape)}) must be contiguous and of shape {shape}")
    if out.dtype != (wanted := accumulator_dtype(x.dtype)):
        raise ValueError(f"out ({out.dtype}) must be {wanted} to be added to")
