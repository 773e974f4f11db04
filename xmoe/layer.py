"""The mixture-of-experts layer proper. It knows no DeepSpeed: ``xmoe.MoE`` is an adapter around it.

Read ``forward`` from top to bottom: it is the layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .dispatch.base import Dispatcher
from .dispatch.local import LocalDispatcher
from .dispatch.tensor_parallel import SharedTokens
from .experts import Experts, Prepared
from .ops._backend import KernelChoice, use_kernels
from .ops.clock import StageClock, timed, timed_run, use_clock
from .ops.dropout import own_dropout
from .ops.overlap import Pausing, overlapped
from .permute import permute, split_tokens
from .replay import Decisions, decisions_for
from .router import TopKRouter
from .sequence_shard import SequenceShard, TokenSplit
from .types import ExpertPlan, Routing, TokenBuffer, Traffic


@dataclass
class LoadCounters:
    """What a layer did since its counters were last taken; moved once for each token, never by a recompute.

    ``selected_E``, ``routed_E``  int64 on the layer's device: selections before and after the capacity drop
    ``computed_rows``             expert rows computed on this rank, forward
    ``all_to_all_bytes``          bytes of rows that left this rank, or will in backward
    ``between_nodes_bytes``       those of them that left its node
    ``to_self_bytes``             bytes of rows that stayed, counted alike
    ``traffic``                   rows of dispatch in forward, by the links they took
    """

    selected_E: Tensor
    routed_E: Tensor
    computed_rows: int = 0
    all_to_all_bytes: int = 0
    between_nodes_bytes: int = 0
    to_self_bytes: int = 0
    traffic: Traffic = field(default_factory=Traffic)


class RoutedMLP(nn.Module):
    """Top-k routed experts, with optional shared experts that see every token.

    ``gate`` and ``experts`` are built by the caller; ``dispatcher`` defaults to the local one and is replaced by
    :meth:`set_dispatcher` once the ranks' groups exist. ``shared_mlp`` maps ``[..., D]`` to ``[..., D]`` and leaves its
    input as it is, as it runs while tokens are still to be sent;
    ``shared_gate`` (``nn.Linear(D, 1)``) scales it by a sigmoid.

    ``clock``               seconds of the layer's stages; off until its ``enabled`` is set
    ``kernels``             what computes: Triton kernels, their PyTorch twins, or what suits the device
    ``zero_routed_output``  for ablation: the routed experts' sum is replaced by zeros
    """

    def __init__(
        self,
        gate: TopKRouter,
        experts: Experts,
        *,
        dispatcher: Dispatcher | None = None,
        shared_mlp: nn.Module | None = None,
        shared_gate: nn.Linear | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.gate = gate
        self.experts = experts
        self.shared_mlp = shared_mlp
        self.shared_gate = shared_gate
        self.set_dispatcher(dispatcher if dispatcher is not None else LocalDispatcher())
        self.sequence_shard: SequenceShard | None = None
        self.kernels: KernelChoice = "auto"
        self.clock = StageClock()
        self.zero_routed_output = False
        self.counters = self._fresh_counters()

    def set_dispatcher(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        # This rank's place among those whose tokens it shares, and None where nobody has the same.
        self._place = dispatcher.rank if isinstance(dispatcher, SharedTokens) else None

    def set_sequence_shard(self, shard: SequenceShard | None) -> None:
        """From now on this rank computes its slice of the tokens, or, with None, all that it is given."""
        self.sequence_shard = shard

    @torch.compiler.disable(recursive=True)
    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """``(output, aux_loss, selected_per_expert)`` for ``hidden_states`` of shape ``[..., D]``.

        For a loss per sequence the last dimension but one runs over the tokens of a sequence.
        ``used_token`` ``[...]`` (or flat): tokens that are 0 or False there take no routed expert. Any number of
        tokens works, none too, and may differ from rank to rank; every rank of the group must make the call. Under a
        sequence shard its ranks give the same tokens and get the same results, loss and selections.
        """
        decide = decisions_for(self)
        num_sequences = math.prod(hidden_states.shape[:-2])
        split = self._split(hidden_states, num_sequences)
        with use_kernels(self.kernels), use_clock(self.clock):
            own, used = split.own(hidden_states), split.own_mask(used_token)
            x_TD = own.reshape(-1, own.shape[-1])
            with timed("route", x_TD.device):
                routing = split.call(self.gate, x_TD, used, num_sequences=num_sequences, decide=decide, split=split)
            with timed("plan", x_TD.device):
                buffers = permute(routing, decide=decide, num_chunks=self.dispatcher.num_chunks)
                plans = decide(lambda: self.dispatcher.plan(buffers))
            prepared = self.experts.prepare(x_TD.device.type, num_calls=len(plans), decide=decide)
            chunks = zip(split_tokens(x_TD, [b.num_tokens for b in buffers]), buffers, plans, strict=True)
            outs, shared = overlapped(
                [self._through_experts(*chunk, prepared=prepared) for chunk in chunks],
                meanwhile=lambda: self._shared(own, split),
            )
            output = (outs[0] if len(outs) == 1 else torch.cat(outs)).view_as(own)
            if self.zero_routed_output:
                output = output * 0.0
            output = split.whole(output if shared is None else output + shared, hidden_states)
        self._count(routing, plans, decide, x_TD=x_TD, out_TD=outs[0])
        return output, routing.aux_loss, routing.selected_by_batch_E

    def _through_experts(
        self, x_TD: Tensor, buffer: TokenBuffer, plan: ExpertPlan, *, prepared: Prepared
    ) -> Pausing[Tensor]:
        """``[T, D]``: the routed experts' sum for each token of one chunk. Pauses while its rows are under way."""
        rows = yield from timed_run("dispatch", self.dispatcher.dispatch(x_TD, buffer, plan), x_TD.device)
        with timed("experts", x_TD.device), self._own_dropout(prepared, x_TD.device):
            homeward = self.dispatcher.combine(self.experts(rows, plan, prepared), buffer, plan)
        del rows  # on the way home nothing here holds them or their results: autograd does, where it needs them
        return (yield from timed_run("combine", homeward, x_TD.device))

    def _own_dropout(self, prepared: Prepared, device: torch.device) -> AbstractContextManager[None]:
        """Where other ranks have the same tokens, experts draw from a stream by rank. Fused ones draw nothing."""
        place = self._place if self.sequence_shard is None else self.sequence_shard.rank
        return own_dropout(self.experts, place if prepared.weights is None else None, device)

    def _split(self, hidden_states: Tensor, num_sequences: int) -> TokenSplit:
        if self.sequence_shard is None:
            return TokenSplit()
        modules = [module for module in (self.gate, self.shared_mlp, self.shared_gate) if module is not None]
        num_parts = self.gate.num_parts(num_sequences)
        return self.sequence_shard.split(hidden_states, num_parts=num_parts, modules=modules)

    def _shared(self, own: Tensor, split: TokenSplit) -> Tensor | None:
        """The shared experts' output for ``own``; None where there are none."""
        if self.shared_mlp is None:
            return None
        with timed("shared_experts", own.device):
            shared: Tensor | tuple[Tensor, ...] = split.call(self.shared_mlp, own)
            shared = shared[0] if isinstance(shared, tuple) else shared
            return shared if self.shared_gate is None else shared * split.call(self.shared_gate, own).sigmoid()

    def _fresh_counters(self) -> LoadCounters:
        zeros_E = torch.zeros_like(self.gate.step_counts)
        return LoadCounters(selected_E=zeros_E, routed_E=zeros_E.clone())

    def _count(
        self, routing: Routing, plans: Sequence[ExpertPlan], decide: Decisions, *, x_TD: Tensor, out_TD: Tensor
    ) -> None:
        if decide.replaying or not self.gate.trains(decide):
            return
        self.gate.count_step(routing.selected_by_batch_E)
        counters = self.counters
        counters.selected_E = counters.selected_E + routing.selected_per_expert_E
        counters.routed_E = counters.routed_E + routing.tokens_per_expert_E
        counters.computed_rows += sum(plan.num_computed for plan in plans)
        traffic = sum((self.dispatcher.traffic(plan) for plan in plans), start=Traffic())
        counters.traffic = counters.traffic + traffic
        sent_bytes, received_bytes = _row_bytes(x_TD, out_TD)
        between = traffic.between_nodes * sent_bytes + traffic.received_between_nodes * received_bytes
        inside = traffic.inside_node * sent_bytes + traffic.received_inside_node * received_bytes
        counters.all_to_all_bytes += inside + between
        counters.between_nodes_bytes += between
        counters.to_self_bytes += traffic.to_self * (sent_bytes + received_bytes)

    def take_counters(self) -> LoadCounters:
        """The counters since the last call, which starts them anew."""
        taken, self.counters = self.counters, self._fresh_counters()
        return taken


def _row_bytes(x_TD: Tensor, out_TD: Tensor) -> tuple[int, int]:
    """Bytes that leave a rank in a training step for each row that it sends in dispatch, and for each that it receives.

    Sent rows leave it in dispatch and in combine's backward, received ones in combine and in dispatch's backward, which
    has nothing to do where ``x_TD`` has no gradient. Results have their own dtype, under autocast another than x.
    """
    x_bytes, out_bytes = (row.shape[1] * row.element_size() for row in (x_TD, out_TD))
    recomputed = not torch.is_grad_enabled()  # a checkpoint's first run, which leaves gradients to the second
    return (
        x_bytes + (out_bytes if recomputed or out_TD.requires_grad else 0),
        out_bytes + (x_bytes if recomputed or x_TD.requires_grad else 0),
    )
