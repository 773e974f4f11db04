"""The data that flows through one mixture-of-experts layer.

    router -> Routing -> permute -> TokenBuffer -> dispatcher.plan -> ExpertPlan
           -> dispatch -> Rows -> experts -> combine

Every arrow makes one new frozen object; nothing is mutated. A plan is made once per forward, is used by
dispatch, combine and both backwards, and is replayed when activation checkpointing runs the layer again.
A layer that overlaps its exchanges with its experts cuts the tokens into chunks: each has a buffer, a plan and rows of
its own, and all plans are made at once.

Legend of the shape suffixes (capitals are whole dimensions, small letters one rank's part):

    T  tokens on this rank               D  model width (hidden size)
    E  experts of the layer (logical)    F  expert width (intermediate size)
    e  experts on this rank              K  experts selected per token (top-k)
    N  routed assignments of this rank's tokens: T*K less the dropped and the masked
    M  assignments computed on this rank, sorted by local expert
    R  rows held on this rank while its experts run
    W  ranks in the expert-parallel group

A *slot* is one selected assignment: slot ``t*K + k`` is the k-th choice of token t. A slot whose expert id is
-1 was dropped (capacity) or masked (padding) and takes part in nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What the router decided for T tokens.

    ``topk_ids_TK``            int32; logical expert of each slot, -1 where dropped or masked
    ``topk_weights_TK``        float32 (float64 in a float64 model) with gradient; combine weight of each slot, 0
                               where dropped or masked
    ``selected_per_expert_E``  int64; slots that selected each expert, before any capacity drop
    ``selected_by_all_E``      int64; the same of all ranks that share one batch of tokens (``xmoe.sequence_shard``);
                               None where this rank has all of it
    ``tokens_per_expert_E``    int64; slots kept: ``tokens_per_expert_E[x] == (topk_ids_TK == x).sum()``
    ``aux_loss``               scalar of the weights' dtype, with gradient: the weighted auxiliary losses
    """

    topk_ids_TK: Tensor
    topk_weights_TK: Tensor
    selected_per_expert_E: Tensor
    tokens_per_expert_E: Tensor
    aux_loss: Tensor
    selected_by_all_E: Tensor | None = None

    @property
    def selected_by_batch_E(self) -> Tensor:
        """Selections by all tokens of the batch, whichever rank's."""
        return self.selected_per_expert_E if self.selected_by_all_E is None else self.selected_by_all_E

    def __post_init__(self) -> None:
        assert self.topk_ids_TK.shape == self.topk_weights_TK.shape
        assert self.topk_weights_TK.dtype in (torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class TokenBuffer:
    """Padding-free token buffer: the kept slots in expert order, as indices. No row is copied to make it.

    ``slot_ids_S``           int32 ``[T*K]``; slots sorted by expert, ties by slot. The first N entries are the
                             kept slots; dropped slots follow. N is known on the host only after ``plan``.
    ``places_S``             int32 ``[T*K]``; the inverse, ``slot_ids_S[places_S[s]] == s``: the kept slots are those
                             with a place below N
    ``combine_weights_S``    float32 ``[T*K]`` with gradient: ``topk_weights_TK.flatten()[slot_ids_S]``
    ``tokens_per_expert_E``  int64; ``sum == N``
    ``num_tokens``           T
    ``top_k``                K; the token of slot s is ``s // K``

    Example: K=2, ids [[1, -1], [1, 0]] gives slot_ids_S [3, 0, 2, 1], places_S [1, 3, 2, 0], tokens_per_expert_E
    [1, 2].
    """

    slot_ids_S: Tensor
    places_S: Tensor
    combine_weights_S: Tensor
    tokens_per_expert_E: Tensor
    num_tokens: int
    top_k: int

    def __post_init__(self) -> None:
        num_slots = self.num_tokens * self.top_k
        assert self.slot_ids_S.numel() == self.places_S.numel() == self.combine_weights_S.numel() == num_slots


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """What a rank's experts compute, decided once per forward: the part of every dispatcher's plan that they read.

    Nothing else is needed where nothing is sent: rows are then the tokens themselves, R = T, and an assignment's row is
    the token of its slot: ``assignments_RK`` are the places of a token's slots, those of dropped slots being M or more.

    ``row_ids_M``       int32; received row of each assignment, assignments sorted by local expert
    ``assignments_RK``  int32; the assignments of each row: ``row_ids_M[assignments_RK[r, k]] == r`` for every entry
                        in ``[0, M)``, each m occurs once, and entries outside are none. At most K to a row
    ``counts_e``        int64 on the device; assignments of each local expert, ``sum == M``
    ``tokens_per_local_expert`` the same e integers on the host
    """

    row_ids_M: Tensor
    assignments_RK: Tensor
    counts_e: Tensor
    tokens_per_local_expert: list[int]

    @property
    def num_computed(self) -> int:
        """M, assignments computed on this rank."""
        return sum(self.tokens_per_local_expert)


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One exchange of copies of the rows that lie here; on the way home, what came of them is summed here.

    ``slot_ids_N``   int32; row n sent is a copy of row ``slot_ids[n] // width``, the rows being in order of ranks
    ``places_TK``    int32 ``[rows here, width]``; what sums to each row on the way home, by place among what lies
                     here then: of a first hop the N rows that came back, of a second the R1 results computed here, then
                     the N that came back. Entries outside are none
    ``send_splits``, ``recv_splits``  rows to and from each rank of the hop's group
    """

    slot_ids_N: Tensor
    places_TK: Tensor
    send_splits: list[int]
    recv_splits: list[int]


@dataclass(frozen=True, kw_only=True)
class DispatchPlan(ExpertPlan):
    """Where every row goes, in one hop or two, and every weight, which goes straight to its expert's rank.

    ``first``, ``second``  the hops. The second leads on from the rows the first one brought, and is None where they
                           have arrived. Rows of the first lie before those of the second
    ``weight_splits_sent``, ``weight_splits_received``  assignments of each rank's experts and tokens: sums N and M
    ``weight_ids_M``       int32; received weight of each assignment
    """

    first: Hop
    second: Hop | None
    weight_splits_sent: list[int]
    weight_splits_received: list[int]
    weight_ids_M: Tensor

    @property
    def num_assigned(self) -> int:
        """N, kept slots of this rank's tokens."""
        return sum(self.weight_splits_sent)

    @property
    def num_arrived(self) -> int:
        """R, rows on this rank at the end."""
        return sum(self.first.recv_splits) + (sum(self.second.recv_splits) if self.second is not None else 0)


@dataclass(frozen=True)
class Traffic:
    """Rows that one direction of a forward moves, as one rank sees it, from its plan's numbers on the host.

    ``to_self``, ``inside_node``, ``between_nodes``  rows this rank sends, by the links they take, all hops together
    ``received_inside_node``, ``received_between_nodes``  rows it receives from other ranks
    ``assigned``          N, rows that one for each of its tokens' assignments would be
    ``assigned_remote``   those of them whose expert is on another node

    Where nodes are not known each rank is taken to be one.
    """

    to_self: int = 0
    inside_node: int = 0
    between_nodes: int = 0
    received_inside_node: int = 0
    received_between_nodes: int = 0
    assigned: int = 0
    assigned_remote: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})

    @property
    def received(self) -> int:
        """Rows from other ranks."""
        return self.received_inside_node + self.received_between_nodes

    @property
    def redundancy(self) -> float:
        """Share of the rows between nodes that one for each assignment would send and this dispatch did not."""
        return 1.0 - self.between_nodes / self.assigned_remote if self.assigned_remote else 0.0


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a rank's experts compute: ``y[r] = sum over assignments m with row r of weight_m * mlp_m(x[r])``.

    ``x_RD``       rows in the model's dtype, with gradient
    ``weights_M``  float32 with gradient; combine weight of each assignment, in the order of ``row_ids_M``
    """

    x_RD: Tensor
    weights_M: Tensor
