"""What the routed layers of a model did: loads, drops, traffic."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from .layer import RoutedMLP
from .types import Traffic as Traffic


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """One layer on this rank since its load was last taken.

    ``selected_E``        int64 on the host; selections of each logical expert by this rank's tokens
    ``routed_E``          int64 on the host; the same after the capacity drop
    ``computed_rows``     expert rows computed on this rank (forward), of whichever rank's tokens
    ``all_to_all_bytes``  bytes of rows this rank sent to others, forward and backward
    ``between_nodes_bytes``  those of them it sent to other nodes
    ``traffic``           rows of dispatch in forward by the links they took, rows received, and what was saved; the
                          largest ``traffic.received`` of all ranks is the busiest receiver's
    """

    name: str
    selected_E: Tensor
    routed_E: Tensor
    computed_rows: int
    all_to_all_bytes: int
    between_nodes_bytes: int = 0
    traffic: Traffic = field(default_factory=Traffic)


def routed_layers(model: nn.Module) -> list[tuple[str, RoutedMLP]]:
    """Every routed layer of the model with its name, in module order."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, RoutedMLP)]


def take_layer_loads(model: nn.Module) -> list[LayerLoad]:
    """The loads of all routed layers since the last call, in module order; reading resets them."""
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
                traffic=counters.traffic,
            )
        )
    return loads
