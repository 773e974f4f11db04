"""Tensor parallelism through an mpu, with whole experts and with experts split over the tensor-parallel ranks.

Four ranks: two data-parallel ones of two tensor-parallel ones each. SGD at rate 1, so that a step shows the gradient.
"""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from ds_nets import (
    EXPERT_KEY,
    PLAIN,
    MoE,
    NativeMoE,
    Net,
    TensorParallel,
    batch,
    config,
    init_distributed,
    reference_loss,
    reference_steps,
    whole_state,
)
from torch import nn

from xmoe.integrations.deepspeed import initialize
from xmoe.testing import assert_close, run_ranks

pytestmark = pytest.mark.dist

# Room for every token, in the halves that native sends: what a loop over tokens computes.
ROOM = {"drop_tokens": True, "capacity_factor": 4.0, "use_rts": False, "top2_2nd_expert_sampling": False}
TIGHT = {**ROOM, "capacity_factor": 1.0, "min_capacity": 2}
SPLIT = {"0.weight": 0, "0.bias": 0, "2.weight": 1}  # of a split expert's parameters, the dimension


class _Copy(torch.autograd.Function):
    """Into the tensor-parallel region: the identity, whose gradients the ranks sum."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=groups.mpu.get_model_parallel_group())
        return grad


class _Sum(torch.autograd.Function):
    """Out of the tensor-parallel region: the sum over its ranks."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=groups.mpu.get_model_parallel_group())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Part(nn.Module):
    """A rank's share of a linear layer, marked as Megatron marks it."""

    def __init__(self, rows, columns, bias, split):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.bias = nn.Parameter(torch.randn(bias))
        for parameter in [self.weight, self.bias][:split]:
            parameter.tensor_model_parallel = True

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


class SplitMLP(nn.Module):
    """``ds_nets.mlp`` split as Megatron splits it: the first layer by its outputs, the second by its inputs."""

    def __init__(self, whole):
        super().__init__()
        width, wide = whole[0].in_features, whole[0].out_features // 2
        self.add_module("0", Part(wide, width, wide, split=2))
        self.add_module("2", Part(width, wide, width, split=1))

    def forward(self, x):
        up, down = self.get_submodule("0"), self.get_submodule("2")
        hidden = nn.functional.gelu(up(_Copy.apply(x)) + up.bias)
        return _Sum.apply(down(hidden)) + down.bias, None


def _net(kind, *, split, ep_size, **options):
    def layer(width, expert, **more):
        expert = SplitMLP(expert) if split else expert
        return kind(width, expert, enable_expert_tensor_parallelism=split, **more)

    return Net(layer, ep_size=ep_size, k=2, **options)


def _pieces(net, *, split):
    """Each parameter with its global name and, if it is split, the dimension of its split."""
    for key, parameter in net.named_parameters():
        found = EXPERT_KEY.fullmatch(key)
        if found:
            layer = net.a if key.startswith("a.") else net.b
            place = (dist.get_rank() // 2 if split else dist.get_rank()) % layer.ep_size
            number = place * layer.num_local_experts + int(found[2])
            yield f"{found[1]}{number}{found[3]}", parameter, SPLIT.get(found[3][1:]) if split else None
        else:
            yield key, parameter, None


@torch.no_grad()
def _load(net, whole, *, split):
    for key, parameter, dim in _pieces(net, split=split):
        value = whole[key]
        parameter.copy_(value if dim is None else value.chunk(2, dim)[dist.get_rank() % 2])


def _gather(net, *, split):
    """The whole parameters by global name; replicas must agree bit by bit."""
    own = {(key, dim, dist.get_rank() % 2): p.detach().numpy() for key, p, dim in _pieces(net, split=split)}
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    parts = {}
    for (key, dim, place), value in (item for part in everywhere for item in part.items()):
        value = torch.from_numpy(value)
        found = parts.setdefault(key, (dim, {}))[1].setdefault(0 if dim is None else place, value)
        assert torch.equal(value, found), f"replicas of {key} differ"
    return {
        k: shares[0] if dim is None else torch.cat([shares[0], shares[1]], dim) for k, (dim, shares) in parts.items()
    }


def _step(kind, whole, *, mpu, split=False, ep_size=2, stage=0, clip=0.0, **options):
    """After one step: the layers' output, the loss, the gradient of the input, the parameters, the reported norm."""
    net = _net(kind, split=split, ep_size=ep_size, **options)
    _load(net, whole, split=split)
    outputs = []
    net.b.register_forward_hook(lambda module, args, result: outputs.append(result[0].detach()))
    start = deepspeed.initialize if kind is NativeMoE else initialize
    ds = config(kind="SGD", lr=1.0, stage=stage, clip=clip)
    engine = start(model=net, model_parameters=list(net.parameters()), config=ds, mpu=mpu)[0]
    x, y = batch(0, mpu.get_data_parallel_rank())
    x.requires_grad_()
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()
    return outputs[0], loss.detach(), x.grad, _gather(net, split=split), engine.get_global_grad_norm()


def _expected(whole, mpu, clip):
    batches = [[[batch(0, place) for place in range(2)]]]
    after, norms = reference_steps(whole, batches, k=2, lr=1.0, clip=clip)
    x, y = (t.double() for t in batches[0][0][mpu.get_data_parallel_rank()])
    x.requires_grad_()
    loss = reference_loss({key: value.double() for key, value in whole.items()}, x, y, k=2)
    return loss.detach(), torch.autograd.grad(loss, x)[0], after, norms[0]


def _check(cases):
    init_distributed()
    mpu, whole = TensorParallel(), whole_state()
    expected_by_clip = {clip: _expected(whole, mpu, clip) for clip in (0.0, 0.1)}
    for case in cases:
        _, loss, x_grad, after, norm = _step(MoE, whole, mpu=mpu, **case)
        assert groups.mpu is mpu
        expected = expected_by_clip[case.get("clip", 0.0)]
        assert_close(loss, expected[0], what=f"{case} loss")
        assert_close(x_grad, expected[1], what=f"{case} gradient of the input")
        assert float(norm) == pytest.approx(expected[3], rel=1e-5), case
        for key, value in expected[2].items():
            assert_close(after[key], value, what=f"{case} {key}")


def _check_native(split, stages):
    init_distributed()
    mpu, whole = TensorParallel(), whole_state()
    gather = deepspeed.comm.all_gather_into_tensor
    # gloo gathers into a flat buffer from a flat tensor only.
    deepspeed.comm.all_gather_into_tensor = lambda out, own, group: gather(out, own.reshape(-1), group=group)
    for stage, options in stages:
        output, loss, x_grad, after, _ = _step(NativeMoE, whole, mpu=mpu, split=split, stage=stage, **options)
        ours = _step(MoE, whole, mpu=mpu, split=split, stage=stage, strict_compat=True, **options)
        for found, expected, what in zip(ours, (output, loss, x_grad), ("output", "loss", "input"), strict=False):
            assert_close(found, expected, what=f"stage {stage} {what}")
        for key, value in after.items():
            assert_close(ours[3][key], value, what=f"stage {stage} {key}")


def _check_both(split, cases):
    _check([{"split": split, **case} for case in cases])
    _check_native(split, [(1, ROOM), (0, TIGHT)])


def test_whole_experts_equal_one_process_and_the_native_layer():
    """Outputs, gradients and norms; the tensor-parallel ranks hold different experts."""
    cases = [{"stage": 0, "ep_size": 4, "clip": 0.1, **PLAIN}, {"stage": 1, "clip": 0.1, **ROOM}]
    cases += [{"stage": 2, "ep_size": 1, **PLAIN}, {"stage": 0, **PLAIN}]
    cases += [{"ep_size": 4, "dispatch": "node+gpu", "ranks_per_node": 2, **PLAIN}]
    run_ranks(4, _check_both, False, cases, timeout_s=90)


def test_split_experts_equal_one_process_and_the_native_layer():
    """The same with enable_expert_tensor_parallelism: an expert's halves on the tensor-parallel ranks."""
    cases = [{"stage": 1, "clip": 0.1, **ROOM}, {"stage": 2, "ep_size": 1, **PLAIN}]
    cases += [{"stage": 0, "clip": 0.1, "dispatch": "node", "ranks_per_node": 2, **PLAIN}]
    run_ranks(4, _check_both, True, cases, timeout_s=90)


def _refused():
    init_distributed()
    mpu = TensorParallel()
    net = Net(ep_size=2, **PLAIN)
    net.b.enable_expert_tensor_parallelism = True
    with pytest.raises(
        ValueError, match=r"layer 'a' has enable_expert_tensor_parallelism=False, layer 'b' the contrary"
    ):
        initialize(model=net, config=config(kind="SGD"), mpu=mpu)
    with pytest.raises(ValueError, match=r"ep_size \(4\) of layer 'a' must divide .* data-parallel ranks \(2\)"):
        initialize(model=_net(MoE, split=True, ep_size=4, **PLAIN), config=config(kind="SGD"), mpu=mpu)


def test_layouts_without_groups_are_refused():
    run_ranks(4, _refused)
