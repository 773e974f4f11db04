"""Floating-point operations of the reference decoder, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from xmoe.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Floating-point operations of one forward pass (a multiply-add counts two).

    ``per_token``         everything but the routed experts, for one token: attention with the causal half of its
                          score matrix, dense MLPs, shared experts, routers and the head
    ``per_routed_row``    one routed expert applied to one token
    ``nominal_rows_per_token``  routed rows of one token when nothing is dropped: MoE blocks * top_k
    """

    per_token: float
    per_routed_row: float
    nominal_rows_per_token: int

    def training(self, *, num_tokens: int, num_routed_rows: int) -> float:
        """Operations of forward and backward (twice the forward's) for this many tokens and routed rows.

        Work repeated by activation checkpointing is not counted.
        """
        return 3.0 * (num_tokens * self.per_token + num_routed_rows * self.per_routed_row)

    def nominal_training(self, num_tokens: int) -> float:
        """The same if every token kept all of its ``top_k`` experts in every MoE block."""
        return self.training(num_tokens=num_tokens, num_routed_rows=num_tokens * self.nominal_rows_per_token)


def count_flops(config: ModelConfig, *, vocab_size: int, sequence_length: int) -> FlopCount:
    """The operations of ``Transformer(config)`` on sequences of ``sequence_length`` tokens."""
    D = config.hidden_size
    kv_size = D // config.num_heads * config.num_kv_heads
    projections = 2 * D * (2 * D + 2 * kv_size)
    mean_keys = (sequence_length + 1) / 2
    attention = projections + 2 * 2 * D * mean_keys
    dense = 2 * 3 * D * config.dense_ffn_size
    shared = 2 * 3 * D * config.num_shared_experts * config.expert_ffn_size
    router = 2 * D * config.num_experts
    moe_layers = config.num_layers - config.num_dense_layers
    matrices = 3 if config.expert_activation == "swiglu" else 2
    return FlopCount(
        per_token=config.num_layers * attention
        + config.num_dense_layers * dense
        + moe_layers * (shared + router)
        + 2 * D * vocab_size,
        per_routed_row=2.0 * matrices * D * config.expert_ffn_size,
        nominal_rows_per_token=moe_layers * config.top_k,
    )
