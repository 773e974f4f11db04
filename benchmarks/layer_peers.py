"""The contestants of bench_layer.py, all with the same weights and the same mathematics.

xmoe               xmoe.MoE
deepspeed          deepspeed.moe.layer.MoE without drops (it pads every expert to the largest load)
deepspeed_1.25     the same at capacity factor 1.25: it drops, so it is shown but compared with nobody
autoep             DeepSpeed's AutoEP layer (gated experts only)
huggingface        transformers' Qwen3-MoE block with grouped_mm experts (gated experts only)
gemm_limit         the experts' matrix products on the same ragged counts, and nothing else
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.moe.layer import MoE as NativeMoE
from torch import Tensor, nn

from xmoe import MoE

Activation = Literal["gelu", "swiglu"]


@dataclass(frozen=True)
class Shape:
    """T tokens, H model width, F expert width, E experts, k experts a token."""

    T: int
    H: int
    F: int
    E: int
    k: int

    def setting(self, activation: Activation) -> dict[str, Any]:
        return {**self.__dict__, "activation": activation, "dtype": "float32"}


class GeluExpert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class SwigluExpert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def build(shape: Shape, activation: Activation) -> dict[str, nn.Module]:
    """Every contestant but the limit, by name, with equal weights."""
    torch.manual_seed(0)
    expert = (GeluExpert if activation == "gelu" else SwigluExpert)(shape.H, shape.F)
    ours = MoE(shape.H, expert, shape.E, 1, shape.k, drop_tokens=False, expert_init=_random_weights)
    with torch.no_grad():
        ours.deepspeed_moe.gate.wg.weight.normal_(0.0, 0.02)
    layers: dict[str, nn.Module] = {"xmoe": ours}
    for name, drop in (("deepspeed", False), ("deepspeed_1.25", True)):
        # Top-2's sampling of the second expert is other mathematics; at k > 2 DeepSpeed has no such thing.
        native = NativeMoE(
            shape.H, expert, shape.E, 1, shape.k, 1.25, 1.25, 0, drop_tokens=drop, top2_2nd_expert_sampling=False
        )
        native.load_state_dict(ours.state_dict())
        layers[name] = native
    if activation == "swiglu":
        layers["huggingface"] = _huggingface(shape, ours)
        layers["autoep"] = _autoep(shape, layers["huggingface"])
    return layers


def _random_weights(expert: nn.Module, logical_id: int) -> None:
    for parameter in expert.parameters():
        nn.init.normal_(parameter, std=0.02)


def _huggingface(shape: Shape, ours: MoE) -> nn.Module:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=shape.H,
        moe_intermediate_size=shape.F,
        num_experts=shape.E,
        num_experts_per_tok=shape.k,
        norm_topk_prob=True,
        hidden_act="silu",
    )
    config._experts_implementation = "grouped_mm"
    block = Qwen3MoeSparseMoeBlock(config)
    experts = ours.deepspeed_moe.experts.modules_in_order()
    with torch.no_grad():
        block.gate.weight.copy_(ours.deepspeed_moe.gate.wg.weight)
        for index, expert in enumerate(experts):
            gate_up = torch.cat([expert.gate_proj.weight, expert.up_proj.weight])
            block.experts.gate_up_proj[index].copy_(gate_up)
            block.experts.down_proj[index].copy_(expert.down_proj.weight)
    return block


def _autoep(shape: Shape, block: nn.Module) -> nn.Module:
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig, MoELayerSpec
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    spec = MoELayerSpec(
        moe_module_name="mlp",
        model_family="qwen3_moe",
        router_name="gate",
        experts_name="experts",
        expert_storage="fused_3d",
        expert_w1_name="gate_up_proj",
        expert_w2_name="down_proj",
        expert_w3_name=None,
        score_func="softmax",
        score_apply="post",
        route_norm=True,
        gate_bias=False,
        return_router_logits=False,
        router_logits_capture_target="none",
        router_logits_capture_index=None,
        router_logits_capture_layer_name=None,
        has_shared_experts=False,
        shared_experts_name="",
        num_experts=shape.E,
        top_k=shape.k,
        hidden_size=shape.H,
        ffn_hidden_size=shape.F,
    )
    return AutoEPMoELayer(spec, block, 1, 0, AutoEPConfig(enabled=True))


def forward(layer: nn.Module, x_1TH: Tensor) -> Tensor:
    """The layer's output alone, ``[1, T, H]``; AutoEP and Hugging Face return no tuple."""
    result = layer(x_1TH)
    return result[0] if isinstance(result, tuple) else result


def gemm_limit(ours: MoE, shape: Shape, activation: Activation, counts: list[int]) -> Callable[[], None]:
    """The expert products of one forward and backward, into buffers that are made beforehand."""
    rows = sum(counts)
    x, y, dy, dx = (torch.randn(rows, shape.H) for _ in range(4))
    hidden, d_hidden = (torch.randn(rows, shape.F) for _ in range(2))
    projections = ["gate_proj", "up_proj"] if activation == "swiglu" else ["fc1"]
    down_name = "down_proj" if activation == "swiglu" else "fc2"
    experts = list(ours.deepspeed_moe.experts.modules_in_order())
    ups = [[getattr(expert, name).weight.detach() for name in projections] for expert in experts]
    downs = [getattr(expert, down_name).weight.detach() for expert in experts]
    grads = [[torch.empty_like(weight) for weight in up] for up in ups]
    down_grads = [torch.empty_like(weight) for weight in downs]
    ends = torch.tensor(counts).cumsum(0).tolist()
    segments = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def run() -> None:
        for up, down, part in zip(ups, downs, segments, strict=True):
            for weight in up:
                torch.mm(x[part], weight.t(), out=hidden[part])
            torch.mm(hidden[part], down.t(), out=y[part])
        for up, down, part, grad, down_grad in zip(ups, downs, segments, grads, down_grads, strict=True):
            torch.mm(dy[part], down, out=d_hidden[part])
            torch.mm(dy[part].t(), hidden[part], out=down_grad)
            for weight, weight_grad in zip(up, grad, strict=True):
                torch.mm(d_hidden[part].t(), x[part], out=weight_grad)
                torch.mm(d_hidden[part], weight, out=dx[part])

    return run
