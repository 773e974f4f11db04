"""``deepspeed.init_inference`` and DeepSpeed's model surgery take the layer as they take native's."""

import deepspeed
import pytest
import torch
from deepspeed.module_inject.containers.megatron_gpt import MegatronLayerPolicy
from deepspeed.module_inject.containers.megatron_gpt_moe import MegatronMoELayerPolicy
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from ds_nets import D, NativeMoE, Net, batch, engine_of, init_distributed, local_state, mlp, train, whole_state
from torch import nn

from xmoe.integrations.deepspeed import MoE
from xmoe.testing import assert_close, run_ranks

PLAIN = {"drop_tokens": False, "top2_2nd_expert_sampling": False}
MOE = {"enabled": True, "ep_size": 2, "num_experts": [8], "type": "standard"}


class Outputs(nn.Module):
    """``Net`` without the loss: two MoE layers in a row."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        h = self.net.first(x)
        return h + self.net.b(h + self.net.a(h)[0])[0]


def _loaded(layer, *, ep_size):
    net = Net(layer, ep_size=ep_size, **PLAIN)
    net.load_state_dict(local_state(whole_state(), net))
    return Outputs(net).eval()


def _inference(dtype, ep_size):
    init_distributed()
    x, _ = batch(0)
    plain = _loaded(MoE, ep_size=ep_size)
    with torch.no_grad():
        expected = plain.to(dtype)(x.to(dtype))
    found = []
    for options in ({}, {"moe": dict(MOE, ep_size=ep_size)}):
        engine = deepspeed.init_inference(_loaded(MoE, ep_size=ep_size), dtype=dtype, **options)
        assert {p.dtype for p in engine.module.parameters()} == {dtype}
        with torch.no_grad():
            assert torch.equal(engine(x.to(dtype)), expected)
            found.append(engine(x[:, :0].to(dtype)).shape)
    assert set(found) == {(1, 0, D)}
    if dtype != torch.float32:  # rounded inputs of the second layer may choose another expert
        return
    native = _loaded(NativeMoE, ep_size=ep_size)
    for layer in (native.net.a, native.net.b):  # ours makes its groups when it is first called
        layer.set_deepspeed_parallelism()
    with torch.no_grad():
        assert_close(expected, deepspeed.init_inference(native, dtype=dtype)(x))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "ep_size", "dtype"),
    [(1, 1, torch.bfloat16), (2, 2, torch.float32), (2, 2, torch.bfloat16), (4, 2, torch.float32)],
)
def test_the_inference_engine_gives_the_models_outputs(world, ep_size, dtype):
    run_ranks(world, _inference, dtype, ep_size)


def _trained_then_inferred(folder):
    trained = engine_of(_loaded(MoE, ep_size=2).net, stage=1)
    train(trained, range(2))
    trained.save_checkpoint(folder, tag="two")
    trained.eval()
    inputs = batch(9)
    with torch.no_grad():
        expected = trained(*inputs)
        direct = deepspeed.init_inference(trained.module, dtype=torch.float32, moe=dict(MOE))
        assert torch.equal(direct(*inputs), expected)
    net = Net(MoE, ep_size=2, **PLAIN).eval()
    state = torch.load(f"{folder}/two/mp_rank_00_model_states.pt", weights_only=False)["module"]
    if net.a.deepspeed_moe.ep_group is None:  # DeepSpeed looks the rank's experts up in its groups
        for layer in (net.a, net.b):
            layer.set_deepspeed_parallelism()
    DeepSpeedEngine.load_moe_state_dict(
        folder, "two", state, old_moe_load=False, model=net, checkpoint_engine=TorchCheckpointEngine()
    )
    net.load_state_dict(state)
    loaded = deepspeed.init_inference(net, dtype=torch.float32, moe=dict(MOE))
    with torch.no_grad():
        assert torch.equal(loaded(*inputs), expected)


@pytest.mark.dist
def test_a_trained_model_and_its_checkpoint_are_inferred_from(tmp_path):
    run_ranks(2, _trained_then_inferred, str(tmp_path))


class MegatronMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(D, 12), nn.Linear(12, D)

    def forward(self, x):
        return self.dense_4h_to_h(nn.functional.gelu(self.dense_h_to_4h(x))), None


@pytest.mark.parametrize("policy", [MegatronLayerPolicy, MegatronMoELayerPolicy])
@pytest.mark.parametrize("moe_type", ["standard", "residual"])
def test_injection_policies_find_the_experts_weights(policy, moe_type):
    found = []
    for layer in (NativeMoE, MoE):
        torch.manual_seed(0)
        block = nn.Module()
        block.mlp = layer(D, MegatronMLP(), 4, use_residual=moe_type == "residual")
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.normal_()
        if moe_type == "residual":  # as Megatron's layer holds it
            moe = block.mlp
            block.mlp = nn.Module()
            block.mlp.moe, block.mlp.mlp, block.mlp.coefficient = moe, moe.mlp, moe.coefficient
        found.append([_flat(part) for part in policy(block).mlp(moe_type)])
    assert [len(part) for part in found[1]] == [4] * 4 + ([1] * 5 if moe_type == "residual" else [])
    for native, ours in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(native, ours, strict=True))


def _flat(weights):
    return weights if isinstance(weights, list) else [weights]


def _without_a_process_group():
    x = torch.randn(2, 3, D)
    layer = MoE(D, mlp(), 4, 1, 2, **PLAIN).eval()
    with pytest.raises(RuntimeError, match="ep_size 2 and no process group exists"):
        MoE(D, mlp(), 4, 2, 2, **PLAIN)(x)
    return torch.equal(layer(x)[0], layer(x.reshape(6, D))[0].view(2, 3, D))


@pytest.mark.dist
def test_without_a_process_group_a_layer_of_one_rank_works_and_others_say_what_is_missing():
    assert run_ranks(1, _without_a_process_group, init=False) == [True]
