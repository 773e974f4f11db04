"""The contestants of bench_dispatch.py: dispatch and combine of the same rows by the same ranks.

flat                    xmoe: one row for each (token, expert)
gpu, node, node+gpu     xmoe: a token once for each destination GPU, once for each node, or once for each of both
piper                   xmoe's flat rows, exchanged in phases after Piper's HALO (``dispatch_phased``)
deepspeed               deepspeed.moe's exchange: every expert padded to the largest load, so that nothing is dropped
autoep                  the exchange of DeepSpeed's AutoEP: one row for each (token, expert)

An expert multiplies its rows by a number of its own: a row at the wrong expert shows, and no time goes to products.
Every contestant starts from selected experts and weights and ends with the sum of each token's results; what it needs
to know of the other ranks it exchanges anew each time, as a layer does. The peers call DeepSpeed's own functions.
AutoEP's permutation of received rows by local expert is left out: its experts need it, an exchange does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import _AllToAllV, combine_from_routed, compute_split_plan
from deepspeed.moe.sharded_moe import _AllToAll, _route_slots, _sparse_decode, _sparse_encode
from dispatch_phased import PhasedDispatcher
from torch import Tensor

from xmoe.dispatch.base import Dispatcher
from xmoe.dispatch.make import make_dispatcher, node_layout
from xmoe.ops.collectives import Exchange
from xmoe.ops.overlap import to_end
from xmoe.permute import permute
from xmoe.types import Routing, Traffic

Exchanger = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x_TD, topk_ids_TK, weights_TK) -> out_TD


def expert_scales(num_experts: int) -> Tensor:
    """What each expert multiplies by: all different, and exact in bfloat16 up to 128 experts."""
    return 1.0 + torch.arange(num_experts, dtype=torch.float32) / 128


class Ours:
    """A dispatcher of xmoe, from a routing as the layer's router gives it."""

    def __init__(self, dispatcher: Dispatcher, scales_e: Tensor, num_experts: int) -> None:
        self.dispatcher = dispatcher
        self.scales_e = scales_e
        self.num_experts = num_experts
        self.traffic: Traffic  # of the last call

    def __call__(self, x_TD: Tensor, topk_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        counts_E = torch.zeros(self.num_experts, dtype=torch.int64)
        counts_E.index_add_(0, topk_ids_TK.reshape(-1), counts_E.new_ones(topk_ids_TK.numel()))
        routing = Routing(
            topk_ids_TK=topk_ids_TK,
            topk_weights_TK=weights_TK,
            selected_per_expert_E=counts_E,
            tokens_per_expert_E=counts_E,
            aux_loss=weights_TK.new_zeros(()),
        )
        (buffer,) = buffers = permute(routing, decide=lambda decision: decision())
        (plan,) = self.dispatcher.plan(buffers)
        self.traffic = self.dispatcher.traffic(plan)
        rows = to_end(self.dispatcher.dispatch(x_TD, buffer, plan))
        scales_M = torch.repeat_interleave(self.scales_e, plan.counts_e, output_size=plan.row_ids_M.numel())
        factors_R = rows.weights_M.new_zeros(rows.x_RD.shape[0])
        factors_R = factors_R.index_add(0, plan.row_ids_M, rows.weights_M * scales_M)
        y_RD = rows.x_RD * factors_R[:, None].to(rows.x_RD.dtype)
        return to_end(self.dispatcher.combine(y_RD, buffer, plan))


class DeepSpeed:
    """``deepspeed.moe.sharded_moe.MOELayer`` with ``drop_tokens=False``, less its gate and experts."""

    def __init__(self, scales_e: Tensor, num_experts: int) -> None:
        self.scales_e = scales_e
        self.num_experts = num_experts

    def __call__(self, x_TD: Tensor, topk_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        num_tokens, width = x_TD.shape
        mask_TE = torch.zeros(num_tokens, self.num_experts, dtype=torch.bool).scatter_(1, topk_ids_TK.long(), True)
        capacity = mask_TE.sum(dim=0).max()
        deepspeed.comm.all_reduce(capacity, op=deepspeed.comm.ReduceOp.MAX, group=dist.group.WORLD)
        locations_TK = (mask_TE.cumsum(dim=0) - 1).gather(1, topk_ids_TK.long())
        C, E, e = int(capacity), self.num_experts, self.scales_e.numel()
        slots_KT = _route_slots(topk_ids_TK.t(), locations_TK.t(), E, C)
        x_ECD = _AllToAll.apply(dist.group.WORLD, _sparse_encode(x_TD, slots_KT, E, C))
        y_WeCD = x_ECD.view(-1, e, C, width) * self.scales_e[:, None, None].to(x_TD.dtype)
        y_ECD = _AllToAll.apply(dist.group.WORLD, y_WeCD.view(E, C, width))
        return _sparse_decode(y_ECD.view(E * C, width), slots_KT, weights_TK.t(), num_tokens)


class AutoEP:
    """``AutoEPMoELayer`` with its defaults, less its router, experts and local permutation."""

    def __init__(self, scales_e: Tensor, num_experts: int) -> None:
        self.scales_e = scales_e
        self.num_experts = num_experts

    def __call__(self, x_TD: Tensor, topk_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        num_tokens, top_k = topk_ids_TK.shape
        group, num_local = dist.group.WORLD, self.scales_e.numel()
        order_N = torch.argsort(topk_ids_TK.reshape(-1), stable=True)
        rows_ND = x_TD[order_N // top_k]
        plan = compute_split_plan(topk_ids_TK, self.num_experts, self.num_experts // num_local, num_local, group)
        x_RD = _AllToAllV.apply(group, rows_ND, plan.input_splits, plan.output_splits)
        counts_We = plan.local_counts_by_source
        scales_R = torch.repeat_interleave(
            self.scales_e.repeat(counts_We.shape[0]), counts_We.reshape(-1), output_size=x_RD.shape[0]
        )
        y_RD = x_RD * scales_R[:, None].to(x_RD.dtype)
        y_ND = _AllToAllV.apply(group, y_RD, plan.output_splits, plan.input_splits)
        shape = (1, num_tokens, x_TD.shape[1])
        return combine_from_routed(y_ND, weights_TK, order_N, top_k, "post", "weighted_sum", shape)[0]


PEERS = {"deepspeed": DeepSpeed, "autoep": AutoEP}


def build(names: Sequence[str], num_experts: int, timeout_s: float) -> dict[str, Exchanger]:
    """These contestants on this rank over the group of all ranks, whose nodes are told by their host names."""
    num_local = num_experts // dist.get_world_size()
    first = dist.get_rank() * num_local
    scales_e = expert_scales(num_experts)[first : first + num_local]
    exchange = Exchange(group=dist.group.WORLD, label="bench_dispatch", timeout_s=timeout_s)
    made: dict[str, Exchanger] = {}
    for name in names:
        if name in PEERS:
            made[name] = PEERS[name](scales_e, num_experts)
        else:
            if name == "piper":
                dispatcher = PhasedDispatcher(exchange, node_layout(exchange.group, None, equal=True))
            else:
                dispatcher = make_dispatcher(name, exchange, ranks_per_node=None, device=torch.device("cpu"))
            made[name] = Ours(dispatcher, scales_e, num_experts)
    return made
