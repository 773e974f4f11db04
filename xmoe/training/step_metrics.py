"""What one optimizer step measured, summed over the ranks by one all-reduce that also carries the stop flag.

Where stages are timed a second one finds the slowest rank of each stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from xmoe.metrics import STAGE_TIMES, LayerLoad, Traffic

_NUM_SCALARS = 5
_NUM_TRAFFIC = len(fields(Traffic))
_NUM_COUNTS = 4 + _NUM_TRAFFIC


@dataclass(frozen=True, kw_only=True)
class LocalStep:
    """One rank's part of a step.

    ``loss_sum_nats``   sum over micro-batches of the mean cross-entropy
    ``aux_loss_sum``    sum over micro-batches of the summed auxiliary losses
    ``num_micro_batches``  micro-batches summed
    ``num_tokens``      tokens trained on, counted by one of the ranks that share them
    ``num_sharers``     ranks that each count the same tokens' selections in their ``loads``; the same on every rank
    ``loads``           one entry per MoE layer, in the same order on every rank
    ``stop``            this rank was asked to stop
    """

    loss_sum_nats: float
    aux_loss_sum: float
    num_micro_batches: int
    num_tokens: int
    loads: Sequence[LayerLoad]
    stop: bool
    num_sharers: int = 1


@dataclass(frozen=True, kw_only=True)
class LayerStep:
    """One MoE layer's part of a step; sums run over ranks and micro-batches.

    ``computed_rows``       expert rows really computed, forward
    ``to_self_bytes``, ``inside_node_bytes``, ``between_nodes_bytes``  bytes of rows by the links they took, forward
                            and backward as the layer counts them
    ``traffic``             rows of dispatch in forward, by the links they took
    ``received_W``          int64; of them, the rows that each rank received from others
    ``stage_s``             seconds of each stage in all micro-batches, mean over the ranks (``LayerLoad.stage_s`` has
                            the stages); stages that took no time on any rank are left out, all of them where nothing
                            is timed
    ``slowest_stage_s``     of the rank that took longest for the stage, for each stage another
    """

    name: str
    computed_rows: int
    to_self_bytes: int
    inside_node_bytes: int
    between_nodes_bytes: int
    traffic: Traffic
    received_W: Tensor
    stage_s: Mapping[str, float]
    slowest_stage_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The step as all ranks saw it; sums run over ranks and micro-batches.

    ``loss_nats``, ``aux_loss``  means over ranks and micro-batches
    ``num_tokens``          tokens trained on
    ``layers``              what each MoE layer did
    ``selected_LE``         int64 ``[layers, E]``; slots that selected each expert
    ``routed_LE``           int64 ``[layers, E]``; slots left after the capacity drop
    ``stop``                at least one rank was asked to stop
    """

    loss_nats: float
    aux_loss: float
    num_tokens: int
    layers: tuple[LayerStep, ...]
    selected_LE: Tensor
    routed_LE: Tensor
    stop: bool

    @property
    def loss_bits(self) -> float:
        """Cross-entropy in bits per token."""
        return self.loss_nats / math.log(2)

    @property
    def computed_rows(self) -> int:
        """Expert rows really computed, forward."""
        return sum(layer.computed_rows for layer in self.layers)

    @property
    def all_to_all_bytes(self) -> int:
        """Bytes that ranks sent to other ranks, forward and backward as the layers count them."""
        return sum(layer.inside_node_bytes + layer.between_nodes_bytes for layer in self.layers)

    @property
    def between_nodes_bytes(self) -> int:
        """Those of them that went to other nodes."""
        return sum(layer.between_nodes_bytes for layer in self.layers)

    @property
    def traffic(self) -> Traffic:
        """Rows of dispatch in forward, by the links they took, over all layers."""
        return sum((layer.traffic for layer in self.layers), start=Traffic())

    @property
    def received_W(self) -> Tensor:
        """int64; of them, the rows that each rank received from others. One 0 where there are no layers."""
        return sum((layer.received_W for layer in self.layers), start=torch.zeros(1, dtype=torch.int64))

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
        """Rows that the busiest rank received over all layers, over the ranks' mean; 1 where none were sent."""
        received_W = self.received_W
        total = int(received_W.sum())
        return int(received_W.max()) * received_W.numel() / total if total else 1.0

    @property
    def num_dead_experts(self) -> int:
        """Experts over all layers that no token selected in this step."""
        return int((self.selected_LE == 0).sum())


def reduce_step(local: LocalStep, device: torch.device) -> StepMetrics:
    """Sums the ranks' parts. Collective: every rank calls it once per step.

    One float64 vector holds everything; counts stay exact below 2**53. A second all-reduce finds the slowest ranks,
    where the sums say that any rank timed its stages.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    scalars = [
        float(local.stop),
        local.loss_sum_nats,
        local.aux_loss_sum,
        local.num_micro_batches,
        local.num_tokens,
    ]
    own_s_L = [[load.stage_s.get(stage, 0.0) for stage in STAGE_TIMES] for load in local.loads]
    own_s_LS = torch.tensor(own_s_L, dtype=torch.float64).view(len(local.loads), len(STAGE_TIMES))
    parts = [torch.tensor(scalars, dtype=torch.float64)]
    for load, own_s_S in zip(local.loads, own_s_LS, strict=True):
        received = [load.traffic.received if other == rank else 0 for other in range(world)]
        counts = torch.tensor([*_counts_of(load), *received], dtype=torch.float64)
        parts += [own_s_S, counts, load.selected_E.double(), load.routed_E.double()]
    vector = _over_ranks(torch.cat(parts), dist.ReduceOp.SUM, device)
    stop, loss_sum, aux_loss_sum, num_micro_batches, num_tokens = vector[:_NUM_SCALARS].tolist()
    sums_LX = vector[_NUM_SCALARS:].view(len(local.loads), -1 if local.loads else 0)
    mean_s_LS = sums_LX[:, : len(STAGE_TIMES)] / world
    counts_LX = sums_LX[:, len(STAGE_TIMES) :].round().long()
    slowest_s_LS = _over_ranks(own_s_LS, dist.ReduceOp.MAX, device) if bool(mean_s_LS.any()) else mean_s_LS
    layers = zip(local.loads, counts_LX[:, : _NUM_COUNTS + world], mean_s_LS, slowest_s_LS, strict=True)
    selected_LE, routed_LE = counts_LX[:, _NUM_COUNTS + world :].chunk(2, dim=1) if local.loads else (counts_LX,) * 2
    return StepMetrics(
        loss_nats=loss_sum / max(num_micro_batches, 1),
        aux_loss=aux_loss_sum / max(num_micro_batches, 1),
        num_tokens=round(num_tokens),
        layers=tuple(_layer_of(*layer) for layer in layers),
        selected_LE=selected_LE // local.num_sharers,
        routed_LE=routed_LE // local.num_sharers,
        stop=stop > 0,
    )


def _counts_of(load: LayerLoad) -> list[int]:
    inside_node_bytes = load.all_to_all_bytes - load.between_nodes_bytes
    sent = (load.to_self_bytes, inside_node_bytes, load.between_nodes_bytes)
    return [load.computed_rows, *sent, *astuple(load.traffic)]


def _layer_of(load: LayerLoad, counts: Tensor, mean_s_S: Tensor, slowest_s_S: Tensor) -> LayerStep:
    """What ``load``'s layer did on all ranks: :func:`_counts_of` summed, then the rows that each rank received."""
    computed_rows, to_self_bytes, inside_node_bytes, between_nodes_bytes = counts[: _NUM_COUNTS - _NUM_TRAFFIC].tolist()
    return LayerStep(
        name=load.name.removesuffix(".deepspeed_moe"),
        computed_rows=computed_rows,
        to_self_bytes=to_self_bytes,
        inside_node_bytes=inside_node_bytes,
        between_nodes_bytes=between_nodes_bytes,
        traffic=Traffic(*counts[_NUM_COUNTS - _NUM_TRAFFIC : _NUM_COUNTS].tolist()),
        received_W=counts[_NUM_COUNTS:],
        stage_s=_by_stage(mean_s_S),
        slowest_stage_s=_by_stage(slowest_s_S),
    )


def _over_ranks(values: Tensor, operation: dist.ReduceOp.RedOpType, device: torch.device) -> Tensor:
    """``values``, on the host, reduced entry by entry on ``device``. Collective."""
    if not dist.is_initialized():
        return values
    reduced = values.to(device, copy=True)
    dist.all_reduce(reduced, op=operation)
    return reduced.cpu()


def _by_stage(seconds_S: Tensor) -> dict[str, float]:
    return {stage: value for stage, value in zip(STAGE_TIMES, seconds_S.tolist(), strict=True) if value > 0}
