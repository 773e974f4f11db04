"""Fine-tuning of chosen experts: a rank whose experts are all frozen takes part in the others' backward."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import logger
from ds_nets import NUM_EXPERTS, PLAIN, D, Net, batch, config, local_state, mlp, reference_loss, whole_state
from torch import nn
from torch.utils.checkpoint import checkpoint

from xmoe.integrations.deepspeed import MoE, init_distributed, initialize
from xmoe.testing import assert_close, run_ranks

pytestmark = pytest.mark.dist

CHOSEN = 1  # the expert of rank 0 that trains


class Custom(nn.Module):
    """No known formula."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, x):
        return torch.tanh(self.fc(x))


class Block(nn.Module):
    def __init__(self, expert, **options):
        super().__init__()
        self.moe = MoE(D, expert, NUM_EXPERTS, k=2, **PLAIN, **options)

    def forward(self, x):
        return self.moe(x)[0]


def train_only(layers, *, expert):
    """Everything else of the layers is frozen; None: all is."""
    for layer in layers:
        layer.requires_grad_(False)
        if expert is not None:
            layer.deepspeed_moe.experts.deepspeed_experts[expert].requires_grad_(True)


def tokens_of(rank):
    return torch.randn(5, D, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _layers(cases):
    init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    for fused, recomputed, options in cases:
        torch.manual_seed(0)
        whole = Block(mlp() if fused else Custom()).double()
        for parameter in whole.parameters():
            nn.init.normal_(parameter, std=0.4)
        block = Block(mlp() if fused else Custom(), ep_size=world, collective_timeout_s=20.0, **options).double()
        block.load_state_dict(local_state(whole.state_dict(), block))
        train_only([whole.moe], expert=CHOSEN)
        train_only([block.moe], expert=CHOSEN if rank == 0 else None)
        block.moe.set_deepspeed_parallelism()
        y = checkpoint(block, tokens_of(rank), use_reentrant=False) if recomputed else block(tokens_of(rank))
        assert y.requires_grad, "on every rank alike"
        y.square().sum().backward()
        for other in range(world):
            whole(tokens_of(other)).square().sum().backward()
        gradients = [p.grad for p in block.parameters()]
        assert sum(g is not None for g in gradients) == (
            sum(p.requires_grad for p in whole.parameters()) if not rank else 0
        )
        if rank == 0:
            found, expected = (b.moe.deepspeed_moe.experts.deepspeed_experts[CHOSEN] for b in (block, whole))
            for a, b in zip(found.parameters(), expected.parameters(), strict=True):
                assert bool(b.grad.abs().max() > 1e-3), "tokens of the chosen expert"
                assert_close(a.grad, b.grad)


LAYERS = [
    (True, False, {"dispatch": "flat"}),
    (False, False, {"dispatch": "flat", "overlap_chunks": 2}),
    (True, True, {"dispatch": "flat"}),
    (True, False, {"dispatch": "node+gpu", "ranks_per_node": 2, "overlap_chunks": 2}),
    (False, False, {"dispatch": "node+gpu", "ranks_per_node": 2}),
]


def test_experts_of_one_rank_train():
    run_ranks(4, _layers, LAYERS)


def _frozen_everywhere():
    init_distributed()
    block = Block(mlp(), ep_size=2, dispatch="flat", collective_timeout_s=20.0).double()
    train_only([block.moe], expert=None)
    block.moe.set_deepspeed_parallelism()
    assert not block(tokens_of(0)).requires_grad, "no backward to pay for"
    # What trains on one rank after the groups were made is none that the others know of; thawed on all it is.
    train_only([block.moe], expert=CHOSEN)
    block(tokens_of(0)).sum().backward()


def test_a_layer_frozen_everywhere_has_no_backward():
    run_ranks(2, _frozen_everywhere)


def _specialised_net(whole):
    net = Net(ep_size=2, collective_timeout_s=20.0, **PLAIN)
    net.load_state_dict(local_state(whole, net))
    net.first.requires_grad_(False)
    train_only([net.a, net.b], expert=CHOSEN if dist.get_rank() == 0 else None)
    return net


def _engine():
    logger.setLevel("ERROR")
    init_distributed()
    rank, whole = dist.get_rank(), whole_state()
    net = _specialised_net(whole)
    engine = initialize(model=net, config=config(kind="SGD", lr=0.1))[0]
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    engine.backward(engine(*batch(0)))
    engine.step()

    leaves = {key: value.double() for key, value in whole.items()}
    chosen = {key: leaf.requires_grad_() for key, leaf in leaves.items() if f"experts.{CHOSEN}." in key}
    batches = [[part.double() for part in batch(0, other)] for other in (0, 1)]
    loss = sum(reference_loss(leaves, *one, k=2) for one in batches) / 2
    gradients = dict(zip(chosen, torch.autograd.grad(loss, list(chosen.values())), strict=True))
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-4)
    for name, parameter in net.named_parameters():
        if rank == 0 and name in chosen:
            assert_close(parameter, before[name].double() - 0.1 * gradients[name], dtype=torch.float32, what=name)
            assert not torch.equal(parameter, before[name])
        else:
            assert torch.equal(parameter, before[name]), name

    # Under bf16 the ranks also ask each other whether a gradient of an expert overflowed.
    engine = initialize(model=_specialised_net(whole), config=config(kind="SGD", lr=0.1, bf16=True))[0]
    engine.backward(engine(*batch(0, dtype=torch.bfloat16)))
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=2e-2)


def test_under_the_engine_experts_of_one_rank_train():
    run_ranks(2, _engine)


def _refused():
    """On every rank alike, where experts of rank 1 are frozen and DeepSpeed's optimizer takes no such ranks."""
    logger.setLevel("ERROR")
    init_distributed()
    fused = {"type": "Adam", "params": {"lr": 0.1}}
    cases = [
        ((2, 2), ["a", "b"], config(stage=1, kind="SGD"), "ZeRO 1"),
        ((1, 2), ["b"], config(stage=2, kind="SGD"), "ZeRO 2"),
        ((2, 2), ["a", "b"], config(bf16=True, optimizer=fused), "the optimizer 'Adam' in 16 bits"),
        (
            (2, 2),
            ["a", "b"],
            config(bf16=True, kind="SGD", data_types={"grad_accum_dtype": "fp32"}),
            "data_types.grad_accum_dtype in 16 bits",
        ),
    ]
    for ep_size, frozen, ds, what in cases:
        net = Net(ep_size=ep_size, collective_timeout_s=20.0, **PLAIN)
        if dist.get_rank() == 1:
            train_only([getattr(net, name) for name in frozen], expert=None)
        message = f"all experts of rank 1 in layers of ep_size 2 are frozen, which {what} does not take"
        with pytest.raises(ValueError, match=message):
            initialize(model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=ds)


def _refused_pipeline():
    logger.setLevel("ERROR")
    init_distributed()
    block = Block(mlp(), ep_size=2, collective_timeout_s=20.0)
    train_only([block.moe], expert=CHOSEN if dist.get_rank() == 0 else None)
    net = PipelineModule([block], num_stages=1, loss_fn=lambda out, y: (out - y).square().mean())
    message = "all experts of rank 1 in layers of ep_size 2 are frozen, which a pipeline in 16 bits does not take"
    with pytest.raises(ValueError, match=message):
        initialize(model=net, config=config(kind="SGD", bf16=True))


def test_ranks_that_differ_are_refused_where_deepspeed_takes_none():
    run_ranks(2, _refused)


def test_a_pipeline_of_ranks_that_differ_is_refused_in_16_bits():
    run_ranks(2, _refused_pipeline)


def _nothing_trains_here():
    """The usual choice of parameters is empty on rank 1."""
    logger.setLevel("ERROR")
    init_distributed()
    net = _specialised_net(whole_state())
    chosen = [p for p in net.parameters() if p.requires_grad]
    assert bool(chosen) == (dist.get_rank() == 0)
    engine = initialize(model=net, model_parameters=chosen, config=config(kind="SGD", lr=0.1))[0]
    engine.backward(engine(*batch(0)))
    engine.step()
    return engine.get_global_grad_norm()


def test_a_rank_may_have_nothing_to_train():
    one, other = run_ranks(2, _nothing_trains_here)
    assert one == other > 0
