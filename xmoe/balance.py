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

from .kernels import reference

AuxLossScope = Literal["micro_batch", "sequence", "global_batch"]


@dataclass(frozen=True, kw_only=True)
class BalanceLoads:
    """What the loss takes as constant, for each of B parts of the tokens (sequences, or all of them).

    ``loads_BE``    selections of each expert over the number of tokens counted
    ``divisors_B``  what the part's summed shares are divided by; a part's tokens, times B for the mean over parts
    """

    loads_BE: Tensor
    divisors_B: Tensor


def balancing_loss(shares_TE: Tensor, counted_T: Tensor, loads: BalanceLoads) -> Tensor:
    """``sum over b, e of loads[b, e] * (sum over tokens t of part b of counted[t] * shares[t, e]) / divisors[b]``.

    A scalar with gradient to the shares; without tokens it is 0 and connected to the graph.
    """
    num_parts, num_experts = loads.loads_BE.shape
    part = shares_TE.shape[0] // max(num_parts, 1)
    shares_BSE = shares_TE.view(num_parts, part, num_experts)
    sums_BE = (counted_T.reshape(num_parts, 1, part) @ shares_BSE).squeeze(1)
    return (loads.loads_BE * (sums_BE / loads.divisors_B[:, None])).sum()


def loads_of_parts(ids_TK: Tensor, counted_T: Tensor, *, num_parts: int, num_experts: int) -> BalanceLoads:
    """Loads of equal parts of consecutive tokens. Ids of -1 are not counted, nor are uncounted tokens' in the mean."""
    part_T1 = torch.arange(ids_TK.shape[0], device=ids_TK.device)[:, None] // max(
        ids_TK.shape[0] // max(num_parts, 1), 1
    )
    part_ids_TK = torch.where(ids_TK < 0, -1, ids_TK + part_T1 * num_experts)
    counts_BE = reference.count_ids(part_ids_TK, num_parts * num_experts).view(num_parts, num_experts)
    tokens_B = counted_T.reshape(num_parts, ids_TK.shape[0] // max(num_parts, 1)).sum(dim=1).clamp(min=1)
    return BalanceLoads(loads_BE=counts_BE.to(tokens_B.dtype) / tokens_B[:, None], divisors_B=tokens_B * num_parts)


def loads_of_step(step_counts_E: Tensor, counted_T: Tensor, *, top_k: int) -> BalanceLoads:
    """Loads from the selections of one whole optimizer step; even ones, K / E, where there are none yet.

    ``step_counts_E`` are those of all ranks, int64. Every counted token made K selections.
    """
    counts_E = step_counts_E.to(counted_T.dtype)
    total = counts_E.sum()
    even_E = torch.full_like(counts_E, 1.0 / counts_E.numel())
    loads_E = top_k * torch.where(total > 0, counts_E / total.clamp(min=1), even_E)
    return BalanceLoads(loads_BE=loads_E[None], divisors_B=counted_T.sum().clamp(min=1)[None])
