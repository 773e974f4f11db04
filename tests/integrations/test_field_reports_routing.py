"""What users of MoE training reported in public: token counts, hangs, routing, numerics, recomputation.

Each test names its thread; docs/tested-reports.md is the map. deepspeedai/DeepSpeed is ``DeepSpeed``.
"""

import pytest
import torch
import torch.distributed as dist
from ds_nets import (
    PLAIN,
    D,
    MoE,
    Net,
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

from xmoe.ops.collectives import Exchange
from xmoe.ops.overlap import to_end
from xmoe.ops.relay import send_straight
from xmoe.testing import run_ranks

NO_DRAWS = {"use_rts": False, "top2_2nd_expert_sampling": False}


def _uneven_ranks():
    init_distributed()
    tokens = (8, 20)
    for k in (1, 2, 3):
        for dropping in ({"drop_tokens": False}, {"drop_tokens": True, "capacity_factor": 8.0}):
            whole = whole_state(k=k)
            net = Net(ep_size=2, k=k, **NO_DRAWS, **dropping)
            net.load_state_dict(local_state(whole, net))
            engine = engine_of(net, kind="SGD", lr=0.1)
            x, y = batch(0, tokens=tokens[dist.get_rank()])
            engine.backward(engine(x, y))
            engine.step()
            parts = [[[batch(0, r, tokens=tokens[r]) for r in range(2)]]]
            expected, _ = reference_steps(whole, parts, k=k, lr=0.1)
            for key, value in gather_whole(net).items():
                torch.testing.assert_close(value.double(), expected[key], rtol=1e-4, atol=1e-6, msg=f"{k} {key}")


@pytest.mark.dist
def test_ranks_with_different_token_counts_equal_the_reference():
    """DeepSpeed#6809: every rank sized its buffers by its own tokens, and the all-to-all hung."""
    run_ranks(2, _uneven_ranks)


def _unequal_calls():
    init_distributed()
    net = Net(ep_size=2, **PLAIN)
    engine = engine_of(net, ds=config(kind="SGD", xmoe={"collective_timeout_s": 5.0}))
    for step, tokens in enumerate([(3, 9), (16, 1), (0, 4)]):
        engine.backward(engine(*batch(step, tokens=tokens[dist.get_rank()])))
        engine.step()
    if dist.get_rank() == 0:  # one sequence more than the other rank has
        engine(*batch(9))


@pytest.mark.dist
def test_variable_sequences_train_and_a_missing_call_names_its_layer():
    """DeepSpeed#5794, PKU-YuanGroup/MoE-LLaVA#65: hang in an MoE layer when ranks call it unequally often."""
    waiting, _ = run_ranks(2, _unequal_calls, return_exceptions=True)
    assert isinstance(waiting, RuntimeError)
    assert "'a: " in str(waiting)
    assert "did not reach" in str(waiting)


def _all_to_the_first_rank(ep_size):
    init_distributed()
    net = Net(ep_size=ep_size, k=1, **PLAIN)
    engine = engine_of(net, stage=2, kind="SGD", lr=0.1)
    num_local = net.a.num_local_experts
    with torch.no_grad():
        for layer in (net.a, net.b):
            weight = layer.deepspeed_moe.gate.wg.weight
            weight.zero_()
            net.first.weight.zero_()
            net.first.bias.fill_(1.0)
            weight[:num_local].fill_(1.0)  # every token sums to a positive number: rank 0's experts win
    loss = engine(*batch(0))
    rows = net.a.deepspeed_moe.take_counters().computed_rows
    engine.backward(loss)
    engine.step()
    assert all(bool(torch.isfinite(p).all()) for p in net.parameters())
    return rows


@pytest.mark.dist
@pytest.mark.parametrize("ep_size", [2, 4])
def test_a_rank_that_receives_no_tokens_takes_part_in_backward(ep_size):
    """NVIDIA/Megatron-LM#1877, NVIDIA/Megatron-LM#3626, ROCm/Megatron-LM#155: a detached graph hung the others."""
    rows = run_ranks(4, _all_to_the_first_rank, ep_size)
    assert [count > 0 for count in rows] == [rank % ep_size == 0 for rank in range(4)]


def _nothing_to_send(guard):
    rank = dist.get_rank()
    exchange = Exchange(group=dist.group.WORLD, label="test", timeout_s=30, self_row_guard=guard)
    splits = [[2, 3], [0, 0]]
    send, recv = splits[rank], [splits[other][rank] for other in range(2)]
    rows = (torch.arange(sum(send), dtype=torch.float32)[:, None] + 10 * rank).expand(-1, 4).clone().requires_grad_()
    received = to_end(send_straight(rows, send, recv, exchange))
    (received * 2).sum().backward()
    assert torch.equal(rows.grad, torch.full_like(rows, 2.0))
    return received[:, 0].tolist()


@pytest.mark.dist
@pytest.mark.parametrize("guard", [False, True])
def test_a_rank_that_sends_nothing_gets_its_rows_and_gradients(guard):
    """pytorch/pytorch#146468: all_to_all_single hung when a rank sent nothing."""
    assert run_ranks(2, _nothing_to_send, guard) == [[0.0, 1.0], [2.0, 3.0, 4.0]]


class Scaled(nn.Module):
    """No known formula, so it runs in the loop over experts."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return x * self.scale


def test_every_expert_is_called_and_every_hook_fires_without_tokens():
    """DeepSpeed#5066, DeepSpeed#4808, DeepSpeed#4966, hiyouga/LLaMA-Factory#2315: an idle expert's hook never fired."""
    layer = MoE(D, Scaled(), 8, 1, 1, **PLAIN)
    calls, fired = [], []
    for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
        expert.register_forward_hook(lambda module, args, out, number=number: calls.append((number, args[0].shape[1])))
        expert.scale.register_hook(lambda grad, number=number: fired.append((number, bool(grad.any()))))
    output, _, counts = layer(torch.randn(2, D))
    output.sum().backward()
    assert calls == list(enumerate(counts.tolist()))
    assert sorted(fired) == [(number, count > 0) for number, count in enumerate(counts.tolist())]


@pytest.mark.parametrize("policy", ["probs", "position", "random"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_capacity_beyond_the_tokens_drops_nothing(policy, k):
    """DeepSpeed#5353, DeepSpeed#8155: top-k over the tokens was asked for more than there are."""
    layer = MoE(D, mlp(), 8, 1, k, capacity_factor=4.0, min_capacity=16, drop_policy=policy)
    _, _, counts = layer(torch.randn(3, D))
    assert torch.equal(layer.deepspeed_moe.take_counters().routed_E, counts)
    assert int(counts.sum()) == 3 * k


@pytest.mark.parametrize("k", [1, 2, 4])
def test_fewer_tokens_than_the_minimum_capacity_run(k):
    """The last batch of an evaluation: DeepSpeed asserts on fewer tokens than min_capacity."""
    layer = MoE(D, mlp(), 8, 1, k)
    for mode in (True, False):
        layer.train(mode)
        for tokens in (1, 2, 3):
            output, aux, counts = layer(torch.randn(tokens, D))
            assert output.shape == (tokens, D)
            assert torch.isfinite(aux)
            assert int(counts.sum()) == tokens * k


def _order_of_collectives():
    """(name, size of its group) of this rank's collectives, in order, through one training step."""
    init_distributed()
    called = []
    for name in ("all_to_all_single", "all_reduce", "all_gather_into_tensor"):
        original = getattr(dist, name)

        def recorded(*args, name=name, original=original, **kwargs):
            called.append((name, dist.get_world_size(kwargs.get("group"))))
            return original(*args, **kwargs)

        setattr(dist, name, recorded)
    net = Net(ep_size=(2, 4), **PLAIN)
    engine = engine_of(net, kind="SGD")
    engine.backward(engine(*batch(0, tokens=(0, 3, 17, 6)[dist.get_rank()])))
    engine.step()
    return called


@pytest.mark.dist
def test_every_rank_calls_the_collectives_in_one_order():
    """NVIDIA/Megatron-LM#5749: deadlock by another order of collectives on some ranks."""
    orders = run_ranks(4, _order_of_collectives)
    assert sorted({c for c in orders[0] if "to_all" in c[0]}) == [("all_to_all_single", 2), ("all_to_all_single", 4)]
    assert orders == [orders[0]] * 4


def _evaluate_on_rank_zero():
    init_distributed()
    net = Net(ep_size=2)
    engine = engine_of(net, ds=config(xmoe={"collective_timeout_s": 5.0}))
    train(engine, range(1))
    engine.eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            engine(*batch(0))


@pytest.mark.dist
def test_evaluation_on_rank_zero_alone_is_told_not_hung():
    """yiqiao-yin/deepspeed-course#28: hang after training, in an evaluation that only rank 0 entered."""
    told, _ = run_ranks(2, _evaluate_on_rank_zero, return_exceptions=True)
    assert isinstance(told, RuntimeError)
    assert "evaluation on rank 0 only" in str(told)
    assert "'a: exchange of counts, step 2'" in str(told)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_evaluation_repeats_itself(k):
    """DeepSpeed#8620: top-2 drew its second expert at random in evaluation too."""
    layer = MoE(D, mlp(), 4, 1, k, noisy_gate_policy="Jitter" if k == 1 else None).eval()
    x = torch.randn(11, D)
    first = layer(x)
    for _ in range(2):
        again = layer(x)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_a_padding_mask_holds_for_every_k(k):
    """pytorch/torchtitan#4168: DeepSpeed heeds ``used_token`` at k = 1 only."""
    layer = MoE(D, mlp(), 8, 1, k, drop_tokens=False)
    used = torch.tensor([1, 0, 1, 1, 0, 0])
    x = torch.randn(6, D)
    output, aux, counts = layer(x, used)
    assert int(counts.sum()) == 3 * k
    assert not output[used == 0].any()
    assert output[used == 1].any(dim=1).all()
    changed = torch.where(used[:, None] == 1, x, torch.randn(6, D))
    assert torch.equal(layer(changed, used)[1], aux), "padding moved the loss"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_model_routes_as_its_router_in_fp32(dtype):
    """databricks/megablocks#91, NVIDIA/Megatron-LM#669, ViperEkura/AstrAI#57, sgl-project/sglang#33764."""
    layer = MoE(D, mlp(), 16, 1, 2, **PLAIN).to(dtype)
    x = torch.randn(512, D).to(dtype)
    output, aux, counts = layer(x)
    logits = x.double() @ layer.deepspeed_moe.gate.wg.weight.double().T
    expected = torch.bincount(logits.topk(2, dim=1).indices.reshape(-1), minlength=16)
    assert torch.equal(counts, expected)
    assert (output.dtype, aux.dtype) == (dtype, torch.float32)


def _empty_rank():
    init_distributed()
    for k in (1, 2, 3):
        net = Net(ep_size=2, k=k)
        engine = engine_of(net, kind="SGD", stage=1)
        tokens = 0 if dist.get_rank() == 1 else 6
        h = torch.randn(1, tokens, D)
        _, aux, counts = net.a(h)
        assert torch.isfinite(aux)
        if not tokens:
            assert float(aux) == 0.0
            assert not counts.any()
        engine.backward(engine(*batch(0, tokens=tokens)))
        engine.step()
        assert all(bool(torch.isfinite(value).all()) for value in gather_whole(net).values())


@pytest.mark.dist
def test_an_empty_rank_has_a_loss_of_zero_and_poisons_nobody():
    """The mean over no rows is NaN, and one rank's NaN reaches every rank's gradients (found while testing)."""
    run_ranks(2, _empty_rank)


def test_twenty_runs_are_bitwise_equal():
    """pytorch/torchtitan#1974, pytorch/torchtitan#2775: scatter_add combined in another order each time."""
    layer = MoE(D, mlp(), 8, 1, 3, drop_tokens=False)
    x, upstream = torch.randn(64, D), torch.randn(64, D)
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(20):
            inputs = x.clone().requires_grad_()
            output, _, _ = layer(inputs)
            results.append([output, *torch.autograd.grad(output, [inputs, *layer.parameters()], upstream)])
    finally:
        torch.use_deterministic_algorithms(False)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_replays_the_routing_of_the_forward(reentrant):
    """NVIDIA-NeMo/Automodel#2635, #3325, #3743, #3156; NVIDIA-NeMo/RL#1203, #3108; huggingface/transformers#47467;
    linkedin/Liger-Kernel#1255.

    Every token is a tie, which noise breaks in another way each time: without replay the recompute routes anew.
    """
    layer = MoE(D, mlp(), 8, 1, 2, drop_tokens=False)  # draws its second expert
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.zero_()
    x = torch.randn(32, D)

    def gradients(run):
        torch.manual_seed(0)
        inputs = x.clone().requires_grad_()
        output, aux, counts = run(inputs)
        torch.manual_seed(99)  # what another layer drew in between
        (output.square().sum() + aux).backward()
        found = [counts, inputs.grad, *[p.grad for p in layer.parameters()]]
        layer.zero_grad()
        return found

    plain = gradients(layer)
    kept = {"preserve_rng_state": False, "use_reentrant": reentrant}
    replayed = gradients(lambda inputs: checkpoint(layer, inputs, **kept))
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))
    assert int(layer.deepspeed_moe.gate.step_counts.sum()) == 2 * 32 * 2


@pytest.mark.parametrize("gated", [False, True])
def test_ragged_counts_leave_no_unwritten_row(gated):
    """pytorch/torchtitan#1651, #1237, #1166; pytorch/pytorch#152668: rows past the last offset were garbage.

    The tests fill fresh memory with NaN; counts are 5, 0, 4, 3.
    """
    layer = _layer_with_counts([5, 0, 4, 3], gated=gated)
    x = _one_hot([0] * 5 + [2] * 4 + [3] * 3).requires_grad_()
    output, _, counts = layer(x)
    assert counts.tolist() == [5, 0, 4, 3]
    output.square().sum().backward()
    assert torch.isfinite(output).all()
    assert torch.isfinite(x.grad).all()
    assert all(bool(torch.isfinite(p.grad).all()) for p in layer.parameters())


def test_an_expert_without_tokens_has_gradients_of_exactly_zero():
    """pytorch/pytorch#172439, pytorch/pytorch#174314, AMD-AGI/Primus-Turbo#397: memory of empty groups came through."""
    layer = _layer_with_counts([5, 0, 4, 3], gated=True)
    layer(_one_hot([0] * 5 + [2] * 4 + [3] * 3))[0].sum().backward()
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    for number, expert in enumerate(experts):
        touched = [bool(p.grad is not None and p.grad.any()) for p in expert.parameters()]
        assert all(touched) == (number != 1)
        assert any(touched) == (number != 1)
    assert all(p.grad is None or torch.equal(p.grad, torch.zeros_like(p)) for p in experts[1].parameters())


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, 5), nn.Linear(D, 5)
        self.down_proj = nn.Linear(5, D)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def _layer_with_counts(counts, *, gated):
    layer = MoE(D, SwiGLU() if gated else mlp(), len(counts), 1, 1, **PLAIN)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(torch.eye(len(counts), D))
    return layer


def _one_hot(ids):
    return 4.0 * torch.eye(D)[torch.tensor(ids)]


def test_a_layer_without_process_groups_says_what_to_call():
    """A layer of ep_size 2 in one process: no index error from inside the experts."""
    with pytest.raises(RuntimeError, match=r"ep_size 2 and no process group exists: call xmoe\.initialize"):
        MoE(D, mlp(), 8, 2, 2)(torch.ones(1, D))


def _reference_of_uneven_evaluation():
    init_distributed()
    whole = whole_state()
    net = Net(ep_size=2, **PLAIN)
    net.load_state_dict(local_state(whole, net))
    engine = engine_of(net, kind="SGD")
    engine.eval()
    x, y = batch(0, tokens=(0, 5)[dist.get_rank()])
    with torch.no_grad():
        found = float(engine(x, y))
    expected = reference_loss({key: v.double() for key, v in whole.items()}, x.double(), y.double(), k=2)
    assert found == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.dist
def test_a_rank_out_of_batches_evaluates_with_an_empty_one():
    """yiqiao-yin/deepspeed-course#28, the remedy: every rank makes the call, with rows or without."""
    run_ranks(2, _reference_of_uneven_evaluation)
