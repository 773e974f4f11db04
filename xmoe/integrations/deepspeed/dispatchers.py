"""The dispatcher that a layer's settings ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from deepspeed.accelerator import get_accelerator

from ...config import ConfigError, XMoEConfig
from ...cost import Layer
from ...dispatch.auto import agreed_dispatch
from ...dispatch.base import Dispatcher
from ...dispatch.local import LocalDispatcher
from ...dispatch.make import make_dispatcher, node_layout
from ...ops.collectives import Exchange

if TYPE_CHECKING:
    from .moe import MoE

# Of one rank, for the choice of "auto": groups are made before any batch is seen.
_USUAL_TOKENS = 4096


def dispatcher_of(layer: MoE, config: XMoEConfig, exchange: Exchange) -> Dispatcher:
    """Over ``exchange``'s group, of which it is a collective unless the dispatcher is the local one.

    Raises ConfigError where the group's nodes do not suit the setting; under ``xmoe.initialize`` that waits in
    ``layer.late_error``, because the ranks of other groups are on their way to the engine's collectives.
    """
    name = config.dispatch
    if name == "local" or (name == "auto" and layer.ep_size == 1):
        return LocalDispatcher()
    device = torch.device(get_accelerator().current_device_name())
    try:
        if name == "auto":
            layout = node_layout(exchange.group, config.ranks_per_node, equal=False)
            name = agreed_dispatch(exchange.group, layout, _sizes(layer), device=device)
        return make_dispatcher(
            name,
            exchange,
            ranks_per_node=config.ranks_per_node,
            device=device,
            num_chunks=config.overlap_chunks,
        )
    except ConfigError as error:
        if not layer.is_configured:
            raise
        layer.late_error = error
        return LocalDispatcher()  # never used: xmoe.initialize raises


def _sizes(layer: MoE) -> Layer:
    gate = layer.deepspeed_moe.gate
    item_bytes = next((p.element_size() for p in layer.deepspeed_moe.experts.parameters()), 4)
    return Layer(
        num_experts=layer.num_experts,
        top_k=gate.settings.top_k,
        hidden_size=gate.wg.in_features,
        tokens=_USUAL_TOKENS,
        item_bytes=item_bytes,
    )
