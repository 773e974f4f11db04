"""``xmoe.initialize``: ``deepspeed.initialize`` with the ``"xmoe"`` section read and the engine mended."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.pipe import PipelineModule
from torch import nn

from ...config import XMoEConfig, parse_section
from ...groups import host_names, raise_together, same_everywhere
from .alike import check_alike, check_who_trains
from .balance import balance_with_steps
from .checkpoints import guard_checkpoints
from .checks import (
    check_model,
    check_model_parameters,
    check_optimizer,
    check_tensor_parallelism,
    config_as_dict,
    warn_of_native_layers,
    warn_of_version,
    zero_stage,
)
from .gradients import mend_gradient_norm
from .moe import MoE
from .pipeline import check_pipeline, check_stages, loss_scale_of, share_groups
from .sequence import check_sequence_shard
from .timing import start_times_with_each_log

native_initialize = deepspeed.initialize  # before patch_deepspeed() puts ours in its place


def init_distributed(**options: Any) -> None:
    """``deepspeed.init_distributed`` for this machine's accelerator; does nothing when a process group exists.

    On CPU tensors the backend is gloo, and DeepSpeed's shared-memory collectives are left out: building them
    takes a minute at first use, and their lock file, left by a killed process, blocks every later start.
    ``options`` go to DeepSpeed.
    """
    if dist.is_initialized() and deepspeed.comm.is_initialized():
        return
    if get_accelerator().device_name() == "cpu":
        # deepspeed.comm.torch is DeepSpeed's module; the attribute path leads to the torch package.
        importlib.import_module("deepspeed.comm.torch")
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        options.setdefault("dist_backend", "gloo")
    has_rank = "RANK" in os.environ or dist.is_initialized()
    by_mpi = not has_rank and any(os.environ.get(name, "1") != "1" for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    if not has_rank and not by_mpi:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    options.setdefault("auto_mpi_discovery", by_mpi)
    deepspeed.init_distributed(**options)


# Sections that say where a rank writes; these may differ between ranks.
_PER_RANK = ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Takes what ``deepspeed.initialize`` takes and returns what it returns: engine, optimizer, loader, scheduler.

    Reads the ``"xmoe"`` section of the config, sets every :class:`MoE` of the model by it, and rebinds methods of
    the returned engine so that

    - the gradient norm and clipping count every expert once, at every ZeRO stage, in fp32 and bf16;
    - balancing follows the loads of whole optimizer steps: the auxiliary-loss-free bias, and the loss over the global
      batch;
    - a checkpoint whose optimizer states do not fit is refused before anything of it is loaded.

    Raises, on every rank alike and before training's collectives: ConfigError for a wrong setting, ValueError for
    a model or an optimizer that does not fit. ZeRO 3 is refused.
    """
    warn_of_version()
    init_distributed()
    content: dict[str, Any] = {}
    error: Exception | None = None
    try:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model ({_kind(model)}) must be a torch.nn.Module")
        if optimizer is None:
            model_parameters = _all_parameters(model, model_parameters)
        content = config_as_dict(config if config is not None else config_params, args)
        _configure(model, content, optimizer, model_parameters, mpu)
    except Exception as found:  # of whatever kind: the other ranks wait for this one
        error = found
    raise_together(error)
    assert model is not None
    same_everywhere({k: v for k, v in content.items() if k not in _PER_RANK}, "the DeepSpeed config")
    layers = _moe_layers(model)
    if not isinstance(model, PipelineModule):  # whose stages hold different layers
        same_everywhere([name for name, _ in layers], "the model's list of MoE layers")
    check_alike(layers)
    pipeline = isinstance(model, PipelineModule)
    check_who_trains(layers, content, optimizer, zero_stage=zero_stage(content), pipeline=pipeline)
    data_first = bool(content.get("use_data_before_expert_parallelism", False))
    assert dist.group.WORLD is not None
    host_names(dist.group.WORLD)  # while all ranks are here: "auto" asks how many share a node
    has_experts = share_groups(model, layers, data_first=data_first)
    engine, *rest = native_initialize(
        args=_without_config(args),
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=content,
        mesh_param=mesh_param,
    )
    raise_together(next((layer.late_error for _, layer in layers if layer.late_error is not None), None))
    for _, layer in layers:
        layer.loss_scale = functools.partial(loss_scale_of, engine)
        layer.current_step = functools.partial(_step_of, engine)
    if has_experts or engine.has_moe_layers:
        check_stages(engine)
        mend_gradient_norm(engine)
        guard_checkpoints(engine)
    start_times_with_each_log(engine)
    balance_with_steps(engine)
    return engine, *rest


def _step_of(engine: Any) -> int:
    """The optimizer step that the engine works on, the first being 1."""
    return int(engine.global_steps) + 1


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _all_parameters(model: nn.Module, given: Any) -> list[Any]:
    """What DeepSpeed shall optimize, in a list of its own: it refuses iterators, and None, for models with experts.

    An empty list is refused too, by torch: a rank on which nothing trains gives what is frozen.
    """
    chosen = [] if given is None else list(given)
    return chosen or [p for p in model.parameters() if p.requires_grad] or list(model.parameters())


def _configure(model: nn.Module, content: dict[str, Any], optimizer: Any, model_parameters: Any, mpu: Any) -> None:
    settings = parse_section("xmoe", XMoEConfig, content.get("xmoe"))
    layers = _moe_layers(model)
    for name, layer in layers:
        layer.configure(settings, name=name)
    warn_of_native_layers(model)
    if not layers:
        return
    stage = zero_stage(content)
    check_model(layers)
    check_pipeline(model, layers, zero_stage=stage)
    mpu = model.mpu() if isinstance(model, PipelineModule) else mpu
    check_tensor_parallelism(layers, mpu)
    check_sequence_shard(model, layers, mpu)
    if isinstance(optimizer, torch.optim.Optimizer):
        check_optimizer(model, optimizer.param_groups, zero_stage=stage)
    elif optimizer is None:
        check_model_parameters(model, model_parameters)


def _without_config(args: Any) -> Any:
    """``args`` for DeepSpeed, which refuses a config in two places and has ours by argument."""
    if getattr(args, "deepspeed_config", None) is None:
        return args
    args = copy.copy(args)
    args.deepspeed_config = None
    return args


def _moe_layers(model: nn.Module) -> list[tuple[str, MoE]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, MoE)]
