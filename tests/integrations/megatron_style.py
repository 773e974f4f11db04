"""A training script as Megatron-DeepSpeed's users have them: nothing here knows of xmoe.

test_patch.py runs it on the ranks, as it stands and with the names replaced by xmoe's.
"""

import argparse

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

WIDTH, EXPERTS = 8, 4


class ParallelMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(WIDTH, 2 * WIDTH)
        self.dense_4h_to_h = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden_states):
        hidden = nn.functional.gelu(self.dense_h_to_4h(hidden_states))
        return self.dense_4h_to_h(hidden), self.dense_4h_to_h.bias


class ParallelTransformerLayer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = MoE(
            WIDTH,
            ParallelMLP(),
            num_experts=EXPERTS,
            ep_size=args.moe_expert_parallel_size,
            k=args.topk,
            use_residual=args.mlp_type == "residual",
            capacity_factor=1.0,
            eval_capacity_factor=1.0,
            min_capacity=4,
            drop_tokens=False,
            use_tutel=False,
            enable_expert_tensor_parallelism=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, hidden_states):
        output, moe_loss, _ = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + output, moe_loss


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.layers = nn.ModuleList(ParallelTransformerLayer(args) for _ in range(2))

    def forward(self, tokens, labels):
        losses = []
        for layer in self.layers:
            tokens, moe_loss = layer(tokens)
            losses.append(moe_loss)
        return (tokens - labels).float().square().mean() + 0.01 * sum(losses)


def setup(args, config):
    torch.manual_seed(args.seed)
    model = Model(args)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, optimizer=optimizer, config=config)
    return engine


def train(engine, steps):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + engine.global_rank)
        tokens, labels = torch.randn(2, 2, 6, WIDTH, generator=generator)
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main(folder, config, *, mlp_type="standard"):
    args = argparse.Namespace(
        seed=1234, moe_expert_parallel_size=2, topk=2, mlp_type=mlp_type, local_rank=-1, deepspeed_config=None
    )
    engine = setup(args, config)
    first = train(engine, range(3))
    engine.save_checkpoint(folder, tag="three")
    rest = train(engine, range(3, 6))
    args.seed = 4321
    resumed = setup(args, config)
    resumed.load_checkpoint(folder)
    names = sorted({type(module).__module__.partition(".")[0] for module in engine.module.modules()})
    return {"first": first, "rest": rest, "resumed": train(resumed, range(3, 6)), "packages": names}
