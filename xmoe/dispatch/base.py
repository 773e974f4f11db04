"""The dispatcher protocol. A dispatcher has no parameters; all it knows of a forward is in the plan."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..types import DispatchPlan, Rows, TokenBuffer


class Dispatcher(Protocol):
    """Moves rows to their experts and results back.

    ``plan``      the layer's one device-to-host sync, and its metadata collectives; every rank of the group calls it
    ``dispatch``  rows of this rank's tokens to the experts' ranks; the assignments of a plan are sorted by local
                  expert, those of one expert by source rank, then by slot
    ``combine``   results ``y_RD``, weighted already, to ``[T, D]``: the sum of each token's rows
    ``rows_sent_away``  rows of one direction that leave this rank, for traffic metrics
    """

    def plan(self, buffer: TokenBuffer) -> DispatchPlan: ...

    def dispatch(self, x_TD: Tensor, buffer: TokenBuffer, plan: DispatchPlan) -> Rows: ...

    def combine(self, y_RD: Tensor, buffer: TokenBuffer, plan: DispatchPlan) -> Tensor: ...

    def rows_sent_away(self, plan: DispatchPlan) -> int: ...
