"""Which ranks share a layer's tokens, and whether its input is a slice of them already.

    tensor parallelism                      the ranks of the group; equal inputs, which are cut
    Megatron's sequence parallelism         the same ranks; each has its slice, and sums what Megatron does not
    DeepSpeed's Ulysses                     the ranks of the sequence-parallel group; each has its slice, and DeepSpeed
                                            sums the gradients of all parameters

Megatron leaves no one place to ask. What says that its sequence parallelism is on: ``sequence_parallel`` is True on the
``config`` or ``args`` of a module, on a module itself, or on a parameter (its layer norms mark theirs).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group, bwc_tensor_model_parallel_world_size
from torch import nn

from ...config import ConfigError
from ...groups import warm_up
from ...ops.collectives import Exchange
from ...sequence_shard import SequenceShard

if TYPE_CHECKING:
    from .moe import MoE


def sign_of_sequence_parallelism(model: nn.Module) -> str | None:
    """Where the model says that Megatron's sequence parallelism is on, or None."""
    for name, module in model.named_modules():
        for owner in ("", "config", "args"):
            asked = vars(module).get(owner) if owner else module
            if getattr(asked, "sequence_parallel", False) is True:
                return ".".join([name or type(model).__name__, *([owner] if owner else []), "sequence_parallel"])
    for name, parameter in model.named_parameters():
        if getattr(parameter, "sequence_parallel", False) is True:
            return f"{name}.sequence_parallel"
    return None


def check_sequence_shard(model: nn.Module, layers: list[tuple[str, MoE]], mpu: Any) -> None:
    """Tells every layer whether its input is a slice already. Raises ConfigError, ValueError."""
    size = bwc_tensor_model_parallel_world_size(mpu)
    sign = sign_of_sequence_parallelism(model) if size > 1 else None
    for name, layer in layers:
        layer.input_is_sharded = sign is not None
        if layer.shards_sequence:
            _check_layer(name, layer, tensor_parallel_size=size)
        elif sign is not None and not layer.enable_expert_tensor_parallelism:
            raise ConfigError(
                "xmoe.sequence_shard",
                False,
                f"{sign} is True, so tensor-parallel ranks come to layer '{name}' with different tokens: set "
                "sequence_shard to true, which takes them as they are",
            )


def _check_layer(name: str, layer: MoE, *, tensor_parallel_size: int) -> None:
    """Whether ``layer`` is one that ranks can compute for other tokens each. Raises ConfigError, ValueError."""
    if tensor_parallel_size == 1:
        return
    if layer.enable_expert_tensor_parallelism:
        raise ConfigError(
            "xmoe.sequence_shard",
            True,
            f"layer '{name}' has enable_expert_tensor_parallelism=True: experts split over the tensor-parallel ranks "
            "need all tokens on each; give the layer whole experts, or leave sequence_shard out",
        )
    shared = layer.deepspeed_moe.shared_mlp
    for key, parameter in shared.named_parameters() if shared is not None else ():
        if is_model_parallel_parameter(parameter):
            raise ValueError(
                f"'{name}.shared_mlp.{key}' is split over the tensor-parallel ranks, but with xmoe.sequence_shard each "
                "of them computes other tokens: give the layer a whole shared_mlp, or leave sequence_shard out"
            )
    if layer.use_residual and layer.input_is_sharded:
        raise ValueError(
            f"layer '{name}' has use_residual=True, and its input is a slice of the sequence: nobody sums the "
            "gradients of its mlp and coefficient over the slices; use shared_mlp instead"
        )


def shard_of(layer: MoE, exchange: Exchange) -> SequenceShard | None:
    """The shard of a layer whose groups exist, None where no other rank has tokens of its batch. A collective.

    ``exchange`` gives all but the group. Raises ValueError.
    """
    tensor, sequence = bwc_tensor_model_parallel_world_size(groups.mpu), groups._get_sequence_parallel_world_size()
    if tensor > 1 and sequence > 1:
        raise ValueError(
            f"xmoe.sequence_shard with {tensor} tensor-parallel and {sequence} sequence-parallel ranks: use one of them"
        )
    if tensor == sequence == 1:
        return None
    _check_layer(layer.layer_name, layer, tensor_parallel_size=tensor)
    group = groups._get_sequence_parallel_group() if sequence > 1 else bwc_tensor_model_parallel_group(groups.mpu)
    warm_up(group, torch.device(get_accelerator().current_device_name()))
    return SequenceShard(
        replace(exchange, group=group),
        input_is_sharded=sequence > 1 or layer.input_is_sharded,
        sums_gradients=sequence == 1,
    )
