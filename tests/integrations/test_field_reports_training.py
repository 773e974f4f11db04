"""What users of MoE training reported in public: gradients, optimizers, losses, checkpoints under DeepSpeed.

Each test names its thread; docs/tested-reports.md is the map. deepspeedai/DeepSpeed is ``DeepSpeed``.
"""

import functools
import re

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from ds_nets import (
    PLAIN,
    D,
    MoE,
    NativeMoE,
    Net,
    TensorParallel,
    batch,
    config,
    engine_of,
    gather_whole,
    init_distributed,
    local_state,
    mlp,
    reference_loss,
    reference_steps,
    train,
    whole_state,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from xmoe.integrations.deepspeed import initialize, moe_param_groups, replace_moe_layers
from xmoe.testing import assert_close, run_ranks

pytestmark = pytest.mark.dist


@functools.cache
def _reference(steps, tokens, lr):
    """Parameters after ``steps`` steps of SGD in one process, and the losses of this rank's batches."""
    state, losses = {key: value.double() for key, value in whole_state().items()}, []
    for step in range(steps):
        batches = [batch(step, r, tokens=tokens) for r in range(dist.get_world_size())]
        x, y = batches[dist.get_rank()]
        losses.append(float(reference_loss(state, x.double(), y.double(), k=2)))
        state, _ = reference_steps(state, [[batches]], k=2, lr=lr)
    return state, losses


def _after_steps(ep_size, stage, steps, *, tokens=6, lr=0.05):
    """(parameters, losses, reference's parameters, its losses), trained by SGD."""
    init_distributed()
    net = Net(ep_size=ep_size, **PLAIN)
    net.load_state_dict(local_state(whole_state(), net))
    engine = engine_of(net, stage=stage, kind="SGD", lr=lr)
    losses = train(engine, range(steps), tokens=tokens)
    return gather_whole(net), losses, *_reference(steps, tokens, lr)


def _gradient_scale():
    for stage in (0, 1, 2):
        moved = []
        for ep_size in (1, 4):
            found, _, expected, _ = _after_steps(ep_size, stage, 1, lr=1.0)
            for key in expected:
                assert_close(found[key], expected[key], what=f"stage {stage} ep_size {ep_size} {key}")
            moved.append(found)
        for key in moved[0]:
            torch.testing.assert_close(moved[0][key], moved[1][key], rtol=1e-5, atol=1e-6)


def test_expert_gradients_do_not_scale_with_the_expert_parallel_size():
    """DeepSpeed#6545, DeepSpeed#5618, DeepSpeed#5259, DeepSpeed#4957, NVIDIA/Megatron-LM#5956."""
    run_ranks(4, _gradient_scale)


def _three_steps():
    for ep_size in (2, 4):
        _, losses, _, expected = _after_steps(ep_size, 1, 3)
        assert losses == pytest.approx(expected, rel=1e-5), ep_size


def test_losses_of_three_sgd_steps_equal_one_process():
    """pytorch/pytorch#160285: expert gradients twice too large at ep 2, which Adam hides."""
    run_ranks(4, _three_steps)


def _norm_over_ranks(bf16):
    init_distributed()
    net = nn.Sequential(MoE(D, mlp(), 4, 2, 1))
    net.forward = lambda x: net[0](x)[0].float().sum()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    engine = engine_of(net, kind="SGD", lr=1.0, clip=1.0, bf16=bf16)
    first = 1 + 2 * dist.get_rank()  # experts 0 to 3 get gradients 1 to 4
    for number, expert in enumerate(net[0].deepspeed_moe.experts.deepspeed_experts):
        gradient = torch.zeros_like(expert[0].bias)
        gradient[0] = first + number
        expert[0].bias.register_hook(lambda grad, gradient=gradient: gradient)
        expert[2].bias.register_hook(torch.zeros_like)
    engine.backward(engine(torch.zeros(1, 4, D, dtype=torch.bfloat16 if bf16 else torch.float32)))
    # Two ranks' sum, divided by two: each expert lives on one rank.
    engine.step()
    norm = float(engine.get_global_grad_norm())
    steps = [float(-expert[0].bias[0]) for expert in net[0].deepspeed_moe.experts.deepspeed_experts]
    return norm, steps


@pytest.mark.parametrize("bf16", [False, True])
def test_clipping_uses_the_norm_over_all_ranks_experts(bf16):
    """DeepSpeed#8475, DeepSpeed#8478: fp32 clips by a mean of per-rank norms; bf16 leaves the experts out."""
    (norm_0, steps_0), (norm_1, steps_1) = run_ranks(2, _norm_over_ranks, bf16)
    assert norm_0 == norm_1
    gradients = [value / 2 for value in (1, 2, 3, 4)]
    true = sum(value * value for value in gradients) ** 0.5
    assert norm_0 == pytest.approx(true, rel=1e-5)
    assert steps_0 + steps_1 == pytest.approx([value / true for value in gradients], rel=1e-2 if bf16 else 1e-4)


def _every_parameter_steps():
    for stage in (1, 2):
        found, _, expected, _ = _after_steps(2, stage, 1, tokens=64, lr=0.5)
        start = whole_state()
        for key in expected:
            assert not torch.equal(found[key], start[key]), f"{key} did not train at stage {stage}"
            assert_close(found[key], expected[key], what=key)


def test_zero_trains_every_part_of_every_parameter():
    """DeepSpeed#2058: ZeRO-2 copied another partition back, so that only some parameters trained."""
    run_ranks(2, _every_parameter_steps)


def _optimizer_before_and_after():
    init_distributed()
    ds = {key: value for key, value in config(stage=1).items() if key != "optimizer"}
    for before in (True, False):
        live = Net(NativeMoE, ep_size=2)
        optimizer = torch.optim.SGD(moe_param_groups(live), lr=0.1) if before else None
        replace_moe_layers(live)
        optimizer = optimizer or torch.optim.SGD(moe_param_groups(live), lr=0.1)
        experts = [p for n, p in live.named_parameters() if "deepspeed_experts" in n]
        for parameter in experts:
            held = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
            assert [group["moe"] for group in held] == [True]
        initialize(model=live, optimizer=optimizer, config=ds)
    stranger = torch.optim.SGD([p for p in live.parameters() if not hasattr(p, "group_name")], lr=0.1)
    with pytest.raises(ValueError, match="would not train"):
        initialize(model=live, optimizer=stranger, config=ds)


def test_an_optimizer_built_too_early_never_freezes_experts():
    """DeepSpeed#8354, DeepSpeed#5354, DeepSpeed#4646, PKU-YuanGroup/MoE-LLaVA#96, PKU-YuanGroup/MoE-LLaVA#17."""
    run_ranks(2, _optimizer_before_and_after)


def test_a_group_without_name_is_told_and_layers_can_have_names_of_their_own():
    """deepspeedai/Megatron-DeepSpeed#174, DeepSpeed#5064, DeepSpeed#4448: KeyError 'name', one name for all layers."""
    net = Net(ep_size=2)
    with pytest.raises(ValueError, match=r"parameter group 0 has no 'name'.*add 'name'"):
        moe_param_groups([{"params": list(net.parameters())}])
    sources = [{"params": list(getattr(net, part).parameters()), "name": part} for part in ("first", "a", "b")]
    named = [group["unique_name"] for group in moe_param_groups(sources, unique_names=True)]
    assert sorted(named) == ["a", "a/ep_size_2", "b", "b/ep_size_2", "first"]


def _aux_gradient(ep_size):
    """Gradient of the auxiliary loss on the router for the same tokens as one micro-batch or as two."""
    init_distributed()
    x, _ = batch(0, 0)
    results = []
    for copies, accumulation in ((2, 1), (1, 2)):
        net = nn.Sequential(MoE(D, mlp(), 8, ep_size, 2, **PLAIN))
        with torch.no_grad():
            net[0].deepspeed_moe.gate.wg.weight.copy_(whole_state()["a.deepspeed_moe.gate.wg.weight"])
        net.forward = lambda x, net=net: net[0](x)[1]
        before = net[0].deepspeed_moe.gate.wg.weight.clone()
        engine = engine_of(net, kind="SGD", lr=1.0, accumulation=accumulation)
        for _ in range(accumulation):
            engine.backward(engine(x.repeat(copies, 1, 1)))
            engine.step()
        results.append(before - net[0].deepspeed_moe.gate.wg.weight.detach())
    assert results[0].any()
    torch.testing.assert_close(results[0], results[1])
    return results[0].tolist()


def test_the_auxiliary_loss_does_not_depend_on_micro_batches_or_layout():
    """NVIDIA/Megatron-LM#1652, #5047, #5798; NVIDIA-NeMo/Automodel#1408, #1412, #3359; databricks/megablocks#85."""
    one = torch.tensor(run_ranks(1, _aux_gradient, 1)[0])
    for ep_size in (1, 2):
        torch.testing.assert_close(torch.tensor(run_ranks(2, _aux_gradient, ep_size)[0]), one)


def test_load_balancing_losses_have_deepspeeds_values():
    """DeepSpeed#5156: the formulas by hand, with every token choosing expert 0 first and expert 1 second."""
    scores = torch.tensor([0.5, 0.3, 0.2])
    x = torch.eye(3)[:1].repeat(4, 1)
    # me = scores; ce counts the first choice (k = 1, 2) or every choice (k = 3).
    expected = {1: 3 * 0.5, 2: 3 * 0.5, 3: 3 / 3 * (0.5 + 0.3 + 0.2)}
    for k, value in expected.items():
        layer = MoE(3, nn.Linear(3, 3), 3, 1, k, **PLAIN)
        with torch.no_grad():
            layer.deepspeed_moe.gate.wg.weight.copy_(scores.log()[:, None] * torch.eye(3)[:1])
        _, aux, _ = layer(x)
        assert aux.dtype == torch.float32
        assert float(aux.detach()) == pytest.approx(value, rel=1e-6), k


def _bias_counts(reentrant):
    init_distributed()
    net = Net(ep_size=2, correction_bias=True, **PLAIN)
    inner = type(net).forward
    net.forward = lambda x, y: checkpoint(lambda a, b: inner(net, a, b), x.requires_grad_(), y, use_reentrant=reentrant)
    engine = engine_of(net, ds=config(kind="SGD", accumulation=3, xmoe={"correction_bias_update_rate": 0.5}))
    gates = [layer.deepspeed_moe.gate for layer in (net.a, net.b)]
    for part in range(3):
        loss = engine(*batch(part))
        engine.backward(loss)
        counted = [int(gate.step_counts.sum()) for gate in gates]
        assert counted == [(part + 1) * 6 * 2] * 2, "a token's two choices count once, recomputed or not"
        engine.step()
    for gate in gates:
        assert gate.correction_bias.any()
        assert float(gate.correction_bias.mean()) == pytest.approx(0.0, abs=1e-6)
        assert torch.allclose(gate.correction_bias - gate.correction_bias[0], torch.zeros(8), atol=1.001)
    twin = Net(ep_size=2, correction_bias=True, **PLAIN)
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin.a.deepspeed_moe.gate.correction_bias, gates[0].correction_bias)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_balancing_bias_counts_tokens_once_stays_centred_and_is_saved(reentrant):
    """pytorch/torchtitan#1506, #1593, #3686; FlagOpen/FlagScale#411; PrimeIntellect-ai/prime-rl#2953."""
    run_ranks(2, _bias_counts, reentrant)


def _tensor_parallel_output():
    init_distributed()
    mpu = TensorParallel()
    whole = whole_state()
    net = Net(ep_size=2, **PLAIN)
    net.load_state_dict(local_state(whole, net))
    engine = initialize(model=net, config=config(kind="SGD"), mpu=mpu)[0]
    x, y = batch(0, 0, tokens=7)  # odd: no slicing between two ranks comes out even
    expected = reference_loss({k: v.double() for k, v in whole.items()}, x.double(), y.double(), k=2)
    assert float(engine(x, y).detach()) == pytest.approx(float(expected), rel=1e-6)


def test_two_tensor_parallel_ranks_give_the_output_of_one():
    """DeepSpeed#8195: with tensor parallelism the model dimension was split for the capacity dimension."""
    run_ranks(2, _tensor_parallel_output)


def test_only_routed_experts_have_expert_in_their_names():
    """DeepSpeed#7685: save_checkpoint takes every name with 'expert' for an expert and reads its number."""
    layer = MoE(
        D, mlp(), 4, 2, 2, use_residual=True, shared_mlp=mlp(), shared_gate=True, correction_bias=True
    )  # everything that has a parameter or a buffer
    pattern = re.compile(r".*\.deepspeed_moe\.experts\.deepspeed_experts\.([0-9]+).*")  # the engine's own
    names = ["block." + name for name in layer.state_dict()]
    taken = [name for name in names if "expert" in name and "moe.gate.wg.weight" not in name]
    assert all(pattern.fullmatch(name) for name in taken)
    assert len(taken) == 2 * 4
    kept = [name for name in names if name not in taken]
    assert sum("shared" in name or "correction_bias" in name for name in kept) == 4 + 1 + 1


def _shared_survives(folder):
    init_distributed()
    options = {"ep_size": 2, "use_residual": True, "shared_gate": True, "correction_bias": True}
    net = Net(shared_mlp=mlp(), **options)
    engine = engine_of(net, stage=1)
    train(engine, range(2))
    engine.save_checkpoint(folder, tag="t")
    dist.barrier()
    twin = Net(shared_mlp=mlp(), **options)
    other = engine_of(twin, stage=1)
    other.load_checkpoint(folder)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), twin.state_dict().values(), strict=True))
    assert train(other, range(2, 4)) == train(engine, range(2, 4))


def test_shared_experts_residual_and_bias_survive_a_checkpoint(tmp_path):
    """DeepSpeed#7685, the other half: what is no expert is saved with the dense model."""
    run_ranks(2, _shared_survives, str(tmp_path))


def _more_experts_than_ranks(options):
    init_distributed()
    whole = whole_state()
    net = Net(ep_size=2, **PLAIN)
    net.load_state_dict(local_state(whole, net))
    inference = deepspeed.init_inference(net, dtype=torch.float32, replace_with_kernel_inject=False, **options)
    x, y = batch(0)
    found = inference(x, y)
    assert groups._get_expert_parallel_world_size("ep_size_2") == 2
    expected = reference_loss({k: v.double() for k, v in whole.items()}, x.double(), y.double(), k=2)
    return float(found.detach()), float(expected)


@pytest.mark.parametrize("options", [{}, {"moe": {"enabled": True, "ep_size": 2, "moe_experts": [8]}}])
def test_inference_with_more_experts_than_ranks(options):
    """DeepSpeed#4562, DeepSpeed#7535, DeepSpeed#7551: the number of experts was taken for the size of a group."""
    for found, expected in run_ranks(2, _more_experts_than_ranks, options):
        assert found == pytest.approx(expected, rel=1e-5)
