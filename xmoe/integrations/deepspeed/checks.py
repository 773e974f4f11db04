"""What must hold of a model, its config and its optimizer before the first collective of training.

Every failure is one ValueError (ConfigError for JSON settings) that names the setting, the value and the remedy.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.moe.layer import MoE as NativeMoE
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size, bwc_tensor_model_parallel_world_size
from packaging.version import Version
from torch import nn

from ...config import ConfigError, read_json
from .moe import MoE, mark_experts

logger = logging.getLogger(__name__)

_SUPPORTED = (Version("0.19.8"), Version("0.20"))
_EXPERTS = ".deepspeed_moe.experts.deepspeed_experts."
_warned_of_version = False


def warn_of_version() -> None:
    """One warning when the installed DeepSpeed is none xmoe was tested with."""
    global _warned_of_version
    found = Version(deepspeed.__version__)
    if not _warned_of_version and not _SUPPORTED[0] <= Version(found.base_version) < _SUPPORTED[1]:
        _warned_of_version = True
        logger.warning("xmoe is tested with deepspeed >= %s, < %s; this is %s", *_SUPPORTED, found)


def warn_of_native_layers(model: nn.Module) -> None:
    """A warning, on rank 0, when layers of the model are DeepSpeed's own: no setting of xmoe's reaches them."""
    modules = model.named_modules()
    native = [name for name, module in modules if isinstance(module, NativeMoE) and not isinstance(module, MoE)]
    if native and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "%d MoE layers (first: '%s') are DeepSpeed's own, not xmoe's: build them from xmoe.MoE, call "
            "xmoe.patch_deepspeed() before the model is built, or convert them by xmoe.replace_moe_layers(model)",
            len(native),
            native[0],
        )


def config_as_dict(config: Any, args: Any) -> dict[str, Any]:
    """The DeepSpeed config as a dict of its own, wherever DeepSpeed would find it. Raises ConfigError."""
    if config is None:
        config = getattr(args, "deepspeed_config", None)
    if config is None:
        raise ConfigError("config", None, "give xmoe.initialize the DeepSpeed config, as a dict or a file's path")
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, (str, PathLike)):
        raise ConfigError("config", config, "must be the DeepSpeed config as a dict, or a file's path")
    try:
        return read_json(config)  # type: ignore[arg-type]
    except ConfigError as error:
        try:
            content = load_ds_config(os.fspath(config))  # Hjson, which has comments; base64, from the autotuner
        except (OSError, ValueError):
            raise error from None
        if not isinstance(content, dict):
            raise
        return dict(content)


def zero_stage(config: Mapping[str, Any]) -> int:
    """ZeRO stage of a DeepSpeed config, 0 where it has none. Raises ConfigError for what xmoe.MoE cannot train at."""
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise ConfigError("zero_optimization", zero, 'must be a JSON object, like {"stage": 2}')
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2) or isinstance(stage, bool):
        raise ConfigError(
            "zero_optimization.stage",
            stage,
            "xmoe.MoE trains at stage 0, 1 or 2: use 2 (with offload_optimizer, if memory is short); for stage 3 "
            "use DeepSpeed's AutoEP layers instead of xmoe.MoE",
        )
    offload = zero.get("offload_optimizer")
    device = offload.get("device", "none") if isinstance(offload, Mapping) else None
    if stage == 0 and device not in (None, "none"):
        raise ConfigError(
            "zero_optimization.offload_optimizer.device",
            device,
            "offloads the states of a ZeRO optimizer: set zero_optimization.stage to 1 or 2, or leave it out",
        )
    return int(stage)


def check_model(layers: list[tuple[str, MoE]]) -> None:
    """Expert-parallel sizes against the world, and names that DeepSpeed's checkpoints would lose. Raises ValueError."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    for name, layer in layers:
        if world % layer.ep_size:
            raise ValueError(
                f"ep_size ({layer.ep_size}) of layer '{name}' must divide the number of ranks ({world}): start "
                f"another number of ranks, or construct the layer with an ep_size that divides {world}"
            )
        for key in layer.state_dict():
            path = f"{name}.{key}"
            if "expert" in path and "moe.gate.wg.weight" not in path and _EXPERTS not in path:
                raise ValueError(
                    f"'{path}' is no routed expert, but DeepSpeed's checkpoints drop every name inside an MoE layer "
                    "with 'expert' in it: rename the module or the attribute that holds it"
                )


def check_tensor_parallelism(layers: list[tuple[str, MoE]], mpu: Any) -> None:
    """Whether experts are split is DeepSpeed's one choice for a whole model. Raises ValueError."""
    size = bwc_tensor_model_parallel_world_size(mpu)
    if size == 1:
        return
    name, first = layers[0]
    ranks = dist.get_world_size() // size // bwc_pipeline_parallel_world_size(mpu)
    for other, layer in layers:
        if layer.enable_expert_tensor_parallelism != first.enable_expert_tensor_parallelism:
            raise ValueError(
                f"layer '{name}' has enable_expert_tensor_parallelism={first.enable_expert_tensor_parallelism}, layer "
                f"'{other}' the contrary: DeepSpeed lays out its groups for one of them, so give all layers the same"
            )
        if layer.enable_expert_tensor_parallelism and ranks % layer.ep_size:
            raise ValueError(
                f"ep_size ({layer.ep_size}) of layer '{other}' must divide the number of data-parallel ranks ({ranks}) "
                f"when experts are split over {size} tensor-parallel ranks"
            )


def check_optimizer(model: nn.Module, groups: Iterable[Mapping[str, Any]], *, zero_stage: int) -> None:
    """Every trainable expert parameter stands in exactly one group; under ZeRO in one of experts only.

    A parameter no optimizer holds would silently never train. Raises ValueError.
    """
    places: dict[int, list[Mapping[str, Any]]] = {}
    for group in groups:
        for parameter in group["params"]:
            places.setdefault(id(parameter), []).append(group)
    missing, mixed = [], []
    for name, parameter in model.named_parameters():
        if not (is_moe_param(parameter) and parameter.requires_grad):
            continue
        found = places.get(id(parameter), [])
        if len(found) != 1:
            missing.append(name)
        elif zero_stage > 0 and not found[0].get("moe", False):
            mixed.append(name)
    remedy = "build it from xmoe.integrations.deepspeed.moe_param_groups(model), after every layer is in place"
    if missing:
        raise ValueError(
            f"the optimizer does not hold {len(missing)} trainable expert parameters exactly once "
            f"(first: {missing[0]}), so they would not train: {remedy}, or freeze them with requires_grad_(False)"
        )
    if mixed:
        raise ValueError(
            f"the optimizer holds {len(mixed)} expert parameters (first: {mixed[0]}) in a group without 'moe': True, "
            f"which ZeRO {zero_stage} would reduce over the wrong ranks: {remedy}"
        )


def check_model_parameters(model: nn.Module, parameters: list[Any]) -> None:
    """``model_parameters``, from which DeepSpeed builds the optimizer, hold every expert. Raises ValueError."""
    if parameters and isinstance(parameters[0], Mapping):
        _check_names(parameters)
        groups = parameters
    else:
        groups = [{"params": parameters}]
    check_optimizer(model, [{**group, "params": list(group["params"])} for group in groups], zero_stage=0)


def _check_names(groups: list[dict[str, Any]]) -> None:
    for index, group in enumerate(groups):
        if "name" not in group:
            raise ValueError(
                f"parameter group {index} has no 'name': DeepSpeed tells groups of experts apart by it; "
                f"add 'name': 'group{index}' (any text) to the group"
            )


def moe_param_groups(
    source: nn.Module | list[dict[str, Any]], *, unique_names: bool = False, **options: Any
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, experts apart, as DeepSpeed's ZeRO needs them.

    ``source`` is a model, or a list of groups of which each has a ``'name'``. ``options`` (``lr=``, ...) go into
    every group. DeepSpeed names all groups of experts alike (``ep_size_N``); ``unique_names=True`` adds a key
    ``'unique_name'`` made from the source group's name, and leaves ``'name'`` as DeepSpeed reads it.

    Raises ValueError for a group without a name.
    """
    if isinstance(source, nn.Module):
        mark_experts(source)
        source = [{"params": [p for p in source.parameters() if p.requires_grad], "name": "dense"}]
    _check_names(source)
    named = [{**options, **group, "params": list(group["params"]), "unique_name": group["name"]} for group in source]
    split: list[dict[str, Any]] = split_params_into_different_moe_groups_for_optimizer(named)
    split = [group for group in split if group["params"]]
    seen: dict[str, int] = {}
    for group in split:
        source_name = group.pop("unique_name")
        if unique_names:
            label = f"{source_name}/{group['name']}" if group.get("moe") else source_name
            seen[label] = seen.get(label, 0) + 1
            group["unique_name"] = label if seen[label] == 1 else f"{label}.{seen[label]}"
    return split
