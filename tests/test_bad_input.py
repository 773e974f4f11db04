"""Wrong input: one error that names the setting, the value and the remedy; on every rank the same, and no hang."""

import json
import os
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from xmoe import ConfigError, MoE, initialize
from xmoe.config import XMoEConfig, parse_section
from xmoe.integrations.deepspeed import init_distributed, moe_param_groups
from xmoe.testing import run_ranks

D = 8
BAD_RANK = 2


def mlp():
    return nn.Sequential(nn.Linear(D, 4), nn.GELU(), nn.Linear(4, D))


class SharedExpertMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.expert_up = nn.Linear(D, D)


# Arguments of the constructor, and what the error must say beside "must", "needs" or what is allowed.
CONSTRUCTOR = {
    "experts_not_divisible_by_ep_size": ({"num_experts": 6, "ep_size": 4}, ["num_experts (6)", "ep_size (4)"]),
    "k_beyond_the_experts": ({"num_experts": 4, "k": 5}, ["k (5)", "num_experts (4)"]),
    "k_zero": ({"k": 0}, ["k (0)", "positive integer"]),
    "k_no_integer": ({"k": 1.5}, ["k (1.5)", "positive integer"]),
    "num_experts_a_list": ({"num_experts": [4]}, ["num_experts ([4])", "positive integer"]),
    "num_experts_negative": ({"num_experts": -4}, ["num_experts (-4)", "positive integer"]),
    "ep_size_zero": ({"ep_size": 0}, ["ep_size (0)", "positive integer"]),
    "ep_size_true": ({"ep_size": True}, ["ep_size (True)", "positive integer"]),
    "hidden_size_text": ({"hidden_size": "8"}, ["hidden_size ('8')", "positive integer"]),
    "unknown_noise": ({"noisy_gate_policy": "jitter"}, ["noisy_gate_policy ('jitter')", "'Jitter'"]),
    "capacity_zero": ({"capacity_factor": 0}, ["capacity_factor (0)", "positive"]),
    "eval_capacity_negative": ({"eval_capacity_factor": -1.0}, ["eval_capacity_factor (-1.0)", "positive"]),
    "capacity_text": ({"capacity_factor": "1"}, ["capacity_factor ('1')", "number"]),
    "min_capacity_negative": ({"min_capacity": -1}, ["min_capacity (-1)", "negative"]),
    "gate_without_shared_mlp": ({"shared_gate": True}, ["shared_gate=True", "shared_mlp"]),
    "expert_in_a_shared_name": ({"shared_mlp": SharedExpertMLP()}, ["'expert_up.weight'", "rename"]),
    "local_dispatch_between_ranks": ({"dispatch": "local", "num_experts": 4, "ep_size": 2}, ["'local'", "ep_size 2"]),
    "unknown_dispatch": ({"dispatch": "fast"}, ["MoE.dispatch is 'fast'", "'flat'"]),
    "jitter_of_one": ({"input_jitter": 1.0}, ["MoE.input_jitter is 1.0", "less than 1"]),
    "negative_scale": ({"routed_scaling_factor": -1.0}, ["MoE.routed_scaling_factor is -1.0", "greater than 0"]),
    "timeout_text": ({"collective_timeout_s": "5"}, ["MoE.collective_timeout_s is '5'", "number"]),
}


@pytest.mark.parametrize("name", CONSTRUCTOR)
def test_wrong_arguments_of_the_layer(name):
    given, words = CONSTRUCTOR[name]
    with pytest.raises(ValueError) as error:  # noqa: PT011
        MoE(**{"hidden_size": D, "expert": mlp(), "num_experts": 4, **given})
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


SECTION = {
    "unknown_key": ({"dispach": "flat"}, "xmoe.dispach", "unknown key; allowed in 'xmoe' are: aux_loss_coefficient"),
    "wrong_type": ({"z_loss_coefficient": "0.1"}, "xmoe.z_loss_coefficient", "number"),
    "wrong_choice": ({"score_function": "tanh"}, "xmoe.score_function", "'softmax' or 'sigmoid'"),
    "negative": ({"aux_loss_coefficient": -0.1}, "xmoe.aux_loss_coefficient", "greater than or equal to 0"),
    "not_a_number": ({"z_loss_coefficient": float("nan")}, "xmoe.z_loss_coefficient", "finite"),
    "text_for_a_flag": ({"strict_compat": "yes"}, "xmoe.strict_compat", "boolean"),
    "constructor_only": ({"correction_bias": True}, "xmoe.correction_bias", "constructor-only"),
    "experts_in_the_json": ({"num_experts": 8}, "xmoe.num_experts", "pass num_experts=... to xmoe.MoE"),
    "a_list": ([], "xmoe", "must be a JSON object"),
}


@pytest.mark.parametrize("name", SECTION)
def test_wrong_sections(name):
    section, path, words = SECTION[name]
    with pytest.raises(ConfigError) as error:
        parse_section("xmoe", XMoEConfig, section)
    assert error.value.path == path
    assert words in str(error.value)
    assert "\n" not in str(error.value)


GOOD = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 10**6,
}


def model(**options):
    net = nn.Sequential(nn.Linear(D, D), MoE(D, mlp(), **{"num_experts": 4, "ep_size": 2, **options}))
    net.forward = lambda x: net[1](net[0](x))[0].sum()
    return net


def without_experts(net):
    return torch.optim.SGD(net[0].parameters(), lr=0.1)


def unmarked_groups(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


# On one rank: options of the layer, keys of the config, arguments of initialize; and what every rank's error says.
ON_ONE_RANK = {
    "unknown_key": ({}, {"xmoe": {"expert_parallel": 2}}, {}, ["xmoe.expert_parallel is 2", "unknown key"]),
    "wrong_type": ({}, {"xmoe": {"input_jitter": "1e-2"}}, {}, ["xmoe.input_jitter is '1e-2'", "number"]),
    "wrong_choice": ({}, {"xmoe": {"dispatch": "ring"}}, {}, ["xmoe.dispatch is 'ring'", "'flat'"]),
    "negative": ({}, {"xmoe": {"collective_timeout_s": -1}}, {}, ["xmoe.collective_timeout_s is -1", "greater than 0"]),
    "constructor_only": ({}, {"xmoe": {"k": 2}}, {}, ["xmoe.k is 2", "constructor-only", "xmoe.MoE"]),
    "section_of_text": ({}, {"xmoe": "flat"}, {}, ["xmoe is 'flat'", "JSON object"]),
    "constructor_against_json": (
        {"input_jitter": 0.1},
        {"xmoe": {"input_jitter": 0.2}},
        {},
        ["xmoe.input_jitter is 0.2", "layer '1'", "0.1", "one place"],
    ),
    "local_dispatch": ({}, {"xmoe": {"dispatch": "local"}}, {}, ["xmoe.dispatch is 'local'", "ep_size 2", "'flat'"]),
    "ep_size_and_the_world": (
        {"num_experts": 6, "ep_size": 3},
        {},
        {},
        ["ep_size (3)", "layer '1'", "number of ranks (4)", "divides 4"],
    ),
    "zero_3": ({}, {"zero_optimization": {"stage": 3}}, {}, ["zero_optimization.stage is 3", "AutoEP"]),
    "zero_stage_text": ({}, {"zero_optimization": {"stage": "2"}}, {}, ["zero_optimization.stage is '2'", "0, 1 or 2"]),
    "zero_no_object": ({}, {"zero_optimization": True}, {}, ["zero_optimization is True", "JSON object"]),
    "no_config": ({}, {}, {"config": None}, ["config is None", "dict or a file's path"]),
    "config_a_number": ({}, {}, {"config": 7}, ["config is 7", "dict, or a file's path"]),
    "config_missing": ({}, {}, {"config": "missing.json"}, ["missing.json", "No such file"]),
    "config_a_folder": ({}, {}, {"config": "."}, ["'.'", "directory"]),
    "config_no_json": ({}, {}, {"config": "broken.json"}, ["broken.json", "not valid JSON"]),
    "config_a_list": ({}, {}, {"config": "list.json"}, ["list.json", "JSON object"]),
    "config_of_other_bytes": ({}, {}, {"config": "binary.json"}, ["binary.json", "not valid JSON"]),
    "no_model": ({}, {}, {"model": None}, ["model (None)", "torch.nn.Module"]),
    "a_model_class": ({}, {}, {"model": nn.Linear}, ["model (type)", "torch.nn.Module"]),
    "optimizer_without_experts": ({}, {}, {"optimizer": without_experts}, ["not hold 8", "moe_param_groups(model)"]),
    "optimizer_without_groups": ({}, {}, {"optimizer": unmarked_groups}, ["'moe': True", "moe_param_groups(model)"]),
    "group_without_name": (
        {},
        {},
        {"model_parameters": lambda net: [{"params": list(net.parameters())}]},
        ["parameter group 0 has no 'name'", "add 'name'"],
    ),
    "parameters_without_experts": (
        {},
        {},
        {"model_parameters": lambda net: list(net[0].parameters())},
        ["not hold 8", "moe_param_groups(model)"],
    ),
    "another_config": (
        {},
        {"gradient_clipping": 0.5},
        {},
        ["config differs between ranks", "every rank must be given"],
    ),
    "another_section": ({}, {"xmoe": {"input_jitter": 0.5}}, {}, ["config differs between ranks", "rank 2"]),
    "another_model": (
        {"num_experts": 8},
        {},
        {},
        ["num_experts=4 on rank 0 and num_experts=8 on rank 2", "same settings"],
    ),
}


def _initialize_all(names, bad_rank, folder):
    """For each case what this rank was told; then a good start, to show that nothing was left half done."""
    os.chdir(folder)
    init_distributed()
    deepspeed.utils.logger.setLevel("ERROR")
    said = {}
    for name in names:
        options, keys, arguments, _ = ON_ONE_RANK[name] if dist.get_rank() == bad_rank else ({}, {}, {}, [])
        net = model(**options)
        call = {"model": net, "config": {**GOOD, **keys}}
        for key, value in arguments.items():
            is_builder = callable(value) and key in ("optimizer", "model_parameters")
            call[key] = value(net) if is_builder else value
        try:
            initialize(**call)
        except ValueError as error:
            said[name] = f"{type(error).__name__}: {error}"
    engine = initialize(model=model(), config=GOOD)[0]
    engine.backward(engine(torch.ones(3, D)))
    engine.step()
    return said


@pytest.mark.dist
def test_one_wrong_rank_is_the_same_error_on_every_rank(tmp_path):
    (tmp_path / "broken.json").write_text('{"xmoe": ')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00{")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    answers = run_ranks(4, _initialize_all, list(ON_ONE_RANK), BAD_RANK, str(tmp_path), timeout_s=100)
    for name, (_, _, _, words) in ON_ONE_RANK.items():
        told = [answer.get(name) for answer in answers]
        assert told[0] is not None, f"{name}: no error"
        assert told == [told[0]] * 4, f"{name}: ranks were told different things: {told}"
        assert all(word in told[0] for word in words), f"{name}: {told[0]}"
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_there_are_at_least_25_wrong_configurations():
    assert len(ON_ONE_RANK) >= 25


def test_an_optimizer_of_good_groups_passes():
    net = model()
    groups = moe_param_groups(net)
    assert sum(len(group["params"]) for group in groups) == len(list(net.parameters()))


def _config_from_arguments(path):
    class Arguments:
        deepspeed_config = path

    engine = initialize(Arguments(), model(ep_size=1))[0]
    assert Arguments.deepspeed_config == path
    return engine.zero_optimization_stage()


@pytest.mark.dist
def test_the_config_may_stand_in_the_arguments_as_with_deepspeed(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(GOOD))
    assert run_ranks(1, _config_from_arguments, str(path)) == [1]
    assert [Path(p).name for p in os.listdir(tmp_path)] == ["ds.json"]


def test_triton_kernels_that_cannot_run_are_refused_by_name(monkeypatch):
    layer = MoE(8, nn.Linear(8, 8), 4, k=2, drop_tokens=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"xmoe.kernels is 'triton': the layer is on a CPU. Use 'auto' or 'torch'"):
        layer.configure(XMoEConfig(kernels="triton"), name="0")
    with pytest.raises(ValueError, match=r"xmoe.kernels is 'triton': the layer is on a CPU"):
        MoE(8, nn.Linear(8, 8), 4, k=2, kernels="triton", drop_tokens=False)(torch.randn(3, 8))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="there is no module triton"):
        layer.configure(XMoEConfig(kernels="triton"), name="0")
