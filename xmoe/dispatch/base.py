"""The dispatcher protocol. A dispatcher has no parameters; all it knows of a forward is in the plan."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..types import ExpertPlan, Rows, TokenBuffer, Traffic

P = TypeVar("P", bound=ExpertPlan)


class PlanningDispatcher(Protocol[P]):
    """Moves rows to their experts and results back, each kind by plans of its own class.

    ``plan``      the layer's one device-to-host sync, and its metadata collectives; every rank of the group calls it
    ``dispatch``  rows of this rank's tokens to the experts' ranks; the assignments of a plan are sorted by local
                  expert, those of one expert by source rank, then by slot
    ``combine``   results ``y_RD``, weighted already, to ``[T, D]``: the sum of each token's rows
    ``rows_sent_away``  rows of one direction that leave this rank, for traffic metrics
    ``traffic``   the same by the links they take, and the rows received
    """

    def plan(self, buffer: TokenBuffer) -> P: ...

    def dispatch(self, x_TD: Tensor, buffer: TokenBuffer, plan: P) -> Rows: ...

    def combine(self, y_RD: Tensor, buffer: TokenBuffer, plan: P) -> Tensor: ...

    def rows_sent_away(self, plan: P) -> int: ...

    def traffic(self, plan: P) -> Traffic: ...


# A layer hands its dispatcher the dispatcher's own plans back, whatever they are.
Dispatcher = PlanningDispatcher[Any]
