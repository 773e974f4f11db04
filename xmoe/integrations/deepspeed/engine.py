"""``xmoe.initialize``: ``deepspeed.initialize`` with the ``"xmoe"`` section read and the engine mended."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from ...config import XMoEConfig, parse_section
from ...groups import raise_together, same_everywhere
from ...metrics import routed_layers
from .checks import check_model, check_optimizer, config_as_dict, warn_of_version
from .gradients import mend_gradient_norm
from .moe import MoE


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
    if "RANK" not in os.environ and not dist.is_initialized():
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    options.setdefault("auto_mpi_discovery", False)
    deepspeed.init_distributed(**options)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    *more: Any,
    config: Any = None,
    config_params: Any = None,
    mpu: Any = None,
    **options: Any,
) -> tuple[Any, Any, Any, Any]:
    """Takes what ``deepspeed.initialize`` takes and returns what it returns: engine, optimizer, loader, scheduler.

    Reads the ``"xmoe"`` section of the config, sets every :class:`MoE` of the model by it, and rebinds methods of
    the returned engine so that

    - the gradient norm and clipping count every expert once, at every ZeRO stage, in fp32 and bf16;
    - the auxiliary-loss-free bias of each layer moves once per applied optimizer step.

    Raises, on every rank alike and before training's collectives: ConfigError for a wrong setting, ValueError for
    a model or an optimizer that does not fit. ZeRO 3 is refused.
    """
    warn_of_version()
    init_distributed()
    content: dict[str, Any] = {}
    error: Exception | None = None
    try:
        if model is None:
            raise ValueError("xmoe.initialize needs a model")
        content = config_as_dict(config if config is not None else config_params, args)
        settings = parse_section("xmoe", XMoEConfig, content.get("xmoe"))
        for name, layer in _moe_layers(model):
            layer.configure(settings, name=name)
        stage = content.get("zero_optimization", {}).get("stage", 0)
        model_parallel_size = mpu.get_model_parallel_world_size() if mpu is not None else 1
        check_model(model, content, model_parallel_size=model_parallel_size)
        if isinstance(optimizer, torch.optim.Optimizer):
            check_optimizer(model, optimizer, zero_stage=stage)
    except (ValueError, AttributeError) as found:
        error = found
    raise_together(error)
    assert model is not None
    same_everywhere(content, "the DeepSpeed config")
    engine, *rest = deepspeed.initialize(
        args, model, optimizer, model_parameters, *more, config=content, mpu=mpu, **options
    )
    error = None
    try:
        check_optimizer(engine.module, _inner_optimizer(engine), zero_stage=0)
    except ValueError as found:
        error = found
    raise_together(error)
    mend_gradient_norm(engine)
    _move_bias_with_steps(engine)
    return engine, *rest


def _moe_layers(model: nn.Module) -> list[tuple[str, MoE]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, MoE)]


def _inner_optimizer(engine: Any) -> Any:
    """The optimizer whose groups hold the model's own parameters, or None where ZeRO or a master copy hides them."""
    optimizer = engine.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) and not engine.zero_optimization() else None


def _move_bias_with_steps(engine: Any) -> None:
    """After each applied step moves every correction bias by the counts of all ranks; drops a skipped step's."""
    take_model_step = engine._take_model_step

    def and_move_bias(lr_kwargs: Any) -> None:
        take_model_step(lr_kwargs)
        gates = [layer.gate for _, layer in routed_layers(engine.module) if layer.gate.correction_bias is not None]
        if gates and engine.was_step_applied():
            counts = torch.cat([gate.step_counts for gate in gates])
            dist.all_reduce(counts)  # all layers at once
            for gate, total in zip(gates, counts.split([gate.num_experts for gate in gates]), strict=True):
                gate.update_correction_bias(total)
        for gate in gates:
            gate.step_counts.zero_()

    engine._take_model_step = and_move_bias
