"""``xmoe.MoE`` is DeepSpeed's layer to everyone who asks: users, the engine, deepspeed.moe.utils, pickle."""

import copy
import inspect
import io

import deepspeed
import pytest
import torch
from deepspeed.moe import experts as native_experts
from deepspeed.moe import layer as native_layer
from deepspeed.moe import sharded_moe as native_moe
from deepspeed.moe import utils as native_utils
from ds_nets import (
    D,
    NativeMoE,
    Net,
    engine_of,
    init_distributed,
    local_state,
    mlp,
    native_and_ours,
    train,
    whole_state,
)
from torch import nn

import xmoe
from xmoe.config import XMoEConfig
from xmoe.integrations.deepspeed import MoE, initialize, moe_param_groups, replace_moe_layers
from xmoe.testing import run_ranks


def test_positional_arguments_are_natives_and_ours_are_keyword_only():
    native = list(inspect.signature(NativeMoE.__init__).parameters.values())
    ours = list(inspect.signature(MoE.__init__).parameters.values())
    for theirs, mine in zip(native, ours, strict=False):
        assert (mine.name, mine.kind, mine.default) == (theirs.name, theirs.kind, theirs.default)
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in ours[len(native) :])
    assert list(inspect.signature(MoE.forward).parameters) == list(inspect.signature(NativeMoE.forward).parameters)


def test_every_key_of_the_section_can_be_given_to_one_layer():
    assert set(XMoEConfig.model_fields) <= set(inspect.signature(MoE.__init__).parameters)


def test_initialize_takes_deepspeeds_arguments_in_deepspeeds_order():
    native = [(p.name, p.default) for p in inspect.signature(deepspeed.initialize).parameters.values()]
    assert [(p.name, p.default) for p in inspect.signature(initialize).parameters.values()] == native


@pytest.mark.parametrize("use_residual", [False, True])
def test_state_dict_and_attributes_are_natives(use_residual):
    torch.manual_seed(3)
    native = NativeMoE(D, mlp(), 4, 1, 2, use_residual=use_residual)
    torch.manual_seed(3)
    ours = MoE(D, mlp(), 4, 1, 2, use_residual=use_residual)
    native_state, our_state = native.state_dict(), ours.state_dict()
    assert list(our_state) == list(native_state)
    # The same draws, so the same seed gives the same layer.
    assert all(torch.equal(our_state[key], native_state[key]) for key in native_state)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in native.named_parameters()]
    for name in ("use_residual", "enable_expert_tensor_parallelism", "ep_size", "expert_group_name", "num_experts"):
        assert getattr(ours, name) == getattr(native, name)
    assert ours.num_local_experts == native.num_local_experts
    for part, theirs in (("gate", native.deepspeed_moe.gate), ("experts", native.deepspeed_moe.experts)):
        missing = {name for name in vars(theirs) if not name.startswith("_") and not name.isupper()}
        missing -= {name for name in missing if hasattr(getattr(ours.deepspeed_moe, part), name)}
        assert not missing, f"{part} lacks native attributes {missing}"
    missing = {name for name in vars(native.deepspeed_moe) if not name.startswith("_")}
    assert not {name for name in missing if not hasattr(ours.deepspeed_moe, name)}


def test_the_engine_recognises_every_part():
    layer = MoE(D, mlp(), 4, 2, 2)
    assert isinstance(layer, native_layer.MoE)
    assert isinstance(layer.deepspeed_moe, native_moe.MOELayer)
    assert isinstance(layer.deepspeed_moe.gate, native_moe.TopKGate)
    assert isinstance(layer.deepspeed_moe.experts, native_experts.Experts)
    assert isinstance(layer.deepspeed_moe.gate.wg, nn.Linear)
    assert isinstance(layer.deepspeed_moe.experts.deepspeed_experts, nn.ModuleList)
    assert native_utils.has_moe_layers(nn.Sequential(layer)) == (True, 4)
    shared, experts = native_utils.split_params_into_shared_and_expert_params(list(layer.parameters()))
    assert {p.group_name for p in experts} == {"ep_size_2"}
    assert all(native_utils.is_moe_param(p) for p in experts)
    assert len(experts) == 2 * 4
    assert [id(p) for p in shared] == [id(layer.deepspeed_moe.gate.wg.weight)]
    groups = native_utils.configure_moe_param_groups(list(layer.parameters()))
    assert [group.get("moe", False) for group in groups if group["params"]] == [False, True]


class TupleLinear(nn.Linear):
    """Returns what Megatron's ParallelMLP does: the output and a bias."""

    def forward(self, x):
        return super().forward(x), self.bias


def _equal_native_with_residual():
    init_distributed()
    for expert in (mlp, lambda: TupleLinear(D, D)):
        for k in (1, 2, 3):
            torch.manual_seed(0)
            native = NativeMoE(D, expert(), 4, 1, k, use_residual=True)
            ours = MoE(D, expert(), 4, 1, k, use_residual=True, strict_compat=True)
            ours.load_state_dict(native.state_dict())
            _compare(native, ours)


def _compare(native, ours):
    x = torch.randn(2, 5, D)
    results = []
    for layer in (native, ours):
        layer.set_deepspeed_parallelism()
        torch.manual_seed(5)
        inputs = x.clone().requires_grad_()
        output, aux, counts = layer(inputs)
        (output.square().sum() + aux).backward()
        results.append((output, aux, counts, inputs.grad, *[p.grad for p in layer.parameters()]))
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if theirs is None else theirs, rtol=1e-5, atol=1e-6)
    output, aux, counts = ours(x)
    assert (aux.dim(), aux.dtype, aux.requires_grad) == (0, torch.float32, True)
    assert (counts.dtype, counts.shape, counts.requires_grad) == (torch.int64, (4,), False)
    assert output.shape == x.shape
    with pytest.raises(AssertionError, match="ep_group"):  # as DeepSpeed's
        ours.set_deepspeed_parallelism()


@pytest.mark.dist
def test_residual_and_tuple_experts_equal_native():
    run_ranks(1, _equal_native_with_residual)


def test_settings_written_to_the_gate_take_effect():
    layer = MoE(D, mlp(), 4, 1, 2, min_capacity=0)
    gate = layer.deepspeed_moe.gate
    assert (gate.k, gate.capacity_factor, gate.use_rts, gate.noisy_gate_policy) == (2, 1.0, True, None)
    gate.capacity_factor = 0.5
    gate.top2_2nd_expert_sampling = False
    _, _, counts = layer(torch.randn(16, D))
    load = layer.deepspeed_moe.take_counters()
    assert torch.equal(load.routed_E, counts.clamp(max=4))
    gate.k = 1
    assert int(layer(torch.randn(16, D))[2].sum()) == 16
    with pytest.raises(ValueError, match="k"):
        gate.k = 5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: torch.load(_saved(m), weights_only=False)])
def test_a_copied_or_pickled_layer_keeps_weights_and_expert_marks(copied):
    layer = MoE(D, mlp(), 4, 2, 2, use_residual=True, correction_bias=True)
    twin = copied(nn.Sequential(layer))[0]
    assert all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), twin.state_dict().values(), strict=True))
    marked = [native_utils.is_moe_param(p) for p in layer.parameters()]
    assert [native_utils.is_moe_param(p) for p in twin.parameters()] == marked
    assert {getattr(p, "group_name", None) for p in twin.parameters()} == {None, "ep_size_2"}


def _saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


def test_a_layer_can_be_copied_after_a_forward():
    layer = MoE(D, mlp(), 4, 1, 2, drop_tokens=False, top2_2nd_expert_sampling=False)
    x = torch.randn(3, D)
    output, _, _ = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x)[0], output)


def _replace(k):
    init_distributed()
    whole = whole_state(k=k)
    native, ours = native_and_ours(whole, ep_size=2, k=k)
    engine = engine_of(native, native=True, kind="SGD", lr=0.1)
    expected = train(engine, range(2))
    live = Net(NativeMoE, ep_size=2, k=k)
    live.load_state_dict(local_state(whole, live))
    parameters = list(live.parameters())
    assert replace_moe_layers(live, strict_compat=True) == 2
    assert [id(p) for p in live.parameters()] == [id(p) for p in parameters]
    assert list(live.state_dict()) == list(ours.state_dict())
    assert train(engine_of(live, kind="SGD", lr=0.1), range(2)) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="belongs to a DeepSpeed engine already"):
        replace_moe_layers(native)


@pytest.mark.dist
@pytest.mark.parametrize("k", [1, 2])
def test_live_layers_are_replaced_with_their_very_parameters(k):
    run_ranks(2, _replace, k)


def test_a_layer_that_stands_in_two_places_is_replaced_once():
    shared = NativeMoE(D, mlp(), 4)
    model = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])
    assert replace_moe_layers(model) == 1
    assert model[0][0] is model[1][0]
    with pytest.raises(ValueError, match="wrap it"):
        replace_moe_layers(shared)


def _breakdown():
    net = Net(ep_size=2)
    engine = engine_of(net, wall_clock_breakdown=True)
    train(engine, range(1))
    assert len(engine.gate_modules) == len(engine.moe_layers) == 2
    assert engine.num_experts == [8, 8]
    assert sorted(g["name"] for g in engine.optimizer.param_groups if g.get("moe")) == ["ep_size_2"]


@pytest.mark.dist
def test_the_engines_forward_breakdown_finds_its_timers():
    run_ranks(2, _breakdown)


def test_weights_loaded_by_assignment_keep_expert_marks():
    with torch.device("meta"):
        net = Net(ep_size=2)
    net.load_state_dict(Net(ep_size=2).state_dict(), assign=True)
    groups = moe_param_groups(net)
    assert [len(group["params"]) for group in groups if group.get("moe")] == [32]


def _assigned_then_trained():
    init_distributed()
    whole = whole_state()
    losses = []
    for assign in (False, True):
        net = Net(ep_size=2)
        net.load_state_dict(local_state(whole, net), assign=assign)
        engine = engine_of(net, native=assign, kind="SGD", lr=0.1)
        losses.append(train(engine, range(2)))
    assert losses[0] == losses[1]


@pytest.mark.dist
def test_experts_loaded_by_assignment_are_not_averaged_as_dense_weights():
    run_ranks(2, _assigned_then_trained)


def _patched():
    init_distributed()
    native_layer.MoE = MoE
    engine = engine_of(Net(native_layer.MoE, ep_size=2))
    assert all(loss > 0 for loss in train(engine, range(2)))


@pytest.mark.dist
def test_the_name_in_deepspeed_may_be_replaced_by_ours():
    """For training scripts that cannot be changed: ``deepspeed.moe.layer.MoE = xmoe.MoE``."""
    run_ranks(2, _patched)


def test_unique_names_and_missing_names_of_parameter_groups():
    net = Net(ep_size=2)
    groups = moe_param_groups(net, unique_names=True, lr=0.5)
    assert [(g["name"], g.get("moe", False), g["unique_name"], g["lr"]) for g in groups] == [
        ("dense", False, "dense", 0.5),
        ("ep_size_2", True, "dense/ep_size_2", 0.5),
    ]
    decay = {"params": [p for p in net.parameters() if p.dim() > 1], "name": "decay", "weight_decay": 0.1}
    rest = {"params": [p for p in net.parameters() if p.dim() == 1], "name": "rest", "weight_decay": 0.0}
    groups = moe_param_groups([decay, rest], unique_names=True)
    names = [g["unique_name"] for g in groups]
    assert len(set(names)) == len(names) == 4
    assert sum(len(g["params"]) for g in groups) == len(list(net.parameters()))
    del rest["name"]
    with pytest.raises(ValueError, match=r"parameter group 1 has no 'name'"):
        moe_param_groups([decay, rest])


def test_public_names_are_the_integrations():
    assert xmoe.MoE is MoE
    assert xmoe.initialize is initialize
    assert xmoe.replace_moe_layers is replace_moe_layers
