"""The load-balancing loss over the global batch: its ranks and its steps are the engine's."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups

from ...config import XMoEConfig
from ...groups import warm_up
from ...metrics import routed_layers
from ...ops.collectives import Exchange
from ...router import TopKRouter


def connect_global_loads(gate: TopKRouter, config: XMoEConfig, *, layer_name: str) -> None:
    """Gives the router the ranks over which the engine averages gradients. A collective, where the loss needs it."""
    if config.aux_loss_scope != "global_batch":
        return
    group = groups._get_sequence_data_parallel_group()
    warm_up(group, torch.device(get_accelerator().current_device_name()))
    gate.global_loads.exchange = Exchange(
        group=group, label=f"{layer_name}: counts of the balancing loss", timeout_s=config.collective_timeout_s
    )


def start_loads_with_steps(engine: Any) -> None:
    """Rebinds a method of the engine, so that loads add up over an optimizer step's micro-batches and no further."""
    gates = [layer.gate for _, layer in routed_layers(engine.module)]
    for gate in gates:
        gate.global_loads.accumulates = True
    take_model_step = engine._take_model_step

    def and_start_loads(lr_kwargs: Any) -> None:
        take_model_step(lr_kwargs)
        for gate in gates:
            gate.global_loads.begin_step()

    if gates:
        engine._take_model_step = and_start_loads
