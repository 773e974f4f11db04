"""Live models: DeepSpeed's layers replaced by xmoe's, parameters and all."""

from __future__ import annotations

from typing import Any

from deepspeed.moe.layer import MoE as NativeMoE
from torch import nn

from .moe import MoE


def replace_moe_layers(model: nn.Module, **settings: Any) -> int:
    """Replaces every native ``deepspeed.moe.layer.MoE`` inside a live model by :class:`MoE`, in place.

    The new layers take over the very parameters of the old ones, so an optimizer built before stays right; call it
    before ``initialize``. ``settings`` are keyword-only settings of :class:`MoE`. Returns the number replaced.

    Raises ValueError when the model is itself a native layer, or an engine holds the layer already.
    """
    if isinstance(model, NativeMoE) and not isinstance(model, MoE):
        raise ValueError("the model is itself a deepspeed MoE layer, which has no parent to replace it in: wrap it")
    converted: dict[int, MoE] = {}  # a layer that stands in several places stays one layer
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, NativeMoE) and not isinstance(child, MoE):
                if id(child) not in converted:
                    converted[id(child)] = _converted(child, name, settings)
                setattr(parent, name, converted[id(child)])
    return len(converted)


def _converted(native: NativeMoE, name: str, settings: dict[str, Any]) -> MoE:
    gate, experts = native.deepspeed_moe.gate, native.deepspeed_moe.experts
    if gate.ep_group is not None:
        raise ValueError(
            f"layer '{name}' belongs to a DeepSpeed engine already: call replace_moe_layers before initialize"
        )
    layer = MoE(
        gate.wg.in_features,
        experts.deepspeed_experts[0],
        native.num_experts,
        native.ep_size,
        gate.k,
        gate.capacity_factor,
        gate.eval_capacity_factor,
        gate.min_capacity,
        native.use_residual,
        gate.noisy_gate_policy,
        gate.drop_tokens,
        gate.use_rts,
        False,
        native.enable_expert_tensor_parallelism,
        gate.top2_2nd_expert_sampling,
        **settings,
    )
    layer.deepspeed_moe.gate.wg = gate.wg
    layer.deepspeed_moe.experts.deepspeed_experts = experts.deepspeed_experts
    if native.use_residual:
        layer.mlp, layer.coefficient = native.mlp, native.coefficient
    return layer.train(native.training)
