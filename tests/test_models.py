"""The reference decoder against naive code, and the promises its checkpoints and resumed runs rest on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from xmoe.config import ModelConfig
from xmoe.models.flops import count_flops
from xmoe.models.transformer import (
    GELUMLP,
    IGNORED_TARGET,
    Attention,
    SwiGLU,
    Transformer,
    rotary_angles,
    rotate,
)

VOCAB = 256


class NaiveMoE(nn.Module):
    """Runs every expert on every token; takes the arguments of ``xmoe.MoE``."""

    def __init__(
        self, hidden_size: int, expert: nn.Module, num_experts: int, ep_size: int, k: int, *_: float, **extras: object
    ) -> None:
        super().__init__()
        self.k, self.extras = k, extras
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.deepspeed_experts = nn.ModuleList(type(expert)(hidden_size, 12) for _ in range(num_experts))
        for logical_id, module in enumerate(self.deepspeed_experts):
            extras["expert_init"](module, logical_id)  # type: ignore[operator]
        self.shared_mlp = extras["shared_mlp"]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, ids = self.gate(x).softmax(-1).topk(self.k)
        out = self.shared_mlp(x) if self.shared_mlp is not None else torch.zeros_like(x)  # type: ignore[operator]
        for slot in range(self.k):
            for logical_id, module in enumerate(self.deepspeed_experts):
                out = out + module(x) * (weights[..., slot] * (ids[..., slot] == logical_id))[..., None]
        return out, self.gate(x).softmax(-1).square().mean(), ids


def config(**settings: object) -> ModelConfig:
    base = {
        "hidden_size": 16,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "dense_ffn_size": 24,
        "num_experts": 4,
        "top_k": 2,
        "expert_ffn_size": 12,
        "init_std": 0.2,
    }
    return ModelConfig(**(base | settings))  # type: ignore[arg-type]


def build(seed: int = 0, **settings: object) -> Transformer:
    return Transformer(config(**settings), NaiveMoE, vocab_size=VOCAB, seed=seed)


def batch(num_sequences: int = 2, length: int = 9) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCAB, (num_sequences, length + 1))
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (4, 1), (1, 1)])
def test_attention_equals_a_loop_over_heads_and_positions(num_heads: int, num_kv_heads: int) -> None:
    attention = Attention(config(num_heads=num_heads, num_kv_heads=num_kv_heads)).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    channels = 16 // num_heads
    cos, sin = rotary_angles(7, channels, theta=100.0, device=x.device)
    expected = torch.zeros(2, 7, 16, dtype=torch.float64)
    for b in range(2):
        for h in range(num_heads):
            kv = h // (num_heads // num_kv_heads)
            rows, kv_rows = slice(h * channels, (h + 1) * channels), slice(kv * channels, (kv + 1) * channels)
            q = naive_rotation(x[b] @ attention.q_proj.weight[rows].T, theta=100.0)
            k = naive_rotation(x[b] @ attention.k_proj.weight[kv_rows].T, theta=100.0)
            v = x[b] @ attention.v_proj.weight[kv_rows].T
            for s in range(7):
                weights = torch.softmax(k[: s + 1] @ q[s] / math.sqrt(channels), dim=0)
                expected[b, s, rows] = weights @ v[: s + 1]
    out = attention(x, cos, sin)
    # Angles and rotation are float32.
    torch.testing.assert_close(out, expected @ attention.o_proj.weight.T, rtol=1e-5, atol=1e-6)


def naive_rotation(x_SC: Tensor, *, theta: float) -> Tensor:
    """Multiplies channels c and c + C/2, as a complex number, by exp(i * position * theta**(-2c/C))."""
    half = x_SC.shape[1] // 2
    out = x_SC.clone()
    for position in range(x_SC.shape[0]):
        for c in range(half):
            angle = position * theta ** (-2 * c / (2 * half))
            number = complex(x_SC[position, c].item(), x_SC[position, c + half].item())
            number *= complex(math.cos(angle), math.sin(angle))
            out[position, c], out[position, c + half] = number.real, number.imag
    return out


def test_rotated_products_depend_on_the_distance_only() -> None:
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    cos, sin = rotary_angles(20, 8, theta=100.0, device=q.device)
    turned_q = rotate(q.expand(1, 1, 20, 8), cos, sin)[0, 0]
    turned_k = rotate(k.expand(1, 1, 20, 8), cos, sin)[0, 0]
    products = turned_q @ turned_k.T
    for distance in (0, 3, 11):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_no_token_sees_a_later_one() -> None:
    model = build()
    tokens, _ = batch(1, 12)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % VOCAB
    before, after = model.logits(tokens)[0], model.logits(changed)[0]
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert (before[:, 7:] != after[:, 7:]).any(dim=-1).all()


def test_loss_is_the_mean_over_counted_targets() -> None:
    model = build()
    tokens, targets = batch()
    targets[0, 2:] = IGNORED_TARGET
    loss, aux_loss = model(tokens, targets)
    chances = model.logits(tokens)[0].detach().double().softmax(-1)
    counted = [(b, s) for b in range(2) for s in range(9) if targets[b, s] != IGNORED_TARGET]
    expected = -sum(math.log(chances[b, s, targets[b, s]]) for b, s in counted) / len(counted)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert loss.dtype == aux_loss.dtype == torch.float32
    assert aux_loss.requires_grad


def test_without_targets_the_loss_is_zero_and_has_a_gradient() -> None:
    model = build()
    tokens, targets = batch()
    loss, _ = model(tokens, torch.full_like(targets, IGNORED_TARGET))
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_bfloat16_keeps_loss_in_float32() -> None:
    loss, aux_loss = build().bfloat16()(*batch())
    assert loss.dtype == aux_loss.dtype == torch.float32
    assert torch.isfinite(loss)


def test_blocks_are_dense_first_then_moe() -> None:
    model = build(num_layers=5, num_dense_layers=2)
    assert [type(block).__name__ for block in model.blocks] == ["DenseBlock"] * 2 + ["MoEBlock"] * 3
    assert len(model.moe_layers) == 3


def test_no_name_outside_the_moe_layers_says_expert() -> None:
    model = build(num_shared_experts=2)
    names = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_modules()]
    assert not [name for name in names if "expert" in name and ".moe." not in name]


def test_moe_settings_reach_the_layer() -> None:
    layer = build(num_shared_experts=2, shared_gate=True, correction_bias=True, capacity_factor=1.5).moe_layers[0]
    assert layer.extras["drop_tokens"] is True
    assert layer.extras["shared_gate"] is True
    assert layer.extras["correction_bias"] is True
    assert layer.shared_mlp.gate_proj.weight.shape == (24, 16)
    without = build(num_shared_experts=0, shared_gate=True).moe_layers[0]
    assert without.shared_mlp is None
    assert without.extras["shared_gate"] is False
    assert without.extras["drop_tokens"] is False


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = build(seed=5).state_dict()
    torch.manual_seed(2)
    same, other = build(seed=5).state_dict(), build(seed=6).state_dict()
    for name, value in one.items():
        assert torch.equal(value, same[name])
        assert value.dim() < 2 or not torch.equal(value, other[name])


def test_initial_weights_differ_between_experts_and_have_their_scale() -> None:
    model = build(hidden_size=64, num_layers=8, init_std=0.1)
    weights = [module.up_proj.weight for layer in model.moe_layers for module in layer.deepspeed_experts]
    assert len({weight.flatten()[0].item() for weight in weights}) == len(weights)
    assert torch.cat(weights).std().item() == pytest.approx(0.1, rel=0.05)
    block = model.blocks[0]
    assert block.attention.q_proj.weight.std().item() == pytest.approx(0.1, rel=0.05)
    for residual in (block.attention.o_proj, block.mlp.down_proj):
        assert residual.weight.std().item() == pytest.approx(0.1 / math.sqrt(16), rel=0.1)
    assert torch.equal(model.final_norm.weight, torch.ones(64))


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = build(tie_embeddings=True), build()
    assert tied.head.weight is tied.embedding.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == VOCAB * 16


@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant"])
def test_activation_checkpointing_changes_no_gradient(kind: str) -> None:
    tokens, targets = batch()
    plain, checkpointed = build(), build(activation_checkpointing=kind)
    for model in (plain, checkpointed):
        loss, aux_loss = model(tokens, targets)
        (loss + aux_loss).backward()
    for (name, one), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name, rtol=1e-5, atol=1e-7)


def test_deepspeed_checkpointing_needs_its_function() -> None:
    with pytest.raises(ValueError, match="needs deepspeed_checkpoint"):
        build(activation_checkpointing="deepspeed")


def test_deepspeed_checkpointing_changes_no_gradient() -> None:
    from xmoe.integrations.deepspeed.activation import activation_checkpoint

    tokens, targets = batch()
    plain = build()
    other = Transformer(
        config(activation_checkpointing="deepspeed"),
        NaiveMoE,
        vocab_size=VOCAB,
        seed=0,
        deepspeed_checkpoint=activation_checkpoint,
    )
    for model in (plain, other):
        loss, aux_loss = model(tokens, targets)
        (loss + aux_loss).backward()
    for (name, one), two in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, msg=name, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mlp", [SwiGLU, GELUMLP])
def test_mlps_have_the_names_that_the_layer_recognises(mlp: type[nn.Module]) -> None:
    names = {name for name, _ in mlp(8, 12).named_children()}
    assert names == (
        {"gate_proj", "up_proj", "down_proj", "activation"} if mlp is SwiGLU else {"fc1", "activation", "fc2"}
    )


def test_flops_equal_a_count_over_the_modules() -> None:
    settings = config(num_shared_experts=2)
    count = count_flops(settings, vocab_size=VOCAB, sequence_length=9)
    model = Transformer(settings, NaiveMoE, vocab_size=VOCAB, seed=0)
    matrices = {name: module.weight.numel() for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    shared = sum(size for name, size in matrices.items() if "deepspeed_experts" not in name)
    scores = 3 * 2 * 2 * 16 * 5  # 3 layers, scores and values, 16 channels, 5 = mean of 1 to 9 keys
    assert count.per_token == 2 * shared + scores
    one_expert = sum(size for name, size in matrices.items() if "blocks.1.moe.deepspeed_experts.0." in name)
    assert count.per_routed_row == 2 * one_expert
    assert count.nominal_training(10) == 3 * 10 * (count.per_token + 2 * 2 * count.per_routed_row)
    assert count.training(num_tokens=10, num_routed_rows=0) == 30 * count.per_token
