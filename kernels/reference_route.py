"""PyTorch twins of the kernels that route a rank's tokens: which ranks hold their experts, which GPU of a remote node
receives them first, and which slots share a row.

Tokens come last in ``[K, T]`` tensors, so that a token's slots are compared with each other along memory. All is
integers, the same on every device and in every run, and nothing is read back from the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .reference_route_messages import MessageStarts

# How far each round follows. The first one overshoots, since the tokens of a GPU that have no other choice do not
# move; more would swing. Measured on 512 tokens: at most 11 % above the lowest load possible, 1 % on average.
POWERS = (2, 1, 1, 1)
BITS = 16
GOLDEN = 40503  # 2^16 / golden ratio: multiples of it, modulo 2^16, spread evenly however many there are
FIRST_WEIGHT, MAX_WEIGHT = 2**12, 2**20


@dataclass(frozen=True, kw_only=True)
class RankMap:
    """The ranks of a group as one of them sees them, and how slots share rows. Index tensors are int64.

    ``per_gpu``            slots of a token whose experts share a GPU share a row
    ``per_node``           slots of a token whose experts share a remote node share a row as far as that node
    ``num_ranks``          W
    ``num_places``         P, the ranks of each node among whom rows are passed on; 0 where there is no second hop
    ``own_node``           this rank's node
    ``node_of_rank_W1``    node of each rank, and G for rank W, which is none
    ``place_of_rank_W1``   place of each rank among those of its node, 0 for rank W
    ``neighbours_WP``      the ranks of each rank's node, by place
    """

    per_gpu: bool
    per_node: bool
    num_ranks: int
    num_places: int
    own_node: int
    node_of_rank_W1: Tensor
    place_of_rank_W1: Tensor
    neighbours_WP: Tensor

    def serving_width(self, top_k: int, num_local: int) -> int:
        """The most assignments a row can have on its last rank."""
        return min(top_k, num_local) if self.per_gpu or self.per_node else 1

    def passing_width(self, top_k: int) -> int:
        """The most ranks' or experts' results that can sum to one row on its pilot, the pilot's own counted as one."""
        return min(top_k, self.num_places) if self.per_gpu else top_k


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """Rows of both hops: one for each set of a token's slots that share one, led by the first of them. All int32.

    ``first_ids_TK``    the rank to which a slot that leads a row of the first hop sends it, else -1
    ``second_ids_TK``   ``hop * P + place`` of a slot that leads a row of the second hop, from rank ``hop`` to its
                        neighbour at ``place``, else -1
    ``leader_KT``       which slot of its token leads the slot's row of the first hop
    ``last_leader_KT``  which one leads the row that serves it: of the second hop where its expert's rank is no pilot
    ``nth_KT``          how many slots before it that row serves
    """

    first_ids_TK: Tensor
    second_ids_TK: Tensor
    leader_KT: Tensor
    last_leader_KT: Tensor
    nth_KT: Tensor


@dataclass(frozen=True, kw_only=True)
class Routes:
    """All that :func:`row_references` reads of a rank's slots.

    ``rank_KT``, ``hop_KT``  int32; the rank of each slot's expert, and the rank its row goes to first
    ``places_S``             int32; place of each slot among those sorted by expert
    ``first_places_S``, ``second_places_S``  int32; the same sorted by ``first_ids_TK`` and by ``second_ids_TK``
    """

    rank_KT: Tensor
    hop_KT: Tensor
    shared: SharedRows
    places_S: Tensor
    first_places_S: Tensor
    second_places_S: Tensor


def ranks_of_slots(slot_ids_S: Tensor, tokens_per_expert_E: Tensor, *, num_ranks: int, top_k: int) -> Tensor:
    """int32 ``[K, T]``: the rank that holds the expert of each slot, W where it has none.

    ``slot_ids_S``  slots sorted by expert, those without one last; rank w has experts ``w*e .. w*e + e - 1``

    Example: slots [3, 0, 1, 2], K=2, one expert on each rank, with tokens [1, 2], gives [[1, 2], [1, 0]].
    """
    ends_W = tokens_per_expert_E.view(num_ranks, -1).sum(dim=1).cumsum(0)
    order_S = torch.arange(slot_ids_S.numel(), device=slot_ids_S.device)
    rank_S = torch.searchsorted(ends_W, order_S, right=True, out_int32=True)
    rank_S = torch.empty_like(rank_S).scatter_(0, slot_ids_S.long(), rank_S)
    return rank_S.view(-1, top_k).t().contiguous()


def _earlier_slots(top_k: int, device: torch.device) -> Tensor:
    """bool ``[K, K, 1]``: at ``[k, j]`` whether slot j of a token comes before its slot k."""
    return torch.ones(top_k, top_k, dtype=torch.bool, device=device).tril(-1)[:, :, None]


def choose_pilots(rank_KT: Tensor, ranks: RankMap) -> Tensor:
    """int32 ``[K, T]``: the rank each slot's row goes to first, its pilot where its expert is on another node.

    Any GPU of a remote node that holds one of the token's experts saves a copy inside the node, so the choice is free
    to even out what the node's GPUs receive. Every GPU has a weight, and a token draws among its candidates by their
    weights, from a low-discrepancy sequence in place of chance. The weights then follow the loads they led to, in a
    few rounds.

    Example: ranks [[2], [3], [0]], nodes of two ranks, own node 0: both remote slots get 2, or both get 3.
    """
    top_k, num_tokens = rank_KT.shape
    node_KT = ranks.node_of_rank_W1[rank_KT]
    is_remote_KT = (rank_KT < ranks.num_ranks) & (node_KT != ranks.own_node)
    together_KKT = (node_KT[:, None] == node_KT) & is_remote_KT
    earlier_KK1 = _earlier_slots(top_k, rank_KT.device)
    before_KKT = together_KKT & earlier_KK1
    repeats_KT = ((rank_KT[:, None] == rank_KT) & earlier_KK1).any(dim=1)
    is_candidate_KT = is_remote_KT & ~repeats_KT
    candidate_KT = torch.where(is_candidate_KT, rank_KT, 0).long()
    dial_T = torch.arange(num_tokens, device=rank_KT.device) * GOLDEN % 2**BITS

    def draw(weight_W: Tensor) -> Tensor:
        weight_KT = weight_W.to(torch.int32)[candidate_KT] * is_candidate_KT
        before_KT = (before_KKT * weight_KT).sum(dim=1, dtype=torch.int32)
        point_KT = dial_T * (together_KKT * weight_KT).sum(dim=1, dtype=torch.int32) >> BITS
        return is_candidate_KT & (before_KT <= point_KT) & (point_KT < before_KT + weight_KT)

    weight_W = torch.full_like(ranks.node_of_rank_W1[:-1], FIRST_WEIGHT)
    chosen_KT = draw(weight_W)
    for power in POWERS:
        load_W = torch.zeros_like(weight_W).scatter_add_(0, candidate_KT.view(-1), chosen_KT.view(-1).long())
        weight_W = _follow(weight_W, load_W, ranks, power=power)
        chosen_KT = draw(weight_W)
    pilot_KT = (together_KKT * torch.where(chosen_KT, rank_KT, 0)).sum(dim=1, dtype=torch.int32)
    return torch.where(is_remote_KT, pilot_KT, rank_KT)


def _follow(weight_W: Tensor, load_W: Tensor, ranks: RankMap, *, power: int) -> Tensor:
    """Weights times their node's mean load over their own: who got more than its share draws less."""
    mean_W = load_W[ranks.neighbours_WP].sum(dim=1) // ranks.num_places
    weight_W = weight_W * (mean_W + 1) ** power // (load_W + 1) ** power
    return weight_W.clamp_(1, MAX_WEIGHT)


def share_rows(rank_KT: Tensor, hop_KT: Tensor, ranks: RankMap) -> SharedRows:
    """Which slots of each token share rows of the first and of the second hop.

    Example: nodes of two ranks, own node 0, both levels, one token with ranks [3, 1, 2] and pilot 3: its slots lead
    first-hop rows to [3, 1, none], and the last one a second-hop row from rank 3 to its neighbour at place 0.
    """
    top_k = rank_KT.shape[0]
    kept_KT, second_KT = rank_KT < ranks.num_ranks, rank_KT != hop_KT
    earlier_KK1 = _earlier_slots(top_k, rank_KT.device)
    same_hop_KKT = (hop_KT[:, None] == hop_KT) & earlier_KK1
    # Whether slot k shares its first row, its second row, its last row with slot j before it: [k, j, T].
    if ranks.per_gpu:
        first_KKT = kept_KT[:, None] & same_hop_KKT
    elif ranks.per_node:
        first_KKT = (kept_KT & (ranks.node_of_rank_W1[rank_KT] != ranks.own_node))[:, None] & same_hop_KKT
    else:
        first_KKT = torch.zeros_like(same_hop_KKT)
    leads_KT, leader_KT = _leaders(first_KKT)
    first_KT = torch.where(kept_KT & leads_KT, hop_KT, -1)
    if not ranks.num_places:
        return SharedRows(
            first_ids_TK=first_KT.t().contiguous(),
            second_ids_TK=torch.full_like(first_KT, -1).t().contiguous(),
            leader_KT=leader_KT,
            last_leader_KT=leader_KT,
            nth_KT=first_KKT.sum(dim=1, dtype=torch.int32),
        )
    last_KKT = first_KKT & (second_KT[:, None] == second_KT)
    last_KKT &= rank_KT[:, None] == rank_KT if ranks.per_gpu else ~second_KT
    leads_last_KT, last_leader_KT = _leaders(last_KKT)
    way_KT = hop_KT * ranks.num_places + ranks.place_of_rank_W1[rank_KT]
    return SharedRows(
        first_ids_TK=first_KT.t().contiguous(),
        second_ids_TK=torch.where(second_KT & leads_last_KT, way_KT, -1).t().to(torch.int32).contiguous(),
        leader_KT=leader_KT,
        last_leader_KT=torch.where(second_KT, last_leader_KT, leader_KT),
        nth_KT=last_KKT.sum(dim=1, dtype=torch.int32),
    )


def _leaders(follows_KKT: Tensor) -> tuple[Tensor, Tensor]:
    """bool and int32 ``[K, T]``: which slots lead, and each one's leader, where slot k follows slots j before it."""
    slots_K1 = torch.arange(follows_KKT.shape[0], dtype=torch.int32, device=follows_KKT.device)[:, None]
    # Sums, as torch reduces sums along this dimension ten times faster on a CPU than minima.
    leads_KT = follows_KKT.sum(dim=1) == 0
    leader_KT = ((follows_KKT & leads_KT) * slots_K1).sum(dim=1, dtype=torch.int32)
    return leads_KT, torch.where(leads_KT, slots_K1, leader_KT)


def row_references(routes: Routes, starts: MessageStarts, ranks: RankMap, *, num_local: int) -> tuple[Tensor, Tensor]:
    """Which rows are passed on, and which rows serve the assignments, as their ranks number them: two int32 ``[T*K]``.

    ``passed_on_S``  for each row of the second hop, by pilot, then rank: ``row * width + n``, ``row`` being its place
                     among the rows this rank sends that pilot, n >= 1 its place among that row's copies
    ``served_S``     for each assignment, by expert, then slot: ``row * width + n``, ``row`` being its row's place
                     among those of this rank's tokens that reach its rank, n >= 0 its place in that row

    A rank numbers the rows of one source: those of the first hop, then those each neighbour passes on. Entries past
    the last row and the last assignment mean nothing.
    """
    shared, (top_k, num_tokens) = routes.shared, routes.rank_KT.shape
    rank_KT, hop_KT = (x.clamp(max=ranks.num_ranks - 1) for x in (routes.rank_KT, routes.hop_KT))
    row_KT = routes.first_places_S.view(num_tokens, top_k).t().gather(0, shared.leader_KT.long())
    row_KT = row_KT - starts.by_column_WC[:, 0][hop_KT]
    passed_on_S = routes.second_places_S
    if ranks.num_places:
        place_KT, own_place_KT = ranks.place_of_rank_W1[rank_KT], ranks.place_of_rank_W1[hop_KT]
        second_KT = routes.second_places_S.view(num_tokens, top_k).t().gather(0, shared.last_leader_KT.long())
        second_KT = second_KT - starts.by_rank_WC[hop_KT, 1 + place_KT]
        second_KT = second_KT + starts.by_rank_WC[rank_KT, 1 + ranks.num_places + own_place_KT]
        # The copies of one row: all that its pilot makes of it, itself the first.
        second_ids_KT = shared.second_ids_TK.t()
        copies_KKT = (hop_KT[:, None] == hop_KT) & (second_ids_KT >= 0) & _earlier_slots(top_k, hop_KT.device)
        copied_KT = row_KT * ranks.passing_width(top_k) + 1 + copies_KKT.sum(dim=1, dtype=torch.int32)
        passed_on_S = _placed(copied_KT, routes.second_places_S)
        row_KT = torch.where(rank_KT != hop_KT, second_KT, row_KT)
    served_KT = row_KT * ranks.serving_width(top_k, num_local) + shared.nth_KT
    return passed_on_S, _placed(served_KT, routes.places_S)


def _placed(values_KT: Tensor, places_S: Tensor) -> Tensor:
    """int32 ``[T*K]``: each slot's value at its place."""
    values_S = values_KT.t().reshape(-1).to(torch.int32)
    return torch.empty_like(values_S).scatter_(0, places_S.long(), values_S)
