"""What one optimizer step measured, summed over the ranks by one all-reduce that also carries the stop flag."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from xmoe.metrics import LayerLoad, Traffic

_NUM_SCALARS = 8


@dataclass(frozen=True, kw_only=True)
class LocalStep:
    """One rank's part of a step.

    ``loss_sum_nats``   sum over micro-batches of the mean cross-entropy
    ``aux_loss_sum``    sum over micro-batches of the summed auxiliary losses
    ``num_micro_batches``  micro-batches summed
    ``num_tokens``      tokens trained on, counted by one of the ranks that share them
    ``loads``           one entry per MoE layer, in the same order on every rank
    ``stop``            this rank was asked to stop
    """

    loss_sum_nats: float
    aux_loss_sum: float
    num_micro_batches: int
    num_tokens: int
    loads: Sequence[LayerLoad]
    stop: bool


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The step as all ranks saw it; sums run over ranks and micro-batches.

    ``loss_nats``, ``aux_loss``  means over ranks and micro-batches
    ``num_tokens``          tokens trained on
    ``computed_rows``       expert rows really computed, forward
    ``all_to_all_bytes``    bytes that ranks sent to other ranks, forward and backward as the layers count them
    ``between_nodes_bytes`` those of them that went to other nodes
    ``traffic``             rows of dispatch in forward, by the links they took, over all layers
    ``received_W``          int64; of them, the rows that each rank received from others
    ``layers``              names of the MoE layers
    ``selected_LE``         int64 ``[layers, E]``; slots that selected each expert
    ``routed_LE``           int64 ``[layers, E]``; slots left after the capacity drop
    ``stop``                at least one rank was asked to stop
    """

    loss_nats: float
    aux_loss: float
    num_tokens: int
    computed_rows: int
    all_to_all_bytes: int
    between_nodes_bytes: int
    traffic: Traffic
    received_W: Tensor
    layers: tuple[str, ...]
    selected_LE: Tensor
    routed_LE: Tensor
    stop: bool

    @property
    def loss_bits(self) -> float:
        """Cross-entropy in bits per token."""
        return self.loss_nats / math.log(2)

    @property
    def dropped_share(self) -> float:
        """Share of the selected slots that capacity dropped."""
        selected = int(self.selected_LE.sum())
        return 1.0 - int(self.routed_LE.sum()) / selected if selected else 0.0

    @property
    def load_cv(self) -> float:
        """Coefficient of variation (standard deviation over mean) of the experts' load, mean over the layers."""
        if not self.layers:
            return 0.0
        loads_LE = self.selected_LE.double()
        mean_L = loads_LE.mean(dim=1).clamp(min=1e-30)
        return float((loads_LE.std(dim=1, correction=0) / mean_L).mean())

    @property
    def busiest_receiver(self) -> float:
        """Rows that the busiest rank received, over the ranks' mean; 1 where none were sent."""
        total = int(self.received_W.sum())
        return int(self.received_W.max()) * self.received_W.numel() / total if total else 1.0

    @property
    def num_dead_experts(self) -> int:
        """Experts over all layers that no token selected in this step."""
        return int((self.selected_LE == 0).sum())


def reduce_step(local: LocalStep, device: torch.device) -> StepMetrics:
    """Sums the ranks' parts. Collective: every rank calls it once per step.

    One float64 vector holds everything; counts stay exact below 2**53.
    """
    num_layers = len(local.loads)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    traffic = sum((load.traffic for load in local.loads), start=Traffic())
    scalars = [
        float(local.stop),
        local.loss_sum_nats,
        local.aux_loss_sum,
        local.num_micro_batches,
        local.num_tokens,
        sum(load.computed_rows for load in local.loads),
        sum(load.all_to_all_bytes for load in local.loads),
        sum(load.between_nodes_bytes for load in local.loads),
    ]
    rows = [*astuple(traffic), *(traffic.received if other == rank else 0 for other in range(world))]
    counts = [counts_E for load in local.loads for counts_E in (load.selected_E, load.routed_E)]
    vector = torch.cat(
        [
            torch.tensor([*scalars, *rows], dtype=torch.float64, device=device),
            *(c.to(device, torch.float64) for c in counts),
        ]
    )
    if dist.is_initialized():
        dist.all_reduce(vector)
    vector = vector.cpu()
    stop, loss_sum, aux_loss_sum, num_micro_batches, *whole = vector[:_NUM_SCALARS].tolist()
    num_tokens, computed_rows, all_to_all_bytes, between_nodes_bytes = (round(value) for value in whole)
    rows_of_all, received_W, counts_S = (
        vector[_NUM_SCALARS:].round().long().tensor_split([len(rows) - world, len(rows)])
    )
    counts_L2E = counts_S.view(num_layers, 2, -1) if num_layers else torch.zeros(0, 2, 0).long()
    return StepMetrics(
        loss_nats=loss_sum / max(num_micro_batches, 1),
        aux_loss=aux_loss_sum / max(num_micro_batches, 1),
        num_tokens=num_tokens,
        computed_rows=computed_rows,
        all_to_all_bytes=all_to_all_bytes,
        between_nodes_bytes=between_nodes_bytes,
        traffic=Traffic(*rows_of_all.tolist()),
        received_W=received_W,
        layers=tuple(load.name.removesuffix(".deepspeed_moe") for load in local.loads),
        selected_LE=counts_L2E[:, 0],
        routed_LE=counts_L2E[:, 1],
        stop=stop > 0,
    )
