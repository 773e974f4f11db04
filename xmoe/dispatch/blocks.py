"""Ragged blocks in another order. Rows cross ranks by rank, then by what they are for; readers want the contrary."""

from __future__ import annotations

import torch
from torch import Tensor


def transpose_blocks(counts_AB: Tensor, *, num_rows: int) -> Tensor:
    """int32 ``[num_rows]``: rows that lie by a, then b, listed by b, then a; ``num_rows == counts_AB.sum()``.

    With ``counts[rank, expert]``: rows that lie by rank, then expert, listed by expert, then rank.

    Example: counts [[1, 2], [3, 0]] gives [0, 3, 4, 5, 1, 2].
    """
    counts = counts_AB.reshape(-1)
    starts_BA = (counts.cumsum(0) - counts).view_as(counts_AB).t().reshape(-1)
    counts_BA = counts_AB.t().reshape(-1)
    shift_BA = starts_BA - (counts_BA.cumsum(0) - counts_BA)
    places = torch.arange(num_rows, device=counts.device)
    return (places + torch.repeat_interleave(shift_BA, counts_BA, output_size=num_rows)).to(torch.int32)
