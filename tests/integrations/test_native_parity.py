"""Against DeepSpeed's own layer: the same losses in training, the same checkpoints in both directions."""

import os

import deepspeed
import pytest
import torch
import torch.distributed as dist
from ds_nets import (
    MoE,
    NativeMoE,
    Net,
    engine_of,
    gather_whole,
    init_distributed,
    local_state,
    native_and_ours,
    train,
    whole_state,
)

from xmoe.testing import run_ranks

pytestmark = pytest.mark.dist


def _trained_losses(cases):
    init_distributed()
    for ep_size, k, stage, options in cases:
        native, ours = native_and_ours(whole_state(k=k, **options), ep_size=ep_size, k=k, **options)
        expected = train(engine_of(native, native=True, stage=stage), range(3))
        found = train(engine_of(ours, stage=stage), range(3))
        what = f"ep_size {ep_size}, k {k}, ZeRO {stage}, {options}"
        worst = max(abs(a - b) for a, b in zip(expected, found, strict=True))
        assert worst < 1e-6, f"{what}: {expected} and {found}"
        assert len(set(expected)) == 3
        theirs, mine = gather_whole(native), gather_whole(ours)
        for key in theirs:
            torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=5e-5, msg=f"{what}: {key}")


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [(2, 1, 2, {}), (2, 2, 0, {}), (2, 3, 1, {})]),
        (4, [(2, 1, 0, {}), (2, 2, 1, {"capacity_factor": 0.5, "min_capacity": 1}), (2, 3, 2, {}), (1, 2, 1, {})]),
        (4, [(4, 1, 2, {}), (4, 2, 0, {"use_residual": True}), (4, 3, 1, {"drop_tokens": False}), ((2, 4), 2, 1, {})]),
    ],
    ids=["two ranks", "with replicas", "on all ranks"],
)
def test_strict_compat_trains_as_native(world, cases):
    """Every k and every ZeRO stage, experts with replicas and without, drops, a residual expert."""
    run_ranks(world, _trained_losses, cases, timeout_s=100)


def _files(folder):
    return sorted(os.path.relpath(os.path.join(at, f), folder) for at, _, names in os.walk(folder) for f in names)


def _cross_load(folder, cases):
    init_distributed()
    for stage, precision in cases:
        _load_both_ways(f"{folder}/{stage}-{precision}", stage, precision)


def _load_both_ways(folder, stage, precision):
    """Native saves after three steps and ours goes on, and the other way round."""
    options = {"stage": stage, "bf16": precision == "bf16"}
    if precision == "offload":
        options["zero_optimization"] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        options["zero_force_ds_cpu_optimizer"] = False
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    whole = whole_state()
    engines = {}
    for name, net in zip(("native", "ours"), native_and_ours(whole, ep_size=2), strict=True):
        engines[name] = engine_of(net, native=name == "native", **options)
        train(engines[name], range(3), dtype=dtype)
        engines[name].save_checkpoint(f"{folder}/{name}", tag="three", client_state={"note": 7})
    dist.barrier()
    assert _files(f"{folder}/native") == _files(f"{folder}/ours")
    uninterrupted = {name: train(engine, range(3, 6), dtype=dtype) for name, engine in engines.items()}
    for name, other in (("native", "ours"), ("ours", "native")):
        fresh = dict(zip(("native", "ours"), native_and_ours(whole_state(seed=9), ep_size=2), strict=True))[other]
        engine = engine_of(fresh, native=other == "native", **options)
        path, client_state = engine.load_checkpoint(f"{folder}/{name}")
        assert path is not None
        assert client_state["note"] == 7
        assert engine.global_steps == 3
        losses = train(engine, range(3, 6), dtype=dtype)
        bound = 1e-6 if precision != "bf16" else 2e-2  # bf16: the experts' sums run in another order
        assert max(abs(a - b) for a, b in zip(losses, uninterrupted[name], strict=True)) < bound, (stage, name)


@pytest.mark.parametrize(
    ("world", "cases"),
    [(4, [(0, "fp32"), (1, "fp32")]), (2, [(0, "bf16"), (1, "bf16"), (2, "offload")])],
    ids=["with replicas", "two ranks"],
)
def test_checkpoints_with_optimizer_state_load_both_ways(world, cases, tmp_path):
    run_ranks(world, _cross_load, str(tmp_path), cases)


def _reshard_weights(folder, stage, native_saves):
    """Weights saved at ep_size 2 load at 1 and 4; optimizer states of another ep_size are refused by one error."""
    init_distributed()
    native, ours = native_and_ours(whole_state(), ep_size=2)
    saving = engine_of(native, native=True, stage=stage) if native_saves else engine_of(ours, stage=stage)
    train(saving, range(2))
    saving.save_checkpoint(folder, tag="t")
    saved = gather_whole(saving.module)
    dist.barrier()
    errors = []
    for ep_size in (1, 4):
        net = Net(MoE, ep_size=ep_size, strict_compat=True)
        before = local_state(whole_state(seed=5), net)
        net.load_state_dict(before)
        engine = engine_of(net, stage=stage)
        with pytest.raises(ValueError, match=r"ep_size|expert-parallel") as refusal:
            engine.load_checkpoint(folder)
        errors.append(str(refusal.value).replace(folder, ""))
        assert all(torch.equal(v, before[key]) for key, v in net.state_dict().items()), "a refused load changed weights"
        engine.load_checkpoint(folder, load_module_only=True)
        found = gather_whole(net)
        assert all(torch.equal(found[key], saved[key]) for key in saved)
        # The optimizer's master copies follow: a step from here starts from the loaded weights.
        start = native_and_ours(saved, ep_size=ep_size)[1]
        expected = train(engine_of(start, stage=stage), range(7, 9))
        assert train(engine, range(7, 9)) == pytest.approx(expected, abs=1e-6)
    return errors


@pytest.mark.parametrize(("stage", "native_saves"), [(0, True), (1, False)])
def test_weights_reshard_and_foreign_optimizer_states_are_refused(stage, native_saves, tmp_path):
    answers = run_ranks(4, _reshard_weights, str(tmp_path), stage, native_saves)
    assert all(answer == answers[0] for answer in answers), "ranks raised different errors"
    assert all("load_module_only=True" in error for error in answers[0])


def _save(folder, ep_size, stage):
    engine = engine_of(Net(ep_size=ep_size), stage=stage)
    train(engine, range(1))
    engine.save_checkpoint(folder, tag="t")


def _load(folder, ep_size, stage, num_experts=8, reverse=False, **load):
    net = Net(ep_size=ep_size, num_experts=num_experts)
    parameters = list(net.parameters())
    if reverse:
        from ds_nets import config

        from xmoe.integrations.deepspeed import initialize

        init_distributed()
        engine = initialize(model=net, model_parameters=parameters[::-1], config=config(stage=stage))[0]
    else:
        engine = engine_of(net, stage=stage)
    engine.load_checkpoint(folder, tag="t", **load)


def _says(answers):
    texts = {f"{type(answer).__name__}: {answer}" for answer in answers}
    assert len(texts) == 1, texts
    return texts.pop()


def test_optimizer_states_that_do_not_fit_are_refused_by_one_error(tmp_path):
    folder = str(tmp_path)
    run_ranks(2, _save, folder, 2, 1)
    refused = [
        ((4, _load, folder, 2, 1), "2 data-parallel ranks, this job has 4"),
        ((2, _load, folder, 2, 0), "saved by a ZeRO optimizer"),
        ((2, _load, folder, 2, 1, 4), "[8, 8] experts"),
        ((2, _load, folder, 2, 1, 8, True), "another order"),
    ]
    for job, words in refused:
        said = _says(run_ranks(*job, return_exceptions=True))
        assert said.startswith("ValueError")
        assert words in said, said
    os.remove(tmp_path / "t" / "layer_0_expert_3_mp_rank_00_model_states.pt")
    (tmp_path / "t" / "mp_rank_00_model_states.pt").write_bytes(b"damaged")
    assert "cannot be read" in _says(run_ranks(2, _load, folder, 2, 1, return_exceptions=True))
    os.remove(tmp_path / "t" / "mp_rank_00_model_states.pt")
    assert "does not exist" in _says(run_ranks(2, _load, folder, 2, 1, return_exceptions=True))


def test_stage_two_goes_on_from_stage_one(tmp_path):
    run_ranks(2, _save, str(tmp_path), 2, 1)
    assert run_ranks(2, _load, str(tmp_path), 2, 2) == [None, None]


def _plain_deepspeed():
    """The layer under unmodified ``deepspeed.initialize``: groups, training and the state dict."""
    net = Net(ep_size=2)
    engine = engine_of(net, native=True, stage=1, kind="SGD", lr=0.1)
    losses = train(engine, range(3))
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    return losses


def test_the_layer_trains_under_plain_deepspeed_initialize():
    losses = run_ranks(2, _plain_deepspeed)[0]
    assert losses[-1] < 100
    assert NativeMoE is deepspeed.moe.layer.MoE
