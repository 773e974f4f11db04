"""Pipelines whose stages hold different layers: every rank makes the same groups, and the same collectives.

DeepSpeed 0.19.8 makes expert-parallel groups where a rank has a layer that wants them, and sums the gradient norm
over the stages once for each of a rank's parameter groups. Both are collectives of ranks that may have no such
layer, or another number of groups, and then wait forever.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import groups
from torch import nn

from ...config import ConfigError
from ...groups import same_everywhere
from .moe import MoE, make_groups


def check_pipeline(model: nn.Module, layers: list[tuple[str, MoE]], *, zero_stage: int) -> None:
    """What a pipeline asks of its layers, before any collective. Raises ConfigError, ValueError."""
    if not isinstance(model, PipelineModule):
        return
    if zero_stage > 1:
        raise ConfigError(
            "zero_optimization.stage", zero_stage, "DeepSpeed's pipelines train at ZeRO stage 0 or 1: use 1"
        )
    size = dist.get_world_size() // model.num_stages
    for name, layer in layers:
        if size % layer.ep_size:
            raise ValueError(
                f"ep_size ({layer.ep_size}) of layer '{name}' must divide the number of ranks of its pipeline stage "
                f"({size}): experts are spread over the ranks of one stage"
            )
    for stage in range(model.num_stages):
        ranks = sorted(model.topology().get_axis_list("pipe", stage))
        if ranks != list(range(stage * size, (stage + 1) * size)):
            raise ValueError(
                f"stage {stage} of the pipeline has the ranks {ranks}; DeepSpeed's expert-parallel groups need "
                "consecutive ones: let 'pipe' be the first axis of the topology"
            )


def share_groups(model: nn.Module, layers: list[tuple[str, MoE]], *, data_first: bool) -> bool:
    """Makes the groups of every stage's layers on every rank, in one order. A collective of all ranks.

    Returns whether any stage has a layer.
    """
    if not isinstance(model, PipelineModule):
        return bool(layers)
    own = [(layer.ep_size, layer.enable_expert_tensor_parallelism) for _, layer in layers]
    everywhere: list[list[tuple[int, bool]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, own)
    wanted = list(dict.fromkeys(kind for kinds in everywhere for kind in kinds))
    if wanted:
        groups.mpu = model.mpu()  # as the engine does next
    for ep_size, tensor_parallel in wanted:
        make_groups(ep_size, expert_tensor_parallelism=tensor_parallel, data_first=data_first)
    return bool(wanted)


def check_stages(engine: Any) -> None:
    """No stage waits for another in the optimizer's gradient norm. Raises ValueError on every rank. A collective."""
    optimizer = engine.optimizer
    if engine.pipeline_parallelism and isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        number = len(optimizer.optimizer.param_groups)
        same_everywhere(number, "the number of parameter groups (in fp16 pipelines without ZeRO; ZeRO 1 takes any)")


def loss_scale_of(engine: Any) -> float:
    """What the engine multiplies a micro-batch's loss by before backward."""
    return float(getattr(engine.optimizer, "loss_scale", 1.0)) / engine.gradient_accumulation_steps()
