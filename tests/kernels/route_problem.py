"""The steps of a hierarchical plan on one rank's slots, each on what the twins made of the steps before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from xmoe.kernels import reference
from xmoe.kernels.reference import Inbox, MessageStarts, RankMap, Routes, SharedRows


def as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class RouteProblem:
    """Slots of ``ids_TK`` for experts of ranks on ``nodes``, ``num_local`` each, as a rank of ``own_node`` sees them.

    The rank's own messages and references stand for those it received, row w from rank w: what a rank makes of a
    message depends on nothing but the message.

    ``place``  puts an operand where it is used, and may lay it out in another way
    """

    ids_TK: Tensor
    nodes: tuple[int, ...]
    own_node: int
    num_local: int
    per_gpu: bool
    per_node: bool
    place: Callable[[Tensor], Tensor] = as_it_is

    @property
    def num_ranks(self) -> int:
        return len(self.nodes)

    @property
    def top_k(self) -> int:
        return self.ids_TK.shape[1]

    @cached_property
    def on_host(self) -> RouteProblem:
        return self if self.place is as_it_is else replace(self, place=as_it_is)

    @cached_property
    def ranks(self) -> RankMap:
        members = [[rank for rank, other in enumerate(self.nodes) if other == node] for node in self.nodes]
        places = [them.index(rank) for rank, them in enumerate(members)]
        num_places = len(members[0]) if self.per_node else 0
        ids = dict(
            node_of_rank_W1=torch.tensor([*self.nodes, max(*self.nodes, self.own_node) + 1]),
            place_of_rank_W1=torch.tensor([*places, 0]),
            neighbours_WP=torch.tensor([them[:num_places] for them in members], dtype=torch.int64),
        )
        device = self.place(self.ids_TK).device
        return RankMap(
            per_gpu=self.per_gpu,
            per_node=self.per_node,
            num_ranks=self.num_ranks,
            num_places=num_places,
            own_node=self.own_node,
            **{name: x.to(device) for name, x in ids.items()},
        )

    def placed(self, found: Any) -> Any:
        """A tensor, or the tensors of a dataclass, as :attr:`place` puts them."""
        if isinstance(found, Tensor):
            return self.place(found)
        parts = {field.name: getattr(found, field.name) for field in fields(found)}
        return type(found)(**{name: self.place(x) if isinstance(x, Tensor) else x for name, x in parts.items()})

    @cached_property
    def counts_E(self) -> Tensor:
        return reference.count_ids(self.ids_TK, self.num_ranks * self.num_local)

    @cached_property
    def order(self) -> tuple[Tensor, Tensor]:
        """Slots by expert, and their places."""
        return reference.sort_slots(self.ids_TK, self.num_ranks * self.num_local)

    @property
    def num_assigned(self) -> int:
        return int(self.counts_E.sum())

    @property
    def num_copies(self) -> int:
        return int(self.message[:, 1 : 1 + self.ranks.num_places].sum())

    @property
    def num_rows(self) -> int:
        num_places = self.ranks.num_places
        return int(self.message[:, 0].sum() + self.message[:, 1 + num_places : 1 + 2 * num_places].sum())

    # What the twins find on the host.

    @cached_property
    def rank_KT(self) -> Tensor:
        return self.on_host.ranks_of_slots(reference)

    @cached_property
    def hop_KT(self) -> Tensor:
        return self.on_host.choose_pilots(reference) if self.per_node else self.rank_KT

    @cached_property
    def shared(self) -> SharedRows:
        return self.on_host.share_rows(reference)

    @cached_property
    def ways(self) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Slots of both hops by way, their places, and the ways' counts."""
        first = reference.sort_and_count(self.shared.first_ids_TK, self.num_ranks)
        if not self.per_node:
            return first, (*first[:2], first[2][:0])
        return first, reference.sort_and_count(self.shared.second_ids_TK, self.num_ranks * self.ranks.num_places)

    @cached_property
    def message(self) -> Tensor:
        return self.on_host.route_message(reference)

    @cached_property
    def starts(self) -> MessageStarts:
        return self.on_host.message_starts(reference)

    @cached_property
    def lists(self) -> tuple[Tensor, Tensor]:
        return self.on_host.row_references(reference)

    @cached_property
    def references(self) -> Tensor:
        return self.on_host.pack_references(reference)

    # The steps, by either form of the kernels.

    def ranks_of_slots(self, kernels: Any) -> Tensor:
        sizes = dict(num_ranks=self.num_ranks, top_k=self.top_k)
        return kernels.ranks_of_slots(self.place(self.order[0]), self.place(self.counts_E), **sizes)

    def choose_pilots(self, kernels: Any) -> Tensor:
        return kernels.choose_pilots(self.place(self.rank_KT), self.ranks)

    def share_rows(self, kernels: Any) -> SharedRows:
        return kernels.share_rows(self.place(self.rank_KT), self.place(self.hop_KT), self.ranks)

    def route_message(self, kernels: Any) -> Tensor:
        (*_, first_W), (*_, second_L) = self.ways
        operands = (self.place(first_W), self.place(second_L), self.place(self.counts_E))
        return kernels.route_message(*operands, self.ranks)

    def message_starts(self, kernels: Any) -> MessageStarts:
        return kernels.message_starts(self.place(self.message), num_places=self.ranks.num_places)

    def message_sizes(self, kernels: Any) -> Tensor:
        received = self.place(self.message.flip(0))
        return kernels.message_sizes(self.place(self.message), received, num_places=self.ranks.num_places)

    def row_references(self, kernels: Any) -> tuple[Tensor, Tensor]:
        """Those that mean something."""
        (_, first_places_S, _), (_, second_places_S, _) = self.ways
        routes = Routes(
            rank_KT=self.place(self.rank_KT),
            hop_KT=self.place(self.hop_KT),
            shared=self.placed(self.shared),
            places_S=self.place(self.order[1]),
            first_places_S=self.place(first_places_S),
            second_places_S=self.place(second_places_S),
        )
        starts = self._starts()
        passed_on_S, served_S = kernels.row_references(routes, starts, self.ranks, num_local=self.num_local)
        return passed_on_S[: self.num_copies], served_S[: self.num_assigned]

    def _starts(self) -> MessageStarts:
        """Where they are used, laid out as they are made."""
        device = self.place(self.ids_TK).device
        parts = {field.name: getattr(self.starts, field.name) for field in fields(self.starts)}
        return MessageStarts(**{name: x.to(device) if isinstance(x, Tensor) else x for name, x in parts.items()})

    def pack_references(self, kernels: Any) -> Tensor:
        passed_on_N, served_N = self.lists
        references_N = torch.empty_like(self._starts().by_rank_WC[0, 0].expand(len(passed_on_N) + len(served_N)))
        references_N = references_N.contiguous().fill_(-(2**30))
        begins_W2 = self.place(self.starts.references_W2)
        kernels.pack_references(references_N, self.place(passed_on_N), self.place(served_N), self._starts(), begins_W2)
        return references_N

    def inbox(self) -> Inbox:
        return Inbox(
            message_WC=self.place(self.message),
            starts=self._starts(),
            references_N=self.place(self.references),
            begins_W2=self.place(self.starts.references_W2),
        )

    def take_assignments(self, kernels: Any) -> tuple[Tensor, Tensor, Tensor]:
        return kernels.take_assignments(
            self.inbox(),
            width=self.ranks.serving_width(self.top_k, self.num_local),
            num_rows=self.num_rows,
            num_assigned=self.num_assigned,
        )

    def take_copies(self, kernels: Any) -> tuple[Tensor, Tensor]:
        return kernels.take_copies(
            self.inbox(),
            width=self.ranks.passing_width(self.top_k),
            num_first=int(self.message[:, 0].sum()),
            num_copies=self.num_copies,
        )


STEPS = (
    "ranks_of_slots",
    "choose_pilots",
    "share_rows",
    "route_message",
    "message_starts",
    "message_sizes",
    "row_references",
    "pack_references",
    "take_assignments",
    "take_copies",
)
