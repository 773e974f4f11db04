"""All experts on this rank: tokens are the rows, and nothing moves."""

from __future__ import annotations

from torch import Tensor

from ..types import DispatchPlan, Rows, TokenBuffer, Traffic


class LocalDispatcher:
    """Expert-parallel size 1. An assignment's row is its token; the experts sum a token's results themselves."""

    def plan(self, buffer: TokenBuffer) -> DispatchPlan:
        counts = buffer.tokens_per_expert_E.tolist()  # the device-to-host sync
        num_rows = sum(counts)
        return DispatchPlan(
            num_rows=num_rows,
            send_splits=[num_rows],
            recv_splits=[num_rows],
            row_ids_M=buffer.slot_ids_S[:num_rows] // buffer.top_k,
            assignments_RK=buffer.places_S.view(buffer.num_tokens, buffer.top_k),
            counts_e=buffer.tokens_per_expert_E,
            tokens_per_local_expert=counts,
        )

    def dispatch(self, x_TD: Tensor, buffer: TokenBuffer, plan: DispatchPlan) -> Rows:
        return Rows(x_RD=x_TD, weights_M=buffer.combine_weights_S[: plan.num_rows])

    def combine(self, y_RD: Tensor, buffer: TokenBuffer, plan: DispatchPlan) -> Tensor:
        return y_RD

    def rows_sent_away(self, plan: DispatchPlan) -> int:
        return 0

    def traffic(self, plan: DispatchPlan) -> Traffic:
        return Traffic(to_self=plan.num_rows, assigned=plan.num_rows)
