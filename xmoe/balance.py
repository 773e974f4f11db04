"""The load-balancing loss, and over which tokens its loads and its scores are averaged.

With ``s'`` a token's share of scores (they sum to 1) and N tokens, every scope's loss is a mean of

    E / K * sum over experts of load_e * share_e
    load_e   selections of expert e by the tokens counted, over their number: a constant
    share_e  mean of s'_e, with gradient

``micro_batch``   both over this rank's tokens of the forward: DeepSpeed's formula (at k = 2 first choices only)
``sequence``      both over one sequence, and the mean over sequences: DeepSeek-V3 (arXiv 2412.19437, eqs. 17-20)
``global_batch``  the loads over all data-parallel ranks and the optimizer step so far, the shares over all ranks'
                  tokens of this forward: "Demons in the Detail" (arXiv 2501.11873, section 3)

A sequence-wise loss does not change with the number of ranks or micro-batches a batch of equal sequences is split
into. That over the global batch does not change with the ranks; with micro-batches it does, as the gradient of
those before cannot know the loads of those to come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .kernels import reference
from .ops.collectives import Exchange, sum_over_ranks

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


class GlobalLoads:
    """Loads over all ranks that train other tokens of the same layer and, if it accumulates, over micro-batches.

    ``exchange``     those ranks; None: this rank alone
    ``accumulates``  somebody calls :meth:`begin_step` at each optimizer step
    """

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.accumulates = False
        self._total: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A process group can be neither copied nor pickled: a copy of the layer stands alone until it is connected.
        return {"exchange": None, "accumulates": False, "_total": None}

    def begin_step(self) -> None:
        self._total = None

    def add(self, ids_TK: Tensor, counted_T: Tensor, num_experts: int) -> BalanceLoads:
        """Loads of the step with one more forward's selections. A collective: every rank makes every forward.

        The shares of this forward are divided by the tokens of a mean rank, so that the mean of the ranks' losses,
        and of their gradients, is the loss of all tokens however they are spread.
        """
        now = torch.cat([reference.count_ids(ids_TK, num_experts), counted_T.sum().round().long()[None]])
        num_ranks = 1
        if self.exchange is not None:
            now, num_ranks = sum_over_ranks(now, self.exchange)
        total = now if self._total is None else self._total + now
        if self.accumulates:
            self._total = total
        numbers = total.to(counted_T.dtype)
        return BalanceLoads(
            loads_BE=(numbers[:-1] / numbers[-1].clamp(min=1))[None],
            divisors_B=now[-1:].to(counted_T.dtype).clamp(min=1) / num_ranks,
        )
