"""Rows by index, and their sum by token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import Cost, Launch, arch_of, launch
from .tuning import config_for


@triton.jit
def _gather_rows_kernel(x, slot_ids, out, top_k, width, BLOCK_D: tl.constexpr):
    """Program (n, j) copies block j of row ``slot_ids[n] // top_k`` of x to row n of out.

    Example: x rows a, b, top_k=2, slots [3, 0] gives rows b, a.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    source = tl.cast(tl.load(slot_ids + row) // top_k, tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < width
    values = tl.load(x + source * width + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, values, mask=inside)


def gather_rows(x_TD: Tensor, slot_ids_N: Tensor, top_k: int) -> Tensor:
    """``out[n] = x[slot_ids[n] // top_k]``, ``[N, D]`` in x's dtype."""
    x_TD = x_TD.contiguous()
    num_rows, width = slot_ids_N.numel(), x_TD.shape[1]
    out_ND = x_TD.new_empty((num_rows, width))
    config = config_for("gather", arch=arch_of(x_TD), dtype=x_TD.dtype, width=width)
    row_bytes = width * x_TD.element_size()
    launch(
        Launch(
            op="gather",
            kernel=_gather_rows_kernel,
            grid=(num_rows, triton.cdiv(width, config.blocks["BLOCK_D"])),
            arguments=dict(x=x_TD, slot_ids=slot_ids_N, out=out_ND, top_k=top_k, width=width),
            config=config,
            cost=Cost(bytes_read=num_rows * (row_bytes + 4), bytes_written=num_rows * row_bytes),
        )
    )
    return out_ND
