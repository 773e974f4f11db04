"""Gradient norm and clipping where DeepSpeed 0.19.8 gets them wrong for expert-parallel models.

    fp32, ZeRO 0              no global norm; clips each rank by the mean of the ranks' norms
    bf16 or fp16, ZeRO 0      FP16_UnfusedOptimizer leaves the experts out of the norm and of the clipping factor, and
                              ranks with trainable experts wait for those that have none
    ZeRO 1 and 2              right, but with tensor parallelism experts count on its first rank only, and in a
                              pipeline stages with another number of parameter groups wait for each other forever

The true norm is that of the model's gradient: every replicated parameter once, every expert once, whichever rank
holds it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import ReduceOp
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from deepspeed.utils.bwc import (
    bwc_pipeline_parallel_group,
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)
from torch import Tensor, nn


def true_gradient_norm(marked: Iterable[tuple[nn.Parameter, Tensor | None]], *, mpu: Any = None) -> float:
    """L2 norm of the whole model's gradient, equal on all ranks. A collective.

    ``marked`` pairs each parameter (whose marks say who holds it) with its gradient, or None for no gradient.
    Gradients have been reduced over data-parallel ranks already.
    """
    device = torch.device(get_accelerator().current_device_name())
    # float64: a sum of squares over 1e9 elements must not depend on how many ranks it is split over.
    dense = torch.zeros((), dtype=torch.float64, device=device)
    experts = {name: torch.zeros_like(dense) for name in sorted(groups._get_expert_parallel_group_dict())}
    experts_are_split = groups._get_expert_model_parallel_world_size() > 1
    is_first = bwc_tensor_model_parallel_rank(mpu) == 0
    for parameter, gradient in marked:
        if gradient is None or getattr(parameter, "ds_pipe_replicated", False):  # tied: another stage counts it
            continue
        square = gradient.detach().to(torch.float32).square().sum(dtype=torch.float64)
        is_counted_here = is_first or is_model_parallel_parameter(parameter)
        if is_moe_param(parameter):
            if is_counted_here or not experts_are_split:
                experts[parameter.group_name] += square  # type: ignore[attr-defined]
        elif is_counted_here:
            dense += square
    for name, total in experts.items():
        if groups._get_expert_parallel_world_size(name) > 1:
            dist.all_reduce(total, group=groups._get_expert_parallel_group(name))
    all_experts = torch.stack([torch.zeros_like(dense), *experts.values()]).sum()
    if bwc_tensor_model_parallel_world_size(mpu) > 1:
        for total in (dense, all_experts) if experts_are_split else (dense,):
            dist.all_reduce(total, group=bwc_tensor_model_parallel_group(mpu))
    square_norm = dense + all_experts
    if bwc_pipeline_parallel_world_size(mpu) > 1:
        dist.all_reduce(square_norm, group=bwc_pipeline_parallel_group(mpu))
    return math.sqrt(float(square_norm))


def mend_gradient_norm(engine: Any) -> None:
    """Makes ``engine.get_global_grad_norm()`` and gradient clipping true, by rebinding methods.

    Of a model that has experts somewhere: a stage of a pipeline may have none.
    """
    if isinstance(engine.optimizer, BF16_Optimizer):
        if engine.pipeline_parallelism:
            _mend_bf16_stages(engine.optimizer)
    elif engine.zero_optimization():
        if engine.pipeline_parallelism:
            _mend_zero_stages(engine.optimizer)
        if bwc_tensor_model_parallel_world_size(engine.mpu) > 1:
            _mend_zero(engine.optimizer)
    elif isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        if not engine.optimizer.fused_lamb_legacy:
            _mend_unfused(engine.optimizer, engine.mpu)
    elif not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        _mend_fp32(engine)


def _mend_zero(optimizer: Any) -> None:
    """Lets every tensor-parallel rank count the experts of its own ZeRO partition, which no other rank holds."""
    if groups._get_expert_model_parallel_world_size() > 1:
        return
    for name in ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload"):
        if hasattr(optimizer, name):
            setattr(optimizer, name, _counting_experts(optimizer, getattr(optimizer, name)))


def _mend_zero_stages(optimizer: Any) -> None:
    """Sums the norm over the stages once, where DeepSpeed does so for each of a stage's parameter groups."""
    scaled_global_norm, sum_over_model = optimizer.scaled_global_norm, optimizer._model_parallel_all_reduce

    def norm(norm_type: int = 2) -> Tensor:
        optimizer._model_parallel_all_reduce = lambda tensor, op: None
        try:
            own = scaled_global_norm(norm_type)  # of this stage; infinite where it is invalid
        finally:
            optimizer._model_parallel_all_reduce = sum_over_model
        square = own.double().square()
        sum_over_model(tensor=square, op=ReduceOp.SUM)
        return square.sqrt().to(own.dtype)

    optimizer.scaled_global_norm = norm


def _mend_bf16_stages(optimizer: Any) -> None:
    """Lets every stage count all groups of experts, of which it may have none: one all-reduce each."""
    gradients_of = optimizer.get_grads_for_norm
    if not optimizer.has_moe_layers:
        optimizer.has_moe_layers, optimizer.expert_gradients = True, {}

    def gradients(for_clipping: bool = False) -> Any:
        found = gradients_of(for_clipping)
        if for_clipping:
            return found
        dense, experts = found
        zero = torch.zeros(1, device=get_accelerator().current_device_name())
        names = sorted(groups._get_expert_parallel_group_dict())
        return dense or [zero], {name: experts.get(name) or [zero] for name in names}

    optimizer.get_grads_for_norm = gradients


def _counting_experts(optimizer: Any, norm_of: Callable[..., Any]) -> Callable[..., Any]:
    parameters_of = inspect.signature(norm_of)

    def norm(*args: Any, **kwargs: Any) -> Any:
        params = parameters_of.bind(*args, **kwargs).arguments["params"]
        rank = optimizer.model_parallel_rank
        if any(is_moe_param(parameter) for parameter in params):
            optimizer.model_parallel_rank = 0
        try:
            return norm_of(*args, **kwargs)
        finally:
            optimizer.model_parallel_rank = rank

    return norm


def _mend_fp32(engine: Any) -> None:
    take_model_step = engine._take_model_step

    def with_true_norm(lr_kwargs: Any) -> None:
        norm = true_gradient_norm(((p, p.grad) for p in engine.module.parameters()), mpu=engine.mpu)
        engine.clip_fp32_gradients = lambda: _clip(engine, norm)
        take_model_step(lr_kwargs)
        engine._global_grad_norm = norm

    engine._take_model_step = with_true_norm


def _clip(engine: Any, norm: float) -> None:
    factor = engine.gradient_clipping() / (norm + 1e-6)
    if factor < 1:
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _mend_unfused(optimizer: Any, mpu: Any) -> None:
    unscale_and_clip = optimizer.unscale_and_clip_grads

    def with_true_norm(total_norm: Any, apply_scale: bool = True) -> Any:
        marked = (
            (model_parameter, master.grad)
            for model_group, master_group in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            for model_parameter, master in zip(model_group, master_group, strict=True)
        )
        scaled_norm = true_gradient_norm(marked, mpu=mpu)
        optimizer._global_grad_norm = scaled_norm / optimizer.loss_scale_config.cur_scale
        return unscale_and_clip(scaled_norm, apply_scale)

    optimizer.unscale_and_clip_grads = with_true_norm
    # It asks the expert-parallel group whether a gradient overflowed: a rank whose experts are all frozen must, too.
    optimizer.overflow_checker.has_moe_params = True
