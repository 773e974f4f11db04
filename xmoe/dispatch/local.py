"""All experts on this rank: tokens are the rows, and nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..ops.overlap import Pausing
from ..types import ExpertPlan, Rows, TokenBuffer, Traffic


class LocalDispatcher:
    """Expert-parallel size 1. An assignment's row is its token; the experts sum a token's results themselves."""

    num_chunks = 1  # there is no exchange to overlap

    def plan(self, buffers: Sequence[TokenBuffer]) -> list[ExpertPlan]:
        return [_plan(buffer) for buffer in buffers]

    def dispatch(self, x_TD: Tensor, buffer: TokenBuffer, plan: ExpertPlan) -> Pausing[Rows]:
        yield from ()  # no pause
        return Rows(x_RD=x_TD, weights_M=buffer.combine_weights_S[: plan.num_computed])

    def combine(self, y_RD: Tensor, buffer: TokenBuffer, plan: ExpertPlan) -> Pausing[Tensor]:
        yield from ()
        return y_RD

    def traffic(self, plan: ExpertPlan) -> Traffic:
        return Traffic(to_self=plan.num_computed, assigned=plan.num_computed)


def _plan(buffer: TokenBuffer) -> ExpertPlan:
    counts = buffer.tokens_per_expert_E.tolist()  # the device-to-host sync
    return ExpertPlan(
        row_ids_M=buffer.slot_ids_S[: sum(counts)] // buffer.top_k,
        assignments_RK=buffer.places_S.view(buffer.num_tokens, buffer.top_k),
        counts_e=buffer.tokens_per_expert_E,
        tokens_per_local_expert=counts,
    )
