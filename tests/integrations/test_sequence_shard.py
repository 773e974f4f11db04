"""``"sequence_shard": true`` under xmoe.initialize: losses, gradients and norms are those of the unsharded layers.

Four ranks. SGD at rate 1, so that a step shows the gradient; the reference is the same network in one process, float64.
"""

import pytest
import torch
import torch.distributed as dist
from ds_nets import (
    PLAIN,
    D,
    MoE,
    Net,
    TensorParallel,
    batch,
    config,
    gather_whole,
    init_distributed,
    local_state,
    mlp,
)
from torch import nn

from xmoe.config import ConfigError
from xmoe.integrations.deepspeed import initialize
from xmoe.ops.collectives import Exchange
from xmoe.ops.sequence import Slices, join_slices, own_slice
from xmoe.testing import assert_close, run_ranks

pytestmark = pytest.mark.dist

# Drops that hit: the queues of the whole batch decide, whichever rank's the tokens.
TIGHT = {**PLAIN, "drop_tokens": True, "capacity_factor": 0.5, "min_capacity": 1}


def with_shared(width, expert, **options):
    return MoE(width, expert, shared_mlp=mlp(5), shared_gate=True, **options)


class SequenceParallelNet(Net):
    """As under Megatron's sequence parallelism: between ``first`` and the loss each rank has a slice of the tokens."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.scale = nn.Parameter(torch.ones(D))
        self.mpu = None

    def forward(self, x, y):
        h = self.first(x)
        if self.mpu is None:
            return self._loss(h * self.scale, y)
        exchange = Exchange(group=self.mpu.get_model_parallel_group(), label="net", timeout_s=20.0)
        slices = Slices.even(h.shape[1], num_ranks=self.mpu.size, rank=self.mpu.get_model_parallel_rank())
        h = own_slice(h, slices, exchange) * self.scale
        return self._loss(h, y, lambda own: join_slices(own, slices, exchange))

    def _loss(self, h, y, join=lambda whole: whole):
        out_a, aux_a, _ = self.a(h)
        h = h + out_a
        out_b, aux_b, _ = self.b(h)
        error = join(h + out_b) - y
        return error.square().sum() / max(error.numel(), 1) + self.aux * (aux_a + aux_b)


def whole_state(kind, **options):
    """State of the whole network under global expert ids; every expert differs."""
    torch.manual_seed(0)
    net = kind(with_shared, ep_size=1, **options)
    return {key: torch.randn_like(v) * 0.4 if v.is_floating_point() else v for key, v in net.state_dict().items()}


def unsharded(kind, whole, batches, *, accumulation=1, clip=0.0, **options):
    """Losses, gradients of the inputs, parameters after a step and gradient norm of the network in one process."""
    net = kind(with_shared, ep_size=1, **options)
    net.load_state_dict(whole)
    net.double()
    inputs = [(x.double().requires_grad_(), y.double()) for x, y in batches]
    losses = [net(x, y) for x, y in inputs]
    mean = torch.stack(losses).mean()
    mean.backward()
    norm = torch.stack([p.grad.square().sum() for p in net.parameters() if p.grad is not None]).sum().sqrt()
    factor = min(1.0, clip / float(norm)) if clip else 1.0
    after = {name: p.detach() - factor * p.grad for name, p in net.named_parameters() if p.grad is not None}
    grads = [x.grad * len(losses) / accumulation for x, _ in inputs]
    return [loss.detach() for loss in losses], grads, after, float(norm)


def sharded_step(kind, whole, mpu, batches, *, ep_size, stage, clip, accumulation, **options):
    net = kind(with_shared, ep_size=ep_size, **options)
    net.load_state_dict(local_state(whole, net))
    if kind is SequenceParallelNet:
        net.mpu, net.scale.sequence_parallel = mpu, True
    ds = config(kind="SGD", lr=1.0, stage=stage, clip=clip, accumulation=accumulation, xmoe={"sequence_shard": True})
    engine = initialize(model=net, model_parameters=list(net.parameters()), config=ds, mpu=mpu)[0]
    if kind is SequenceParallelNet:  # what Megatron does for the parameters it marks
        net.scale.register_hook(lambda grad: summed(grad, mpu.get_model_parallel_group()))
    losses, grads = [], []
    for x, y in batches:
        x = x.requires_grad_()
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        grads.append(x.grad)
    return losses, grads, gather_whole(net), engine.get_global_grad_norm()


def summed(grad, group):
    grad = grad.clone()
    dist.all_reduce(grad, group=group)
    return grad


def check(size, cases, kind=Net):
    init_distributed()
    mpu = TensorParallel(size)
    for case in cases:
        options = {"k": 2, **PLAIN, **case}
        tokens, accumulation = options.pop("tokens", 6), options.pop("accumulation", 1)
        ep_size, stage, clip = (options.pop(key, value) for key, value in (("ep_size", 4), ("stage", 0), ("clip", 0.0)))
        whole = whole_state(kind, **options)
        places, place = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        batches = [[batch(step, place, tokens=tokens) for step in range(accumulation)] for place in range(places)]
        flat = [pair for own in batches for pair in own]
        expected = unsharded(kind, whole, flat, accumulation=accumulation, clip=clip, **options)
        found = sharded_step(
            kind,
            whole,
            mpu,
            batches[place],
            ep_size=ep_size,
            stage=stage,
            clip=clip,
            accumulation=accumulation,
            **options,
        )
        own = slice(place * accumulation, (place + 1) * accumulation)
        for name, got, wanted in zip(("loss", "input"), found, expected, strict=False):
            for index, value in enumerate(wanted[own]):
                assert_close(got[index], value, what=f"{case} {name} {index}")
        assert float(found[3]) == pytest.approx(expected[3], rel=1e-5), case
        for key, value in expected[2].items():
            assert_close(found[2][key], value, what=f"{case} {key}")


def check_sequence_parallel(size, cases):
    check(size, cases, SequenceParallelNet)


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (
            2,
            [
                {"stage": 1, "ep_size": 2, "tokens": 7, "clip": 0.1},
                {"stage": 0, "tokens": 1, **TIGHT},
                {"stage": 2, "tokens": 5, "accumulation": 2, "aux_loss_scope": "sequence", "z_loss_coefficient": 0.1},
            ],
        ),
        (4, [{"stage": 2, "ep_size": 1, "tokens": 3}, {"stage": 0, "tokens": 9, "k": 3, **TIGHT}]),
    ],
    ids=["pairs", "four ranks"],
)
def test_equals_the_unsharded_layers(size, cases):
    """At ZeRO 0, 1 and 2, with shared experts and their gate, drops, clipping, accumulation, odd tokens."""
    run_ranks(4, check, size, cases, timeout_s=120)


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, [{"tokens": 8}, {"stage": 1, "tokens": 7, "k": 3, **TIGHT}]),
        (4, [{"stage": 2, "ep_size": 2, "tokens": 7, **TIGHT}]),
    ],
    ids=["pairs", "four ranks"],
)
def test_input_that_megatron_has_cut_is_not_cut_again(size, cases):
    run_ranks(4, check_sequence_parallel, size, cases, timeout_s=120)


class Ulysses:
    """An mpu as Megatron-DeepSpeed's: pairs of ranks have one sequence in slices; no tensor parallelism."""

    def __init__(self):
        pairs = TensorParallel(2)
        self.get_data_parallel_group = pairs.get_data_parallel_group
        self.get_data_parallel_rank = pairs.get_data_parallel_rank
        self.get_data_parallel_world_size = pairs.get_data_parallel_world_size
        self.get_sequence_parallel_group = pairs.get_model_parallel_group
        self.get_sequence_parallel_rank = pairs.get_model_parallel_rank
        self.get_sequence_parallel_world_size = pairs.get_model_parallel_world_size
        self.get_sequence_data_parallel_group = lambda: dist.group.WORLD
        self.get_sequence_data_parallel_rank = dist.get_rank
        self.get_sequence_data_parallel_world_size = dist.get_world_size
        alone = TensorParallel(1)
        self.get_model_parallel_group = alone.get_model_parallel_group
        self.get_model_parallel_rank = alone.get_model_parallel_rank
        self.get_model_parallel_world_size = alone.get_model_parallel_world_size


def _ulysses():
    """DeepSpeed's sequence parallelism: each rank has its slice of the input and of the loss."""
    init_distributed()
    mpu, rank, tokens = Ulysses(), dist.get_rank(), 6
    for stage, ep_size, options in ((0, 4, {}), (1, 2, TIGHT), (2, 4, TIGHT)):
        options = {"k": 3, **PLAIN, "z_loss_coefficient": 0.1, **options}
        whole = whole_state(Net, **options)
        expected = unsharded(Net, whole, [batch(0, place, tokens=tokens) for place in range(2)], **options)
        net = Net(with_shared, ep_size=ep_size, **options)
        net.load_state_dict(local_state(whole, net))
        engine = initialize(
            model=net,
            model_parameters=list(net.parameters()),
            config=config(kind="SGD", lr=1.0, stage=stage, xmoe={"sequence_shard": True}),
            mpu=mpu,
        )[0]
        x, y = (whole[:, rank % 2 * 3 : rank % 2 * 3 + 3].clone() for whole in batch(0, rank // 2, tokens=tokens))
        x.requires_grad_()
        aux = net.aux
        net.aux = 2 * aux  # the mean over the slices' losses is the loss: half the own error, the whole auxiliary loss
        loss = engine(x, y) / 2
        engine.backward(loss)
        engine.step()
        cut = slice(rank % 2 * 3, rank % 2 * 3 + 3)
        assert_close(x.grad, expected[1][rank // 2][:, cut], what=f"stage {stage} input")
        after = gather_whole(net)
        for key, value in expected[2].items():
            assert_close(after[key], value, what=f"stage {stage} {key}")


def test_input_that_deepspeed_has_cut_is_not_cut_again():
    run_ranks(4, _ulysses, timeout_s=120)


class AutoTPNet(Net):
    """A dense block before the layers, which AutoTP splits."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.up, self.down = nn.Linear(D, 16), nn.Linear(16, D)

    def forward(self, x, y):
        return super().forward(x + self.down(torch.relu(self.up(x))), y)


def _auto_tp():
    init_distributed()
    whole, rank = whole_state(AutoTPNet, k=2, **TIGHT), dist.get_rank()
    kinds = {"up": "column", "down": "row"}
    specs = [{"patterns": [rf".*{name}\.weight$"], "partition_type": kind} for name, kind in kinds.items()]
    for stage in (1, 2):
        expected = unsharded(AutoTPNet, whole, [batch(0, place) for place in range(2)], k=2, **TIGHT)
        net = AutoTPNet(with_shared, ep_size=4, k=2, **TIGHT)
        net.load_state_dict(local_state(whole, net))
        tensor_parallel = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
        section = {"tensor_parallel": tensor_parallel, "xmoe": {"sequence_shard": True}}
        ds = config(kind="SGD", lr=1.0, stage=stage, **section)
        engine = initialize(model=net, model_parameters=list(net.parameters()), config=ds)[0]
        assert net.up.weight.shape == (8, D)
        assert net.a.deepspeed_moe.sequence_shard.num_ranks == 2
        x, y = batch(0, rank // 2)
        x.requires_grad_()
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        assert_close(loss.detach(), expected[0][rank // 2], what=f"stage {stage} loss")
        assert_close(x.grad, expected[1][rank // 2], what=f"stage {stage} input")
        found = gather_whole(nn.ModuleDict({"a": net.a, "b": net.b}))
        assert found.keys() == {key for key in expected[2] if key[:2] in ("a.", "b.")}
        for key, value in found.items():
            assert_close(value, expected[2][key], what=f"stage {stage} {key}")


def test_equals_the_unsharded_layers_under_auto_tp():
    run_ranks(4, _auto_tp, timeout_s=90)


def _start(net, mpu, **section):
    return initialize(model=net, config=config(kind="SGD", xmoe=section), mpu=mpu)


class _Config:
    sequence_parallel = True


def _refused():
    init_distributed()
    mpu = TensorParallel()
    net = Net(ep_size=2, enable_expert_tensor_parallelism=True, **PLAIN)
    with pytest.raises(ConfigError, match=r"xmoe.sequence_shard is True: layer 'a' has enable_expert_tensor_parallel"):
        _start(net, mpu, sequence_shard=True)
    net = Net(with_shared, ep_size=2, **PLAIN)
    net.b.deepspeed_moe.shared_mlp[0].weight.tensor_model_parallel = True
    with pytest.raises(ValueError, match=r"'b.shared_mlp.0.weight' is split over the tensor-parallel ranks"):
        _start(net, mpu, sequence_shard=True)
    for place, mark in {
        "Net.config": lambda net: setattr(net, "config", _Config()),
        "first.args": lambda net: setattr(net.first, "args", _Config()),
        "first": lambda net: setattr(net.first, "sequence_parallel", True),
        "first.bias": lambda net: setattr(net.first.bias, "sequence_parallel", True),
    }.items():
        net = Net(ep_size=2, **PLAIN)
        mark(net)
        with pytest.raises(ConfigError, match=rf"xmoe.sequence_shard is False: {place}.sequence_parallel is True"):
            _start(net, mpu)
    net = Net(ep_size=2, use_residual=True, **PLAIN)
    net.config = _Config()
    with pytest.raises(ValueError, match=r"layer 'a' has use_residual=True, and its input is a slice"):
        _start(net, mpu, sequence_shard=True)


def test_layers_that_cannot_be_sharded_are_refused():
    run_ranks(4, _refused)


def _without_other_ranks():
    init_distributed()
    net = Net(ep_size=2, sequence_shard=True, **PLAIN)
    initialize(model=net, model_parameters=list(net.parameters()), config=config(kind="SGD"))
    assert net.a.deepspeed_moe.sequence_shard is None


def test_without_tensor_parallelism_nothing_is_shared():
    run_ranks(2, _without_other_ranks)
