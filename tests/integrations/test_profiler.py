"""DeepSpeed's flops profiler and wall-clock breakdown see the layer as they see native's."""

import re

import deepspeed
import pytest
import torch
import torch.utils.checkpoint
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from deepspeed.profiling.flops_profiler.profiler import get_module_macs
from ds_nets import (
    NUM_EXPERTS,
    D,
    NativeMoE,
    Net,
    batch,
    engine_of,
    local_state,
    mlp,
    native_and_ours,
    train,
    whole_state,
)
from torch import nn

from xmoe.integrations.deepspeed import MoE, init_distributed
from xmoe.testing import run_ranks

TOKENS, WIDTH = 6, 6
GATE = TOKENS * D * NUM_EXPERTS  # multiply-accumulates of the router's logits
ROW = 2 * D * WIDTH  # of one row in one expert


def _model_profile():
    init_distributed()
    nets = native_and_ours(whole_state(), drop_tokens=False, top2_2nd_expert_sampling=False)
    inputs, found = list(batch(0)), []
    for net in nets:
        for layer in (net.a, net.b):
            layer.set_deepspeed_parallelism()
        plain = net.eval()(*inputs)
        _, macs, params = get_model_profile(net, args=inputs, print_profile=False, as_string=False)
        assert torch.equal(net(*inputs), plain)
        profiler = FlopsProfiler(net)
        profiler.start_profile()
        _close(net(*inputs), plain)
        table = {name: (get_module_macs(m), m.__params__, m.__expert_params__) for name, m in net.named_modules()}
        profiler.end_profile()
        assert table[""] == (macs, params - table[""][2], table[""][2])
        rows = {name: [int(n) for n in getattr(net, name).deepspeed_moe.exp_counts] for name in "ab"}
        found.append((table, rows))
    (native, rows), (ours, our_rows) = found
    assert our_rows == rows
    assert [(name, *entry[1:]) for name, entry in ours.items()] == [(n, *entry[1:]) for n, entry in native.items()]
    for name in "ab":
        assert ours["first"] == native["first"]
        assert native[f"{name}.deepspeed_moe.gate"][0] == GATE
        # The product of the tokens with their shares, in the auxiliary loss, is none that DeepSpeed's profiler sees.
        assert ours[f"{name}.deepspeed_moe.gate"][0] == GATE + TOKENS * NUM_EXPERTS
        experts = f"{name}.deepspeed_moe.experts"
        assert native[experts][0] == NUM_EXPERTS * max(rows[name]) * ROW  # padded to the fullest expert
        assert ours[experts][0] == 2 * TOKENS * ROW
        for expert, number in enumerate(rows[name]):
            assert ours[f"{experts}.deepspeed_experts.{expert}"][0] == number * ROW


def _close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.dist
def test_the_models_profile_counts_the_rows_that_are_computed():
    run_ranks(1, _model_profile)


def _profile_of_an_engine(folder):
    tables, losses = [], []
    for name, layer in (("native", NativeMoE), ("ours", MoE), ("unprofiled", MoE)):
        torch.manual_seed(0)
        net = Net(layer, ep_size=2, drop_tokens=False, top2_2nd_expert_sampling=False)
        net.load_state_dict(local_state(whole_state(), net))
        file = f"{folder}/{name}"
        profiler = {"enabled": name != "unprofiled", "profile_step": 1, "detailed": True, "output_file": file}
        engine = engine_of(net, native=name == "native", flops_profiler=profiler)
        losses.append(train(engine, range(3)))
        assert not any(hasattr(m, "__flops__") or m._forward_hooks for m in net.a.modules())
        if name != "unprofiled":
            with open(file) as written:
                tables.append(written.read())
    assert losses[1] == pytest.approx(losses[2], abs=1e-6)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    return tables


@pytest.mark.dist
def test_the_engines_profile_has_every_expert_of_the_model(tmp_path):
    native, ours = run_ranks(2, _profile_of_an_engine, str(tmp_path))[0]
    for line in (
        r"params per GPU: .*",
        r"params of model: .*",
        r" *non-expert params of model: .*",
        r" *expert params.*",
    ):
        assert re.search(line, ours)[0] == re.search(line, native)[0]
    experts = 2 * NUM_EXPERTS * (2 * D * WIDTH + D + WIDTH)  # of both layers, on all ranks
    assert f"{experts / 1000:.2f} K" in re.search(r"\n +expert params of model: +(.*)", ours)[1]
    lines = ours.splitlines()
    below = [lines[i + 1] for i, line in enumerate(lines) if "(experts): Experts(" in line]  # what they cost
    assert len(below) == 2
    assert all(re.search(r"\d K?MACs", line) and " 0 MACs" not in line for line in below)


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant):
        super().__init__()
        self.moe = MoE(D, mlp(), 4, 1, 2, drop_tokens=False, top2_2nd_expert_sampling=False)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        output, aux, _ = torch.utils.checkpoint.checkpoint(self.moe, x, use_reentrant=self.use_reentrant)
        return output.square().sum() + aux


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_profiled_forward_is_recomputed_as_it_ran(use_reentrant):
    """The engine unhooks its profiler between forward and backward."""
    model = Checkpointed(use_reentrant=use_reentrant)
    gradients = []
    for profiled in (False, True):
        x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
        model.zero_grad()
        profiler = FlopsProfiler(model)
        if profiled:
            profiler.start_profile()
        loss = model(x)
        profiler.stop_profile()
        loss.backward()
        profiler.end_profile()
        gradients.append([x.grad, *[parameter.grad for parameter in model.parameters()]])
    for plain, found in zip(*gradients, strict=True):
        _close(found, plain)


def _logged_times(layer, *, native):
    logged = []
    deepspeed.runtime.engine.log_dist = lambda message, **_: logged.append(message)
    net = Net(layer, ep_size=2, drop_tokens=False, top2_2nd_expert_sampling=False)
    engine = engine_of(net, native=native, wall_clock_breakdown=True, accumulation=2)
    train(engine, range(4))
    times = [dict(re.findall(r"(\w+): ([\d.]+)", line)) for line in logged if "fwd_moe" in line]
    return [{name: float(value) for name, value in found.items()} for found in times]


@pytest.mark.dist
def test_the_engine_logs_the_times_of_each_steps_moe_layers():
    for times in run_ranks(2, _logged_times_by_xmoe):
        assert len(times) == 4
        for step in times:
            assert min(step.values()) > 0
            assert step["top_k"] + step["1st_a2a"] + step["2nd_a2a"] < step["fwd_moe"] < step["fwd"]


def _logged_times_by_xmoe():
    return _logged_times(MoE, native=False)


def _logged_times_by_deepspeed():
    return [_logged_times(layer, native=True) for layer in (NativeMoE, MoE)]


@pytest.mark.dist
def test_under_deepspeeds_initialize_times_add_up_as_natives_do():
    for times in (times for rank in run_ranks(2, _logged_times_by_deepspeed) for times in rank):
        for name in ("top_k", "1st_a2a", "2nd_a2a", "fwd_moe"):
            found = [step[name] for step in times]
            assert found == sorted(found)
            assert 0 < found[0] < found[-1]


def test_times_are_taken_only_where_asked_and_survive_a_failed_forward():
    layer = MoE(D, mlp(), 4, 1, 2, drop_tokens=False, top2_2nd_expert_sampling=False)
    parts = layer.deepspeed_moe, layer.deepspeed_moe.gate
    x = torch.randn(TOKENS, D)
    output, _, _ = layer(x)
    assert (parts[0].time_moe, parts[0].time_falltoall, parts[0].time_salltoall, parts[1].gate_time) == (0.0,) * 4
    dispatcher = parts[0].dispatcher
    for part in parts:
        part.wall_clock_breakdown = True
    with pytest.raises(RuntimeError):
        layer(torch.randn(TOKENS, D + 1))
    before = parts[0].time_moe
    assert torch.equal(layer(x)[0], output)
    assert 0 < before < parts[0].time_moe
    assert parts[0].dispatcher is dispatcher
