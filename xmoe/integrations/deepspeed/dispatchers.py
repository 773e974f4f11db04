"""The dispatcher that a layer's settings ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from deepspeed.accelerator import get_accelerator

from ...config import ConfigError, XMoEConfig
from ...dispatch.base import Dispatcher
from ...dispatch.local import LocalDispatcher
from ...dispatch.make import make_dispatcher
from ...ops.collectives import Exchange

if TYPE_CHECKING:
    from .moe import MoE


def dispatcher_of(layer: MoE, config: XMoEConfig, exchange: Exchange) -> Dispatcher:
    """Over ``exchange``'s group, of which it is a collective unless the dispatcher is the local one.

    Raises ConfigError where the group's nodes do not suit the setting; under ``xmoe.initialize`` that waits in
    ``layer.late_error``, because the ranks of other groups are on their way to the engine's collectives.
    """
    name = config.dispatch
    if name == "local" or (name == "auto" and layer.ep_size == 1):
        return LocalDispatcher()
    device = torch.device(get_accelerator().current_device_name())
    if name == "auto":
        name = "flat"
    try:
        return make_dispatcher(name, exchange, ranks_per_node=config.ranks_per_node, device=device)
    except ConfigError as error:
        if not layer.is_configured:
            raise
        layer.late_error = error
        return LocalDispatcher()  # never used: xmoe.initialize raises
