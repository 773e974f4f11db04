"""The load-balancing loss, and over which tokens its loads and its scores are averaged.

With ``s'`` a token's share of scores (they sum to 1), every scope's loss is

    E / K * sum over experts of load_e * share_e
    load_e   selections of expert e by the tokens counted, over their number: a constant
    share_e  mean of s'_e, with gradient

``micro_batch``   both over this rank's tokens of the forward: DeepSpeed's formula (at k = 2 first choices only)
``sequence``      both over one sequence, and the mean over sequences: DeepSeek-V3 (arXiv 2412.19437, eqs. 17-20)
``global_batch``  the loads over the whole global batch, the shares over this rank's tokens of the forward: "Demons in
                  the Detail" (arXiv 2501.11873, section 3)

A micro-batch's backward runs before the later ones of its optimizer step are routed, so no constant made of the step
in progress can be the same for every split of a batch. The global batch's loads are therefore those of the last
optimizer step, as in auxiliary-loss-free balancing (arXiv 2408.15664, algorithm 1). The gradients of ``sequence`` and
``global_batch`` then do not depend on how equal sequences are spread over ranks and micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AuxLossScope = Literal["micro_batch", "sequence", "global_batch"]


@dataclass(frozen=True, kw_only=True)
class BalanceLoads:
    """What the loss takes as constant, for each of B parts of the tokens (sequences, or all of them).

    ``loads_BE``    selections of each expert over the number of tokens counted
    ``divisors_B``  what the part's summed shares are divided by; a part's tokens, times B for the mean over parts
    """

    loads_BE: Tensor
    divisors_B: Tensor


def balancing_loss(share_sums_BE: Tensor, loads: BalanceLoads) -> Tensor:
    """``sum over b, e of loads[b, e] * share_sums[b, e] / divisors[b]``, a scalar with gradient to the shares.

    ``share_sums_BE`` are summed over the counted tokens of each part. Without tokens the loss is 0 and connected to
    the graph.
    """
    return (loads.loads_BE * (share_sums_BE / loads.divisors_B[:, None])).sum()


def loads_of_parts(counts_BE: Tensor, tokens_B: Tensor) -> BalanceLoads:
    """Loads of each part by itself: its selections ``counts_BE``, its number of counted tokens ``tokens_B``."""
    tokens_B = tokens_B.clamp(min=1)
    return BalanceLoads(
        loads_BE=counts_BE.to(tokens_B.dtype) / tokens_B[:, None], divisors_B=tokens_B * tokens_B.numel()
    )


def loads_of_step(step_counts_E: Tensor, tokens_B: Tensor, *, top_k: int) -> BalanceLoads:
    """Loads from the selections of one whole optimizer step; even ones, K / E, where there are none yet.

    ``step_counts_E`` are those of all ranks, int64. Every counted token made K selections.
    """
    counts_E = step_counts_E.to(tokens_B.dtype)
    total = counts_E.sum()
    even_E = torch.full_like(counts_E, 1.0 / counts_E.numel())
    loads_E = top_k * torch.where(total > 0, counts_E / total.clamp(min=1), even_E)
    return BalanceLoads(loads_BE=loads_E[None], divisors_B=tokens_B.sum().clamp(min=1)[None])
