"""Balancing over whole optimizer steps: where a step ends, and whose tokens are in it, is the engine's to say."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...metrics import routed_layers


def balance_with_steps(engine: Any) -> None:
    """Rebinds a method of the engine, so that after each applied step the routers get the selections of all ranks.

    One all-reduce for all layers; a skipped step's selections are dropped.
    """
    take_model_step = engine._take_model_step
    for _, layer in routed_layers(engine.module):
        layer.gate.steps_end = True
        if layer.gate.correction_bias is not None:
            # data_types.buffer_dtype casts every buffer; a step of 1e-3 would be lost in bfloat16.
            layer.gate.correction_bias.data = layer.gate.correction_bias.data.float()

    def and_end_step(lr_kwargs: Any) -> None:
        take_model_step(lr_kwargs)
        gates = [layer.gate for _, layer in routed_layers(engine.module) if layer.gate.balances_steps]
        if gates and engine.was_step_applied():
            counts = torch.cat([gate.step_counts for gate in gates])
            dist.all_reduce(counts, group=_ranks_of_other_tokens(engine))  # all layers at once
            for gate, total in zip(gates, counts.split([gate.num_experts for gate in gates]), strict=True):
                gate.end_step(total)
        for gate in gates:
            gate.step_counts.zero_()

    engine._take_model_step = and_end_step


def _ranks_of_other_tokens(engine: Any) -> Any:
    """The ranks that hold the same layers and train other tokens: neither pipeline stages nor tensor-parallel ranks."""
    return engine.mpu.get_data_parallel_group() if engine.pipeline_parallelism else engine.seq_data_parallel_group
