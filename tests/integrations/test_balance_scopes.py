"""The load-balancing loss per sequence and over the global batch, under the engine: gradients on the router's weight.

One batch of eight sequences on 1, 2 and 4 ranks, as one micro-batch or two, against float64 loops over tokens. SGD
at a high rate, so that a step shows the gradient and not the weights' rounding.
"""

import pytest
import torch
import torch.distributed as dist
from ds_nets import PLAIN, D, MoE, config, engine_of, init_distributed, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

from xmoe.testing import run_ranks

pytestmark = pytest.mark.dist

NUM_EXPERTS, K, SEQUENCES, TOKENS, LR = 8, 3, 8, 5, 1000.0


def weight_and_batches():
    """The router's weight, and the batches of two steps."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(NUM_EXPERTS, D, generator=generator)
    means = torch.randn(2, SEQUENCES, 1, D, generator=generator)  # sequences differ, so that scopes do
    return weight, *(means + 0.5 * torch.randn(2, SEQUENCES, TOKENS, D, generator=generator))


def engine_for(weight, *, ep_size=1, accumulation=1, native=False, wrap=lambda layer: layer, **options):
    net = nn.Sequential(MoE(D, mlp(), NUM_EXPERTS, ep_size, K, **{**PLAIN, **options}))
    with torch.no_grad():
        net[0].deepspeed_moe.gate.wg.weight.copy_(weight)
    call = wrap(net[0])
    net.forward = lambda x: call(x)[1]
    ds = config(kind="SGD", lr=LR, accumulation=accumulation, xmoe={"collective_timeout_s": 30.0})
    return engine_of(net, native=native, ds=ds)


def step(engine, parts):
    """The gradient on the router's weight of one optimizer step over this rank's micro-batches."""
    weight = engine.module[0].deepspeed_moe.gate.wg.weight
    before = weight.detach().clone()
    for x in parts:
        engine.backward(engine(x))
        engine.step()
    gradient = (before - weight.detach()).double() / LR
    with torch.no_grad():
        weight.copy_(before)
    return gradient


def of_this_rank(batch, accumulation):
    """This rank's micro-batches; a micro-batch of all ranks holds the same sequences whatever their number."""
    return [part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch.chunk(accumulation)]


def loop_loss(weight, parts, counted):
    """Mean over ``parts`` (lists of tokens) of E / K * sum(load * share); loads from ``counted``, None: the part."""
    losses = []
    for part in parts:
        tokens = part if counted is None else counted
        ids = [(x @ weight.T).detach().topk(K).indices.tolist() for x in tokens]
        loads = [sum(expert in row for row in ids) / len(tokens) for expert in range(NUM_EXPERTS)]
        shares = [sum((x @ weight.T).softmax(0)[expert] for x in part) / len(part) for expert in range(NUM_EXPERTS)]
        losses.append(NUM_EXPERTS / K * sum(load * share for load, share in zip(loads, shares, strict=True)))
    return sum(losses) / len(losses)


def loop_gradient(batch, *, last=None):
    """By float64 loops: each sequence by its own loads, or all by the loads of the batch ``last``."""
    weight = weight_and_batches()[0].double().requires_grad_()
    parts = list(batch.double()) if last is None else [batch.double().reshape(-1, D)]
    counted = None if last is None else list(last.double().reshape(-1, D))
    return torch.autograd.grad(loop_loss(weight, [list(part) for part in parts], counted), weight)[0]


def _gradients():
    init_distributed()
    weight, *batches = weight_and_batches()
    sums = record_sums()
    found = {}
    for scope in ("micro_batch", "sequence", "global_batch"):
        for accumulation in (1, 2):
            ep_size = dist.get_world_size() if accumulation == 1 else 1
            engine = engine_for(weight, ep_size=ep_size, accumulation=accumulation, aux_loss_scope=scope)
            sums.clear()
            steps = [step(engine, of_this_rank(batch, accumulation)) for batch in batches]
            assert sums == ([NUM_EXPERTS] * 2 if scope == "global_batch" else []), "one sum over the ranks each step"
            if scope == "global_batch":
                assert float(steps[0].abs().max()) < 1e-6, "the first step has no loads to balance by"
            found[scope, accumulation] = steps[1].tolist()
    return found


def record_sums():
    """Sizes of the integer tensors that are all-reduced from here on."""
    sums = []
    all_reduce = dist.all_reduce

    def recorded(tensor, *args, **kwargs):
        if tensor.dtype == torch.int64:
            sums.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = recorded
    return sums


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def test_gradients_equal_the_loops_on_any_ranks_and_micro_batches():
    first, second = weight_and_batches()[1:]
    expected = {"sequence": loop_gradient(second), "global_batch": loop_gradient(second, last=first)}
    found = {}
    for world_size in (1, 2, 4):
        for ranks in run_ranks(world_size, _gradients):
            for (scope, parts), gradient in ranks.items():
                found[scope, parts, world_size] = torch.tensor(gradient, dtype=torch.float64)
    for (scope, parts, world_size), gradient in found.items():
        if scope != "micro_batch":
            errors = relative(gradient, expected[scope]), relative(gradient, found[scope, 1, 1])
            print(f"{scope}, {world_size} ranks, {parts} micro-batches: {max(errors):.2g} from the loops and the whole")
            assert max(errors) < 5e-6, (scope, parts, world_size, errors)
    # What the documentation says of the default: it does depend on the split.
    for other in [(1, 2), (2, 1)]:
        change = relative(found[("micro_batch", *other)], found["micro_batch", 1, 1])
        print(f"micro_batch: {change:.2g} between one batch and {other} (micro-batches, ranks)")
        assert change > 1e-2
    # And of the published running counts: the second micro-batch knows the first one's loads, not the reverse.
    halves = second.chunk(2)
    running = (loop_gradient(halves[0], last=halves[0]) + loop_gradient(halves[1], last=second)) / 2
    assert relative(running, loop_gradient(second, last=second)) > 1e-2


def _recomputed_skipped_and_resumed(folder):
    init_distributed()
    weight, first, second = weight_and_batches()
    own_first, own_second = of_this_rank(first, 1), of_this_rank(second, 1)
    expected = loop_gradient(second, last=first)
    kinds = {
        "reentrant": lambda layer: lambda x: checkpoint(layer, x.requires_grad_(), use_reentrant=True),
        "not": lambda layer: lambda x: checkpoint(layer, x, use_reentrant=False),
        "plain": lambda layer: layer,
    }
    for kind, wrap in kinds.items():
        engine = engine_for(weight, aux_loss_scope="global_batch", wrap=wrap)
        step(engine, [x.clone() for x in own_first])
        engine.eval()
        with torch.no_grad():
            engine(own_second[0][: dist.get_rank()])  # no collective, so any number of times on any rank
        engine.train()
        assert relative(step(engine, [x.clone() for x in own_second]), expected) < 5e-6, kind
    engine = engine_for(weight, aux_loss_scope="global_batch")
    step(engine, own_first)
    engine.save_checkpoint(folder, tag="t")
    dist.barrier()
    resumed = engine_for(weight, aux_loss_scope="global_batch")
    resumed.load_checkpoint(folder)
    assert relative(step(resumed, own_second), expected) < 5e-6, "a resumed run balances otherwise"
    # Plain deepspeed.initialize tells nobody where a step ends: each forward's loads stand alone.
    plain = engine_for(weight, aux_loss_scope="global_batch", native=True)
    alone = [x.chunk(2)[dist.get_rank()] for x in (first, second)]
    for own, whole in zip(alone, (first, second), strict=True):
        mean = sum(loop_gradient(half, last=half) for half in whole.chunk(2)) / 2
        assert relative(step(plain, [own]), mean) < 5e-6


def test_recomputes_evaluations_and_resumes(tmp_path):
    run_ranks(2, _recomputed_skipped_and_resumed, str(tmp_path))


def _groups_under_the_engine():
    init_distributed()
    weight, batch, _ = weight_and_batches()
    groups = {"num_expert_groups": 4, "num_limited_groups": 2}
    net = nn.Sequential(MoE(D, mlp(), NUM_EXPERTS, 2, K, **PLAIN))
    net.forward = lambda x: net[0](x)
    engine = engine_of(net, ds=config(kind="SGD", xmoe=groups))
    with torch.no_grad():
        net[0].deepspeed_moe.gate.wg.weight.copy_(weight)
    _, _, counts = engine(batch)
    single = MoE(D, mlp(), NUM_EXPERTS, 1, K, **PLAIN, **groups)
    single.deepspeed_moe.gate.wg = net[0].deepspeed_moe.gate.wg
    assert torch.equal(counts, single(batch)[2])
    free = MoE(D, mlp(), NUM_EXPERTS, 1, K, **PLAIN)
    free.deepspeed_moe.gate.wg = net[0].deepspeed_moe.gate.wg
    assert not torch.equal(counts, free(batch)[2])


def test_groups_from_the_json_section():
    run_ranks(2, _groups_under_the_engine)
