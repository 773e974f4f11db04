"""What ranks must have alike of their MoE layers, and what they agree on where they need not.

Ranks whose layers differ send rows their peers do not expect, or wait for each other. Settings in the JSON are
compared with the JSON; those that a constructor was given stand in no file.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...config import XMoEConfig
from ...experts import Experts

if TYPE_CHECKING:
    from .moe import MoE

# A rank's own: what computes on it, what it times, what it works around, and how long it waits.
_OF_ONE_RANK = ("kernels", "stage_times", "self_row_guard", "collective_timeout_s")
# Settings of the router whose names in the constructor are others.
_GIVEN_AS = {"top_k": "k", "random_token_selection": "use_rts", "sample_second_expert": "top2_2nd_expert_sampling"}


def check_alike(layers: list[tuple[str, MoE]]) -> None:
    """Layers of one name are built alike on all ranks that have them. A collective of all ranks.

    Raises ValueError, on every rank the same, naming the layer, the setting, both ranks and both values.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = {name: _settings_of(layer) for name, layer in layers}
    digests = _everywhere({name: hashlib.sha256(repr(found).encode()).hexdigest() for name, found in own.items()})
    first: dict[str, str] = {}
    for of_rank in digests:
        for name, digest in of_rank.items():
            if first.setdefault(name, digest) != digest:
                _raise_difference(name, _everywhere(own.get(name)))


def _raise_difference(name: str, settings: list[dict[str, str] | None]) -> None:
    having = [(rank, found) for rank, found in enumerate(settings) if found is not None]
    one, expected = having[0]
    for other, found in having[1:]:
        for key, value in found.items():
            if value != expected[key]:
                raise ValueError(
                    f"layer '{name}' has {key}={expected[key]} on rank {one} and {key}={value} on rank {other}: "
                    "every rank must construct it with the same settings"
                )


def _settings_of(layer: MoE) -> dict[str, str]:
    """Its settings as they will be used, by their names in the constructor, in words."""
    inner, gate = layer.deepspeed_moe, layer.deepspeed_moe.gate
    routing = {key: value for key, value in vars(gate.settings).items() if key not in XMoEConfig.model_fields}
    routing["noisy_gate_policy"] = "RSample" if routing.pop("noisy_logits") else None
    settings = {
        "hidden_size": gate.wg.in_features,
        "num_experts": layer.num_experts,
        "ep_size": layer.ep_size,
        **{_GIVEN_AS.get(key, key): value for key, value in routing.items()},
        "use_residual": layer.use_residual,
        "enable_expert_tensor_parallelism": layer.enable_expert_tensor_parallelism,
        "shared_mlp": None if inner.shared_mlp is None else ...,
        "shared_gate": inner.shared_gate is not None,
        "correction_bias": gate.correction_bias is not None,
        **layer.settings.model_dump(exclude=set(_OF_ONE_RANK)),
    }
    return {key: repr(value) for key, value in settings.items()}


def agree_on_training(experts: Experts, group: dist.ProcessGroup) -> None:
    """Tells a layer's experts whether those of any rank of ``group`` train. A collective of the group.

    Gate and hidden states need gradients on every rank or on none; experts, of which each rank has its own, may be
    frozen on some ranks only.
    """
    experts.trains_somewhere = any(_everywhere(_train(experts), group))


def check_who_trains(
    layers: list[tuple[str, MoE]], content: dict[str, Any], optimizer: Any, *, zero_stage: int, pipeline: bool
) -> None:
    """Whether DeepSpeed's optimizer takes ranks without a trainable expert in a group where others have some.

    ZeRO keeps partitions, and BF16_Optimizer and the wrapper of fused optimizers make sums, for each group of experts
    that a rank trains: ranks that differ would wait for each other. A collective of all ranks. Raises ValueError, on
    every rank the same.
    """
    reason, instead = f"ZeRO {zero_stage}", "use zero_optimization.stage 0"
    if zero_stage == 0:
        reason, instead = _needs_all_groups(content, optimizer, pipeline=pipeline)
    own = {layer.expert_group_name: False for _, layer in layers}
    for _, layer in layers:
        own[layer.expert_group_name] |= _train(layer.deepspeed_moe.experts)
    of_rank = _everywhere(own) if dist.is_initialized() else [own]
    if not reason:
        return
    train = {name for found in of_rank for name, trains in found.items() if trains}
    for rank, found in enumerate(of_rank):
        frozen = sorted(name for name, trains in found.items() if not trains and (name in train or not train))
        if frozen and (train or zero_stage):
            sizes = ", ".join(name.removeprefix("ep_size_") for name in frozen)
            raise ValueError(
                f"all experts of rank {rank} in layers of ep_size {sizes} are frozen, which {reason} does not take: "
                f"{instead}, or let an expert of every rank train"
            )


def _needs_all_groups(content: dict[str, Any], optimizer: Any, *, pipeline: bool) -> tuple[str, str]:
    """What without ZeRO takes only ranks that train alike, "" where nothing does; and what to use in its place."""
    if not any((content.get(name) or {}).get("enabled") for name in ("bf16", "bfloat16", "fp16")):
        return "", ""
    if pipeline:
        return "a pipeline in 16 bits", "use fp32"
    if (content.get("data_types") or {}).get("grad_accum_dtype") is not None:
        return "data_types.grad_accum_dtype in 16 bits", "leave it out"
    if optimizer is None:
        described = content.get("optimizer") or {}
        name, of_torch = str(described.get("type", "")), (described.get("params") or {}).get("torch_adam", False)
        fused = name.lower() != "sgd" and not (name.lower() in ("adam", "adamw") and of_torch)
    else:
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        fused = not isinstance(optimizer, torch.optim.Optimizer) or "fused" in name.lower()
    if not fused:
        return "", ""
    return f"the optimizer {name!r} in 16 bits", "use SGD, or Adam with optimizer.params.torch_adam"


def _train(experts: Experts) -> bool:
    return any(parameter.requires_grad for parameter in experts.parameters())


def _everywhere(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
