"""DeepSeek-style decoder: RMSNorm, rotary grouped-query attention, dense SwiGLU blocks first, then MoE blocks.

The model knows neither DeepSpeed nor a process group: the class of its MoE layers is an argument, and
``xmoe.training`` passes ``xmoe.MoE``.

Legend of the shape suffixes, beyond ``xmoe.types``:

    B  sequences of one micro-batch     S  tokens of one sequence
    H  query heads                      G  key/value heads (H is a multiple of G)
    C  channels of one head             V  vocabulary

No parameter outside the MoE layers may have "expert" in its name: DeepSpeed sorts the tensors of a checkpoint
into files by that word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xmoe.config import ModelConfig

IGNORED_TARGET = -100
"""Target value that takes no part in the loss."""

Checkpoint = Callable[..., Any]
"""Runs ``function(*args)`` now without its activations and again in backward: ``checkpoint(function, *args)``."""


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``; x and the result are ``[..., D]``."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down_proj = nn.Linear(ffn_size, hidden_size, bias=False)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class GELUMLP(nn.Module):
    """``fc2(gelu(fc1(x)))``; x and the result are ``[..., D]``."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, ffn_size, bias=False)
        self.activation = nn.GELU()
        self.fc2 = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


def rotary_angles(num_positions: int, channels: int, *, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[S, C/2]`` in float32: position s turns channel pair c by ``s * theta**(-2c/C)``.

    They are computed in every forward and are no buffers, because a ``.bfloat16()`` model would round buffers.
    """
    rates_C = theta ** (-torch.arange(0, channels, 2, device=device, dtype=torch.float32) / channels)
    angles_SC = torch.arange(num_positions, device=device, dtype=torch.float32)[:, None] * rates_C
    return angles_SC.cos(), angles_SC.sin()


def rotate(x_BHSC: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
    """Turns each pair (channel c, channel c + C/2) by its position's angle, in float32; the dtype is kept."""
    first, second = x_BHSC.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos_SC - second * sin_SC, second * cos_SC + first * sin_SC), dim=-1)
    return turned.to(x_BHSC.dtype)


class Attention(nn.Module):
    """Causal grouped-query self-attention: query head h reads key/value head ``h // (H/G)``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.channels = config.hidden_size // config.num_heads
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.channels, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.channels, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.channels, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.channels, config.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
        B, S, _ = x_BSD.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(B, S, -1, self.channels).transpose(1, 2)

        q_BHSC = rotate(heads(self.q_proj(x_BSD)), cos_SC, sin_SC)
        k_BGSC = rotate(heads(self.k_proj(x_BSD)), cos_SC, sin_SC)
        out_BHSC = F.scaled_dot_product_attention(
            q_BHSC,
            k_BGSC,
            heads(self.v_proj(x_BSD)),
            is_causal=True,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return self.o_proj(out_BHSC.transpose(1, 2).reshape(B, S, -1))


class DenseBlock(nn.Module):
    """Pre-norm block with a dense SwiGLU MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.dense_ffn_size)

    def forward(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the block's output ``[B, S, D]`` and a zero: a dense block has no auxiliary loss."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_SC, sin_SC)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return x_BSD, torch.zeros((), device=x_BSD.device)


class MoEBlock(nn.Module):
    """Pre-norm block whose MLP is a mixture of experts."""

    def __init__(self, config: ModelConfig, moe: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.moe = moe

    def forward(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the block's output ``[B, S, D]`` and the layer's auxiliary loss, a float32 scalar."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_SC, sin_SC)
        routed_BSD, aux_loss, _ = self.moe(self.mlp_norm(x_BSD))
        return x_BSD + routed_BSD, aux_loss.float()


class Transformer(nn.Module):
    """Decoder language model: ``model(tokens_BS, targets_BS) -> (loss, aux_loss)``.

    ``moe_layer`` is called like ``xmoe.MoE`` once for every MoE block. ``deepspeed_checkpoint`` is needed for
    ``activation_checkpointing = "deepspeed"`` only. Initial weights depend on ``seed`` and each parameter's
    place in the model, and neither on the rank nor on ``ep_size``.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe_layer: Callable[..., nn.Module],
        *,
        vocab_size: int,
        seed: int,
        deepspeed_checkpoint: Checkpoint | None = None,
    ) -> None:
        super().__init__()
        self.config, self.seed = config, seed
        self.checkpoint = _choose_checkpoint(config, deepspeed_checkpoint)
        self.embedding = nn.Embedding(vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            DenseBlock(config)
            if index < config.num_dense_layers
            else MoEBlock(config, _make_moe(config, moe_layer, layer=index, seed=seed))
            for index in range(config.num_layers)
        )
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            # The layer initialises its routed experts itself, by their logical ids.
            if "deepspeed_experts" not in name:
                _initialise(parameter, name, config=config, seed=seed)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    @property
    def moe_layers(self) -> list[nn.Module]:
        """The MoE layers, in the order of the blocks."""
        return [block.moe for block in self.blocks if isinstance(block, MoEBlock)]

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Mean next-token cross-entropy in nats over the targets that are not ``IGNORED_TARGET``, and the sum of
        the layers' auxiliary losses. Both are float32 scalars; without any target the first is zero.

        tokens_BS, targets_BS: int64 ``[B, S]``; ``targets_BS[b, s]`` is the token after ``tokens_BS[b, s]``.
        """
        logits_BSV, aux_loss = self.logits(tokens_BS)
        total = F.cross_entropy(
            logits_BSV.float().flatten(0, 1),
            targets_BS.flatten(),
            ignore_index=IGNORED_TARGET,
            reduction="sum",
        )
        return total / (targets_BS != IGNORED_TARGET).sum().clamp(min=1), aux_loss

    def logits(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, S, V]`` in the model's dtype and the sum of the layers' auxiliary losses."""
        x_BSD = self.embedding(tokens_BS)
        cos_SC, sin_SC = rotary_angles(
            tokens_BS.shape[1],
            self.config.hidden_size // self.config.num_heads,
            theta=self.config.rope_theta,
            device=x_BSD.device,
        )
        aux_loss = torch.zeros((), device=x_BSD.device)
        for block in self.blocks:
            if self.checkpoint is not None and torch.is_grad_enabled():
                x_BSD, block_aux_loss = self.checkpoint(block, x_BSD, cos_SC, sin_SC)
            else:
                x_BSD, block_aux_loss = block(x_BSD, cos_SC, sin_SC)
            aux_loss = aux_loss + block_aux_loss
        return self.head(self.final_norm(x_BSD)), aux_loss


def _choose_checkpoint(config: ModelConfig, deepspeed_checkpoint: Checkpoint | None) -> Checkpoint | None:
    kind = config.activation_checkpointing
    if kind == "none":
        return None
    if kind == "deepspeed":
        if deepspeed_checkpoint is None:
            raise ValueError('model.activation_checkpointing is "deepspeed", which needs deepspeed_checkpoint=...')
        return deepspeed_checkpoint

    def run(function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=kind == "reentrant")

    return run


def _make_moe(config: ModelConfig, moe_layer: Callable[..., nn.Module], *, layer: int, seed: int) -> nn.Module:
    mlp = SwiGLU if config.expert_activation == "swiglu" else GELUMLP
    shared_size = config.num_shared_experts * config.expert_ffn_size

    def initialise_one(module: nn.Module, logical_id: int) -> None:
        for name, parameter in module.named_parameters():
            _initialise(parameter, f"blocks.{layer}.routed.{logical_id}.{name}", config=config, seed=seed)

    return moe_layer(
        config.hidden_size,
        mlp(config.hidden_size, config.expert_ffn_size),
        config.num_experts,
        config.ep_size,
        config.top_k,
        config.capacity_factor or 1.0,
        config.capacity_factor or 1.0,
        drop_tokens=config.capacity_factor is not None,
        shared_mlp=SwiGLU(config.hidden_size, shared_size) if shared_size else None,
        shared_gate=config.shared_gate and shared_size > 0,
        correction_bias=config.correction_bias,
        expert_init=initialise_one,
    )


# Projections that add to the residual stream. Their standard deviation is divided by sqrt(2 * num_layers), so that
# the stream's variance at the last block does not grow with the depth.
_RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight", "fc2.weight")


@torch.no_grad()
def _initialise(parameter: Tensor, name: str, *, config: ModelConfig, seed: int) -> None:
    """Norms become ones; every matrix is drawn from its own generator, seeded by the run's seed and its name."""
    if parameter.dim() < 2:
        parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        return
    std = config.init_std
    if name.endswith(_RESIDUAL_PROJECTIONS):
        std /= (2 * config.num_layers) ** 0.5
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # Drawn on the CPU in float32, so that every device and dtype starts from the same numbers.
    values = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
    parameter.copy_(values)
