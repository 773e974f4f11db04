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


def weight_and_batch():
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(NUM_EXPERTS, D, generator=generator)
    mean = torch.randn(SEQUENCES, 1, D, generator=generator)  # sequences differ, so that scopes do
    return weight, mean + 0.5 * torch.randn(SEQUENCES, TOKENS, D, generator=generator)


def engine_for(weight, *, ep_size=1, accumulation=1, native=False, wrap=lambda layer: layer, **options):
    net = nn.Sequential(MoE(D, mlp(), NUM_EXPERTS, ep_size, K, **{**PLAIN, **options}))
    with torch.no_grad():
        net[0].deepspeed_moe.gate.wg.weight.copy_(weight)
    call = wrap(net[0])
    net.forward = lambda x: call(x)[1]
    ds = config(kind="SGD", lr=LR, accumulation=accumulation, xmoe={"collective_timeout_s": 1.5})
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


def loop_loss(weight, parts, loads_of):
    """Mean of E / K * sum(load * share) over ``parts`` (lists of tokens); loads from the tokens ``loads_of`` says."""
    losses = []
    for index, part in enumerate(parts):
        counted = loads_of(index)
        ids = [(x @ weight.T).detach().topk(K).indices.tolist() for x in counted]
        loads = [sum(expert in row for row in ids) / len(counted) for expert in range(NUM_EXPERTS)]
        shares = [sum((x @ weight.T).softmax(0)[expert] for x in part) / len(part) for expert in range(NUM_EXPERTS)]
        losses.append(NUM_EXPERTS / K * sum(load * share for load, share in zip(loads, shares, strict=True)))
    return sum(losses) / len(losses)


def loop_gradient(scope, parts):
    """By float64 loops. ``parts`` are sequences, or micro-batches of all ranks' tokens, in their order in time."""
    weight = weight_and_batch()[0].double().requires_grad_()
    parts = [list(part.double().reshape(-1, D)) for part in parts]
    before = {"sequence": lambda i: parts[i], "global_batch": lambda i: [x for part in parts[: i + 1] for x in part]}
    return torch.autograd.grad(loop_loss(weight, parts, before[scope]), weight)[0]


def _gradients():
    init_distributed()
    weight, batch = weight_and_batch()
    found = {}
    for scope in ("micro_batch", "sequence", "global_batch"):
        for accumulation in (1, 2):
            ep_size = dist.get_world_size() if accumulation == 1 else 1
            engine = engine_for(weight, ep_size=ep_size, accumulation=accumulation, aux_loss_scope=scope)
            parts = of_this_rank(batch, accumulation)
            first, second = step(engine, parts), step(engine, parts)
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-8, msg="a step counted in the next one")
            found[scope, accumulation] = first.tolist()
    return found


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def test_gradients_equal_the_loops_on_any_ranks_and_micro_batches():
    batch = weight_and_batch()[1]
    expected = {
        ("sequence", 1): loop_gradient("sequence", batch),
        ("sequence", 2): loop_gradient("sequence", batch),
        ("global_batch", 1): loop_gradient("global_batch", [batch]),
        ("global_batch", 2): loop_gradient("global_batch", batch.chunk(2)),
    }
    found = {}
    for world_size in (1, 2, 4):
        for ranks in run_ranks(world_size, _gradients):
            for (scope, parts), gradient in ranks.items():
                found[scope, parts, world_size] = torch.tensor(gradient, dtype=torch.float64)
    for (scope, parts, world_size), gradient in found.items():
        if scope != "micro_batch":
            error = relative(gradient, expected[scope, parts])
            print(f"{scope}, {world_size} ranks, {parts} micro-batches: {error:.2g} from the loops")
            assert error < 5e-6, (scope, parts, world_size)
    # What the documentation says of the others: they do depend on the split.
    for scope, one, other in [
        ("micro_batch", (1, 1), (1, 2)),
        ("micro_batch", (1, 1), (2, 1)),
        ("global_batch", (1, 1), (2, 1)),
    ]:
        change = relative(found[(scope, *one)], found[(scope, *other)])
        print(f"{scope}: {change:.2g} between {one} and {other} (micro-batches, ranks)")
        assert change > 1e-2


def _uneven_and_recomputed():
    init_distributed()
    rank = dist.get_rank()
    weight, batch = weight_and_batch()
    tokens = batch.reshape(-1, D)
    sums = []
    all_reduce = dist.all_reduce

    def recorded(tensor, *args, **kwargs):
        if tensor.dtype == torch.int64:
            sums.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = recorded
    for sizes in ((3, 37), (40, 0)):
        own = tokens.split(sizes)[rank]
        kinds = {
            "plain": lambda layer: layer,
            "reentrant": lambda layer: lambda x: checkpoint(layer, x.requires_grad_(), use_reentrant=True),
            "not": lambda layer: lambda x: checkpoint(layer, x, use_reentrant=False),
        }
        for kind, wrap in kinds.items():
            engine = engine_for(weight, aux_loss_scope="global_batch", wrap=wrap)
            sums.clear()
            error = relative(step(engine, [own.clone()]), loop_gradient("global_batch", [tokens]))
            assert error < 5e-6, (sizes, kind)
            assert sums == [NUM_EXPERTS + 1], f"{kind}: one sum over the ranks for each layer and forward"
        # Plain deepspeed.initialize tells nobody where a step ends: each forward's loads stand alone.
        plain = engine_for(weight, aux_loss_scope="global_batch", native=True)
        for _ in range(2):
            assert relative(step(plain, [own.clone()]), loop_gradient("global_batch", [tokens])) < 5e-6
    # An evaluation is this rank's own affair; a training forward is not, and says so.
    engine.eval()
    if rank == 0:
        engine(own)
    engine.train()
    if rank == 0:
        engine(own)


def test_uneven_ranks_recomputes_and_a_missing_call():
    waiting, other = run_ranks(2, _uneven_and_recomputed, return_exceptions=True)
    assert other is None, other
    assert "'0: counts of the balancing loss'" in str(waiting), waiting
    assert "did not reach" in str(waiting)


def _groups_under_the_engine():
    init_distributed()
    weight, batch = weight_and_batch()
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
