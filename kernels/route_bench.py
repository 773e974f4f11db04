"""Benchmark cases of the kernels that plan a hierarchical dispatch: every expert is a rank, eight or fewer a node."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import reference
from . import triton_kernels as kernels
from .bench import Case
from .reference_route import RankMap, Routes
from .reference_route_messages import Inbox

if TYPE_CHECKING:
    from .bench_cases import Problem


class _Route:
    """What the steps of a plan need, by the twins. The rank's own messages stand for those that it received."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_ranks = problem.shape.num_experts

    @cached_property
    def ranks(self) -> RankMap:
        num_places = next(size for size in (8, 4, 2, 1) if self.num_ranks % (2 * size) == 0 or size == 1)
        device = self.problem.device
        rank_W1 = torch.arange(self.num_ranks + 1, device=device)
        first_W1 = (rank_W1[:-1] // num_places * num_places)[:, None]
        return RankMap(
            per_gpu=True,
            per_node=True,
            num_ranks=self.num_ranks,
            num_places=num_places,
            own_node=0,
            node_of_rank_W1=rank_W1 // num_places,
            place_of_rank_W1=rank_W1 % num_places,
            neighbours_WP=first_W1 + torch.arange(num_places, device=device),
        )

    @cached_property
    def rank_KT(self) -> Tensor:
        return self.problem.ids_TK.t().contiguous()

    @cached_property
    def hop_KT(self) -> Tensor:
        return reference.choose_pilots(self.rank_KT, self.ranks)

    @cached_property
    def routes(self) -> Routes:
        shared = reference.share_rows(self.rank_KT, self.hop_KT, self.ranks)
        return Routes(
            rank_KT=self.rank_KT,
            hop_KT=self.hop_KT,
            shared=shared,
            places_S=self.problem.places_TK.reshape(-1),
            first_places_S=reference.sort_slots(shared.first_ids_TK, self.num_ranks)[1],
            second_places_S=reference.sort_slots(shared.second_ids_TK, self._ways)[1],
        )

    @property
    def _ways(self) -> int:
        return self.num_ranks * self.ranks.num_places

    @cached_property
    def counts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of both hops by way, and assignments."""
        shared = self.routes.shared
        first_W = reference.count_ids(shared.first_ids_TK, self.num_ranks).to(torch.int32)
        second_L = reference.count_ids(shared.second_ids_TK, self._ways).to(torch.int32)
        return first_W, second_L, self.problem.counts_e

    @cached_property
    def message_WC(self) -> Tensor:
        return reference.route_message(*self.counts, self.ranks)

    @cached_property
    def inbox(self) -> Inbox:
        starts = reference.message_starts(self.message_WC, num_places=self.ranks.num_places)
        passed_on_S, served_S = reference.row_references(self.routes, starts, self.ranks, num_local=1)
        sizes = self.num_copies + self.problem.num_rows
        references_N = torch.empty(sizes, dtype=torch.int32, device=self.problem.device)
        reference.pack_references(references_N, passed_on_S[: self.num_copies], served_S, starts, starts.references_W2)
        return Inbox(
            message_WC=self.message_WC, starts=starts, references_N=references_N, begins_W2=starts.references_W2
        )

    @cached_property
    def num_copies(self) -> int:
        return int(self.counts[1].sum())

    def case(self, kernel: str, call: Callable[[Any], Any], inputs: list[Tensor], **more: Any) -> Case:
        """``call`` takes either form of the kernels."""
        return self.problem.case(
            kernel, lambda: call(kernels), lambda: call(reference), dtype=torch.int32, inputs=inputs, **more
        )


def _ranks_of_slots(p: Problem) -> Case:
    sizes = dict(num_ranks=p.shape.num_experts, top_k=p.shape.top_k)
    return _Route(p).case(
        "ranks_of_slots",
        lambda side: side.ranks_of_slots(p.slot_ids_M, p.counts_e, **sizes),
        [p.slot_ids_M, p.counts_e],
    )


def _choose_pilots(p: Problem) -> Case:
    route = _Route(p)
    return route.case("choose_pilots", lambda side: side.choose_pilots(route.rank_KT, route.ranks), [route.rank_KT])


def _share_rows(p: Problem) -> Case:
    route = _Route(p)
    given = [route.rank_KT, route.hop_KT]

    def call(side: Any) -> tuple[Tensor, ...]:
        found = side.share_rows(*given, route.ranks)
        return found.first_ids_TK, found.second_ids_TK, found.leader_KT, found.last_leader_KT, found.nth_KT

    return route.case("share_rows", call, given)


def _row_references(p: Problem) -> Case:
    route = _Route(p)
    starts, routes = route.inbox.starts, route.routes
    places = [routes.places_S, routes.first_places_S, routes.second_places_S]
    return route.case(
        "row_references",
        lambda side: side.row_references(routes, starts, route.ranks, num_local=1),
        [routes.rank_KT, routes.hop_KT, *places],
        compared=lambda found: (found[0][: route.num_copies], found[1]),
    )


def _route_message(p: Problem) -> Case:
    route = _Route(p)
    return route.case("route_message", lambda side: side.route_message(*route.counts, route.ranks), list(route.counts))


def _message_starts(p: Problem) -> Case:
    route = _Route(p)

    def call(side: Any) -> tuple[Tensor, ...]:
        found = side.message_starts(route.message_WC, num_places=route.ranks.num_places)
        return found.by_rank_WC, found.by_column_WC, found.references_W2, found.totals_C

    return route.case("message_starts", call, [route.message_WC])


def _message_sizes(p: Problem) -> Case:
    route = _Route(p)
    num_places, given = route.ranks.num_places, [route.message_WC, route.message_WC]
    return route.case("message_sizes", lambda side: side.message_sizes(*given, num_places=num_places), given)


def _pack_references(p: Problem) -> Case:
    route = _Route(p)
    starts, out = route.inbox.starts, torch.empty_like(route.inbox.references_N)
    lists = route.inbox.references_N.split([route.num_copies, p.num_rows])

    def call(side: Any) -> Tensor:
        side.pack_references(out, *lists, starts, starts.references_W2)
        return out.clone()

    return route.case("pack_references", call, list(lists))


def _take_assignments(p: Problem) -> Case:
    route = _Route(p)
    inbox, num_places = route.inbox, route.ranks.num_places
    num_rows = int(inbox.starts.totals_C[0] + inbox.starts.totals_C[1 + num_places : 1 + 2 * num_places].sum())
    sizes = dict(width=1, num_rows=num_rows, num_assigned=p.num_rows)
    return route.case(
        "take_assignments", lambda side: side.take_assignments(inbox, **sizes), [inbox.references_N[-p.num_rows :]]
    )


def _take_copies(p: Problem) -> Case:
    route = _Route(p)
    width = route.ranks.passing_width(p.shape.top_k)
    sizes = dict(width=width, num_first=int(route.inbox.starts.totals_C[0]), num_copies=route.num_copies)
    return route.case(
        "take_copies",
        lambda side: side.take_copies(route.inbox, **sizes),
        [route.inbox.references_N[: route.num_copies]],
    )


ROUTE_CASES: dict[str, Callable[[Any], Case]] = {
    "ranks_of_slots": _ranks_of_slots,
    "choose_pilots": _choose_pilots,
    "share_rows": _share_rows,
    "row_references": _row_references,
    "route_message": _route_message,
    "message_starts": _message_starts,
    "message_sizes": _message_sizes,
    "pack_references": _pack_references,
    "take_assignments": _take_assignments,
    "take_copies": _take_copies,
}
