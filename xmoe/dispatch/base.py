"""The dispatcher protocol. A dispatcher has no parameters; all it knows of a forward is in the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..ops.overlap import Pausing
from ..types import ExpertPlan, Rows, TokenBuffer, Traffic

P = TypeVar("P", bound=ExpertPlan)


class PlanningDispatcher(Protocol[P]):
    """Moves rows to their experts and results back, each kind by plans of its own class.

    ``num_chunks``  how many chunks of tokens it takes apart from each other; the same on every rank of the group
    ``plan``      of all chunks at once: the layer's one device-to-host sync, and its metadata collectives; every rank
                  of the group calls it
    ``dispatch``  rows of a chunk's tokens to the experts' ranks; the assignments of a plan are sorted by local
                  expert, those of one expert by source rank, then by slot
    ``combine``   results ``y_RD``, weighted already, to ``[T, D]``: the sum of each token's rows
    ``traffic``   rows of one direction by the links they take, and the rows received

    ``dispatch`` and ``combine`` pause while an exchange is under way: whoever runs them computes something else then
    (``overlapped``), or runs them to their ends (``to_end``, both in ``xmoe.ops.overlap``).
    """

    @property
    def num_chunks(self) -> int: ...

    def plan(self, buffers: Sequence[TokenBuffer]) -> list[P]: ...

    def dispatch(self, x_TD: Tensor, buffer: TokenBuffer, plan: P) -> Pausing[Rows]: ...

    def combine(self, y_RD: Tensor, buffer: TokenBuffer, plan: P) -> Pausing[Tensor]: ...

    def traffic(self, plan: P) -> Traffic: ...


# A layer hands its dispatcher the dispatcher's own plans back, whatever they are.
Dispatcher = PlanningDispatcher[Any]
