"""State that moves with the engine: correction bias, initial experts, evaluation, optimizers of the user's."""

import copy
import os

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
    train,
    whole_state,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from xmoe.integrations.deepspeed import initialize
from xmoe.testing import run_ranks

pytestmark = pytest.mark.dist
RATE = 0.25


class CheckpointedNet(Net):
    """``Net`` whose whole body is recomputed in backward."""

    def __init__(self, *, reentrant, **options):
        super().__init__(**options)
        self.reentrant = reentrant

    def forward(self, x, y):
        x = x.detach().requires_grad_()
        return checkpoint(super().forward, x, y, use_reentrant=self.reentrant)


def _first_layer_counts(whole, step, accumulation, k=2):
    """Selections of layer ``a`` by all ranks' tokens in one step, from the state before it and a zero bias."""
    counts = torch.zeros(8)
    for part in range(accumulation):
        for rank in range(dist.get_world_size()):
            x, _ = batch(step + 100 * part, rank)
            h = x[0] @ whole["first.weight"].T + whole["first.bias"]
            ids = (h @ whole["a.deepspeed_moe.gate.wg.weight"].T).topk(k, dim=1).indices
            counts += torch.bincount(ids.reshape(-1), minlength=8)
    return counts


def _bias_once_per_step(stage):
    init_distributed()
    for reentrant in (None, False, True):
        options = {"ep_size": 2, "correction_bias": True, **PLAIN}
        net = Net(**options) if reentrant is None else CheckpointedNet(reentrant=reentrant, **options)
        whole = whole_state(correction_bias=True)
        whole = {key: torch.zeros_like(v) if "bias" in key and "correction" in key else v for key, v in whole.items()}
        net.load_state_dict(local_state(whole, net))
        ds = config(stage=stage, accumulation=3, kind="SGD", lr=0.0, xmoe={"correction_bias_update_rate": RATE})
        engine = engine_of(net, ds=ds)
        gate = net.a.deepspeed_moe.gate
        counts = _first_layer_counts(whole, 0, 3)
        expected = RATE * torch.sign(counts.mean() - counts)
        expected -= expected.mean()
        for part in range(3):
            assert not gate.correction_bias.any(), "moved before the step"
            loss = engine(*batch(100 * part))
            engine.backward(loss)
            engine.step()
        assert torch.allclose(gate.correction_bias, expected, atol=1e-6), (reentrant, gate.correction_bias, expected)
        assert expected.any()
        assert not gate.step_counts.any()
        engine.eval()
        with torch.no_grad():
            engine(*batch(0))
        assert not gate.step_counts.any(), "evaluation counted"


@pytest.mark.parametrize("stage", [0, 2])
def test_the_bias_moves_once_per_step_under_accumulation_and_recompute(stage):
    run_ranks(2, _bias_once_per_step, stage)


def _skipped_step(folder):
    init_distributed()
    for stage, extra in [(0, {}), (1, {"check_grad_overflow": True}), (2, {"check_grad_overflow": True})]:
        net = Net(ep_size=2, correction_bias=True, **PLAIN)
        ds = config(stage=stage, kind="SGD", lr=0.1, xmoe={"correction_bias_update_rate": RATE})
        ds["bf16"] = {"enabled": True, **extra}
        if stage == 1:
            ds["data_types"] = {"buffer_dtype": "bf16"}
        engine = engine_of(net, ds=ds)
        gate = net.a.deepspeed_moe.gate
        assert gate.correction_bias.dtype == torch.float32
        assert gate.wg.weight.dtype == torch.bfloat16
        train(engine, [0], dtype=torch.bfloat16)
        bias, weights = gate.correction_bias.clone(), gather_whole(net)
        assert bias.any()
        loss = engine(*batch(1, dtype=torch.bfloat16))
        # One expert's weight of one rank: the ranks must still agree that the step is skipped.
        victim = net.b.deepspeed_moe.experts.deepspeed_experts[0][0].weight
        hook = victim.register_hook(lambda grad: grad * float("inf") if dist.get_rank() == 0 else grad)
        engine.backward(loss)
        engine.step()
        hook.remove()
        assert not engine.was_step_applied(), stage
        assert engine.skipped_steps == 1
        assert torch.equal(gate.correction_bias, bias), "the bias moved on a skipped step"
        assert not gate.step_counts.any(), "a skipped step's counts were kept"
        assert all(torch.equal(v, weights[key]) for key, v in gather_whole(net).items())
        train(engine, [2], dtype=torch.bfloat16)
        bias = gate.correction_bias.clone()
        engine.save_checkpoint(f"{folder}/{stage}", tag="t")
        dist.barrier()
        again = Net(ep_size=2, correction_bias=True, **PLAIN)
        other = engine_of(again, ds=ds)
        other.load_checkpoint(f"{folder}/{stage}")
        restored = again.a.deepspeed_moe.gate.correction_bias
        assert restored.dtype == torch.float32
        assert torch.equal(restored, bias)
        assert train(other, [3, 4], dtype=torch.bfloat16) == train(engine, [3, 4], dtype=torch.bfloat16)
        assert torch.equal(restored, gate.correction_bias)


def test_the_bias_stays_on_a_skipped_step_and_survives_bf16_and_checkpoints(tmp_path):
    run_ranks(2, _skipped_step, str(tmp_path))


def _init_expert(module, logical_id):
    nn.init.normal_(module[0].weight)
    with torch.no_grad():
        module[0].bias.fill_(logical_id)
        module[2].weight.mul_(logical_id + 1)  # builds on the expert's own start


def _initial_experts(store, built_first, data_first, ep_size, bf16):
    def start():
        dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=_rank(), world_size=4)
        init_distributed()

    if not built_first:
        start()
    torch.manual_seed(42)
    net = copy.deepcopy(Net(ep_size=ep_size, expert_init=_init_expert))
    if built_first:
        start()
    ds = config(kind="SGD", bf16=bf16, use_data_before_expert_parallelism=data_first)
    engine_of(net, ds=ds)
    return gather_whole(net)


def _rank():
    return int(os.environ["RANK"])


def test_an_experts_first_weights_depend_on_its_logical_id_only(tmp_path):
    torch.manual_seed(42)
    reference = dict(Net(ep_size=1, expert_init=_init_expert).named_parameters())
    cases = [(True, False, 4, False), (False, True, 2, False), (True, True, 2, True)]
    for number, case in enumerate(cases):
        found = run_ranks(4, _initial_experts, str(tmp_path / str(number)), *case, init=False)[0]
        for key, value in reference.items():
            expected = value.bfloat16().float() if case[3] else value
            assert torch.equal(found[key], expected), (case, key)


def _weights_given_after_construction(store):
    init_distributed()
    net = Net(ep_size=2, expert_init=_init_expert)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.5)
    engine_of(net, ds=config(kind="SGD", use_data_before_expert_parallelism=True))
    assert all(bool((value == 0.5).all()) for value in gather_whole(net).values())


def test_weights_written_after_construction_are_never_initialised_over(tmp_path):
    run_ranks(4, _weights_given_after_construction, str(tmp_path))


def _evaluate(stage):
    init_distributed()
    whole = whole_state()
    net = Net(ep_size=2, **PLAIN)
    net.load_state_dict(local_state(whole, net))
    engine = engine_of(net, stage=stage, kind="SGD")
    engine.eval()
    rank = dist.get_rank()
    sizes = [[3, 7], [1, 12], [5, 0], [2, 0]]  # tokens of each rank; rank 1 runs out after two batches
    with torch.no_grad():
        for step, tokens in enumerate(sizes):
            x, y = batch(step, tokens=tokens[rank])
            loss = engine(x, y)
            assert torch.isfinite(loss)
            expected = _reference(whole, x, y)
            assert float(loss) == pytest.approx(float(expected), rel=1e-5), (step, tokens)
    engine.train()
    train(engine, [0])


def _reference(whole, x, y):
    from ds_nets import reference_loss

    return reference_loss({k: v.double() for k, v in whole.items()}, x.double(), y.double(), k=2)


@pytest.mark.parametrize("stage", [0, 2])
def test_ranks_evaluate_different_shapes_and_empty_batches(stage):
    run_ranks(2, _evaluate, stage)


def _only_rank_zero_evaluates():
    init_distributed()
    net = nn.ModuleDict({"block": Net(ep_size=2)})
    net.forward = lambda x, y: net["block"](x, y)
    engine = engine_of(net, ds=config(xmoe={"collective_timeout_s": 1.5}))
    engine.eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            engine(*batch(0))


def test_evaluation_on_one_rank_only_ends_with_the_layers_name():
    lonely, other = run_ranks(2, _only_rank_zero_evaluates, return_exceptions=True)
    assert other is None
    assert isinstance(lonely, RuntimeError)
    assert "block.a" in str(lonely)
    assert "rank 0" in str(lonely)


def _client_optimizers():
    init_distributed()
    from ds_nets import NativeMoE

    from xmoe.integrations.deepspeed import moe_param_groups, replace_moe_layers

    # Built before the layers are replaced: the parameters are the very same.
    for stage in (0, 1):
        live = Net(NativeMoE, ep_size=2, **PLAIN)
        live.load_state_dict(local_state(whole_state(), live))
        optimizer = torch.optim.SGD(moe_param_groups(live), lr=0.1)
        replace_moe_layers(live)
        ds = config(stage=stage)
        del ds["optimizer"]
        engine = initialize(model=live, optimizer=optimizer, config=ds)[0]
        before = gather_whole(live)
        train(engine, range(1), tokens=60)
        after = gather_whole(live)
        assert all(not torch.equal(after[key], before[key]) for key in before), "some parameter did not train"
    for build, words in [
        (lambda net: torch.optim.SGD([p for n, p in net.named_parameters() if "expert" not in n], lr=0.1), "not hold"),
        (lambda net: torch.optim.SGD(Net(ep_size=2).parameters(), lr=0.1), "not hold 32 trainable expert"),
        (lambda net: torch.optim.SGD(net.parameters(), lr=0.1), "without 'moe': True"),
    ]:
        net = Net(ep_size=2)
        with pytest.raises(ValueError, match=words):
            initialize(model=net, optimizer=build(net), config={**ds, "zero_optimization": {"stage": 1}})
    net = Net(ep_size=2)
    some = [p for n, p in net.named_parameters() if "expert" not in n]
    for given in (some, [{"params": some, "name": "dense"}]):
        with pytest.raises(ValueError, match="not hold"):
            initialize(model=net, model_parameters=given, config=config(stage=1))
    with pytest.raises(ValueError, match="parameter group 0 has no 'name'"):
        initialize(model=net, model_parameters=[{"params": list(net.parameters())}], config=config(stage=1))
    for parameter in net.b.deepspeed_moe.experts.parameters():
        parameter.requires_grad_(False)
    engine = initialize(model=net, model_parameters=(p for p in net.parameters() if p.requires_grad), config=config())[
        0
    ]
    train(engine, range(1))


def test_client_optimizers_hold_every_expert_or_are_refused():
    run_ranks(2, _client_optimizers)


def _awkward_names():
    init_distributed()

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.expert_block = MoE(D, mlp(), 4, 1, 2, use_residual=True)

    with pytest.raises(ValueError, match=r"'expert_block\..*rename"):
        initialize(model=Holder(), config=config())


def test_a_module_name_that_checkpoints_would_drop_is_refused():
    run_ranks(1, _awkward_names)
