"""What the routed layers of a model did: loads, drops, traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from .layer import RoutedMLP
from .ops.clock import STAGE_TIMES as STAGE_TIMES
from .ops.clock import STAGES as STAGES
from .types import Traffic as Traffic


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """One layer on this rank since its load was last taken.

    ``selected_E``        int64 on the host; selections of each logical expert by this rank's tokens
    ``routed_E``          int64 on the host; the same after the capacity drop
    ``computed_rows``     expert rows computed on this rank (forward), of whichever rank's tokens
    ``all_to_all_bytes``  bytes of rows this rank sent to others, forward and backward
    ``between_nodes_bytes``  those of them it sent to other nodes
    ``to_self_bytes``     bytes of rows that it kept, counted alike; no link carries them
    ``traffic``           rows of dispatch in forward by the links they took, rows received, and what was saved; the
                          largest ``traffic.received`` of all ranks is the busiest receiver's
    ``stage_s``           seconds by stage, on the host for CPU tensors and in the computing stream on a device; empty
                          unless ``stage_times`` is on

    Stages are ``route``, ``plan`` (with the exchange of counts), ``dispatch``, ``experts``, ``combine`` and
    ``shared_experts``, and ``dispatch_backward``, ``experts_backward``, ``combine_backward``: backward of what xmoe
    computes itself, not of the gate, nor of experts or shared experts that are modules of their own.
    ``NAME_wait`` is the part of ``NAME`` in which this rank waited for an exchange, the time until the slowest rank
    joined it included; an exchange that computing hid entirely has a wait of about 0. A recompute's forward counts.
    """

    name: str
    selected_E: Tensor
    routed_E: Tensor
    computed_rows: int
    all_to_all_bytes: int
    between_nodes_bytes: int = 0
    to_self_bytes: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    stage_s: Mapping[str, float] = field(default_factory=dict)


def routed_layers(model: nn.Module) -> list[tuple[str, RoutedMLP]]:
    """Every routed layer of the model with its name, in module order."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, RoutedMLP)]


def take_layer_loads(model: nn.Module) -> list[LayerLoad]:
    """The loads of all routed layers since the last call, in module order; reading resets them.

    With ``stage_times`` on it waits until the device has computed what was timed.
    """
    loads = []
    for name, layer in routed_layers(model):
        counters = layer.take_counters()
        loads.append(
            LayerLoad(
                name=name,
                selected_E=counters.selected_E.cpu(),
                routed_E=counters.routed_E.cpu(),
                computed_rows=counters.computed_rows,
                all_to_all_bytes=counters.all_to_all_bytes,
                between_nodes_bytes=counters.between_nodes_bytes,
                to_self_bytes=counters.to_self_bytes,
                traffic=counters.traffic,
                stage_s=layer.clock.take(),
            )
        )
    return loads
