"""Flat dispatch over gloo ranks: payloads bit by bit, the whole layer against one process, and what hangs."""

import pytest
import torch
import torch.distributed as dist
from hierarchical_layers import HIDDEN, checkpoint_ways, gradients_by, make_layer
from hierarchy import routing_of

from xmoe.dispatch.flat import FlatDispatcher
from xmoe.dispatch.local import LocalDispatcher
from xmoe.ops.overlap import to_end
from xmoe.permute import permute
from xmoe.replay import fresh_decisions
from xmoe.testing import assert_close, check_assignments, dense_oracle, run_ranks

pytestmark = pytest.mark.dist

UNEVEN = [5, 6, 0, 13]


def exchange(**options):
    from xmoe.ops.collectives import Exchange

    options = {"label": "blocks.3.moe", "timeout_s": 30.0} | options
    return Exchange(group=dist.group.WORLD, **options)


# Dispatch alone: a row says which token of which rank it is, so that any misroute changes a number.


def send_codes(tokens_of_rank, per_rank, k, kind, guard):
    """Checks one dispatch and its way back on this rank, against loops over all ranks' routings."""
    world, rank = dist.get_world_size(), dist.get_rank()
    print(f"{tokens_of_rank=} {per_rank=} {k=} {kind=} {guard=}")
    routings = [routing_of(n, world * per_rank, k, kind, seed) for seed, n in enumerate(tokens_of_rank[:world])]
    codes = [(1000.0 * w + torch.arange(len(r.topk_ids_TK)))[:, None].repeat(1, 3) for w, r in enumerate(routings)]
    dispatcher = FlatDispatcher(exchange(self_row_guard=guard))
    x, mine = codes[rank].clone().requires_grad_(), routings[rank]
    (buffer,) = buffers = permute(mine, decide=fresh_decisions())
    (plan,) = dispatcher.plan(buffers)
    rows = to_end(dispatcher.dispatch(x, buffer, plan))

    wanted = [
        (w, slot, e - rank * per_rank)
        for e in range(rank * per_rank, rank * per_rank + per_rank)
        for w, routing in enumerate(routings)
        for slot, found in enumerate(routing.topk_ids_TK.flatten().tolist())
        if found == e
    ]  # by local expert, then by source rank, then by slot
    assert plan.tokens_per_local_expert == [sum(e == i for _, _, e in wanted) for i in range(per_rank)]
    assert plan.first.recv_splits == [sum(w == i for w, _, _ in wanted) for i in range(world)]
    assert plan.num_assigned == int((mine.topk_ids_TK >= 0).sum())
    check_assignments(plan, len(rows.x_RD))
    assert dispatcher.traffic(plan).to_self == plan.first.send_splits[rank]
    expected = [codes[w][slot // k] for w, slot, _ in wanted]
    assert torch.equal(rows.x_RD[plan.row_ids_M.long()], torch.stack(expected) if wanted else torch.empty(0, 3))
    weights = [routings[w].topk_weights_TK.flatten()[slot] for w, slot, _ in wanted]
    assert torch.equal(rows.weights_M, torch.stack(weights) if wanted else torch.empty(0))

    out = to_end(dispatcher.combine(rows.x_RD, buffer, plan))
    kept = (mine.topk_ids_TK >= 0).sum(1).float()
    assert torch.equal(out, codes[rank] * kept[:, None])
    (out.sum() + 5 * rows.weights_M.sum()).backward()
    assert torch.equal(x.grad, kept[:, None].repeat(1, 3))
    assert torch.equal(mine.topk_weights_TK.grad, 5.0 * (mine.topk_ids_TK >= 0))


SENT = {  # by world size: tokens of each rank, experts a rank, experts a token, routing, guard
    1: [(UNEVEN, 4, 2, "random", False), (UNEVEN, 1, 1, "dropped", True)],
    2: [(UNEVEN, 1, 1, "random", False), (UNEVEN, 2, 4, "dropped", True), ([0, 0], 2, 2, "random", True)],
    4: [
        (UNEVEN, 1, 4, "random", False),
        (UNEVEN, 2, 3, "dropped", False),
        (UNEVEN, 2, 3, "dropped", True),  # a rank that sends nothing gets rows
        (UNEVEN, 4, 2, "random", False),
        (UNEVEN, 2, 2, "rank 0", False),
        (UNEVEN, 2, 2, "rank 0", True),  # public threads: Megatron-LM#1877, pytorch#146468
    ],
}


def send_all_codes():
    for case in SENT[dist.get_world_size()]:
        send_codes(*case)


@pytest.mark.parametrize("world", SENT)
def test_every_row_arrives_where_its_expert_is(world):
    run_ranks(world, send_all_codes)


# The whole layer against one process that sees all tokens


def inputs_of(rank, tokens, kind="random"):
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    if kind == "rank 0":  # the first experts' router rows, enlarged: all tokens go to rank 0
        gate = make_layer(8, 2).gate.wg.weight.detach()
        x = x * 1e-3 + torch.linalg.pinv(gate) @ torch.tensor([3.0, 3, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    upstream = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), upstream


def train_layer(k, kind, expert, guard):
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = make_layer(8, k, rank=rank, world=world, expert=expert)
    layer.set_dispatcher(FlatDispatcher(exchange(self_row_guard=guard)))
    found = []
    for _ in range(2):
        x, upstream = inputs_of(rank, UNEVEN[rank], kind)
        layer.zero_grad()
        y, aux, counts = layer(x)
        ((y * upstream).sum() + aux).backward()
        grads = {name: p.grad for name, p in layer.named_parameters()}
        found.append((y.detach(), aux.detach(), counts, x.grad, grads))
    for a, b in zip(found[0][:4], found[1][:4], strict=True):
        assert torch.equal(a, b), "two runs differ"
    assert all(torch.equal(g, found[1][4][name]) for name, g in found[0][4].items())
    return found[0]


TRAINED = {  # by world size: experts a token, inputs, kind of expert, guard
    1: [(3, "random", "fused", False)],
    2: [(1, "random", "fused", False), (2, "random", "loop", True)],
    4: [
        (4, "random", "fused", False),
        (2, "rank 0", "fused", False),
        (2, "rank 0", "fused", True),
        (2, "rank 0", "loop", False),
    ],
}


def train_layers():
    torch.use_deterministic_algorithms(True)  # public thread: torchtitan PR 1974
    return [train_layer(*case) for case in TRAINED[dist.get_world_size()]]


@pytest.mark.parametrize("world", TRAINED)
def test_layer_equals_one_process(world):
    # Public threads: DeepSpeed#6809, #6545, DeepEP#604.
    answers = run_ranks(world, train_layers)
    for index, (k, kind, expert, _) in enumerate(TRAINED[world]):
        compare_with_one_process([answer[index] for answer in answers], k, kind, expert)


def compare_with_one_process(ranks, k, kind, expert):
    world = len(ranks)
    layer = make_layer(8, k, expert=expert)
    pairs = [inputs_of(rank, UNEVEN[rank], kind) for rank in range(world)]
    outs, losses = [], []
    for x, upstream in pairs:
        routing = layer.gate(x)
        y = dense_oracle(
            x,
            experts=list(layer.experts.modules_in_order()),
            topk_ids_TK=routing.topk_ids_TK,
            topk_weights_TK=routing.topk_weights_TK,
        )
        outs.append(y)
        losses.append((y * upstream).sum() + routing.aux_loss)
    sum(losses).backward()
    for rank, (y, _, counts, grad_x, grads) in enumerate(ranks):
        assert_close(y, outs[rank], what=f"output of rank {rank}")
        assert_close(grad_x, pairs[rank][0].grad, what=f"input gradient of rank {rank}")
        assert int(counts.sum()) == k * UNEVEN[rank]
        for name, grad in grads.items():
            if name.startswith("experts"):
                _, _, local, rest = name.split(".", 3)
                index = rank * (8 // world) + int(local)
                reference = layer.experts.modules_in_order()[index].get_parameter(rest).grad
                if kind == "rank 0" and rank > 0:
                    assert bool((grad == 0).all()), f"{name} of rank {rank}: no row, so exactly no gradient"
                else:
                    assert_close(grad, reference, what=f"{name} of rank {rank}")
    gate_grad = sum(grads["gate.wg.weight"] for *_, grads in ranks)
    assert_close(gate_grad, layer.gate.wg.weight.grad, what="router gradient, summed over ranks")


def train_with_drops():
    return {policy: train_with_drops_by(policy) for policy in ("probs", "position")}


def train_with_drops_by(policy):
    rank = dist.get_rank()
    layer = make_layer(
        8, 2, rank=rank, world=4, drop_tokens=True, drop_policy=policy, capacity_factor=0.5, min_capacity=1
    )
    layer.set_dispatcher(FlatDispatcher(exchange()))
    x, upstream = inputs_of(rank, UNEVEN[rank])
    y, aux, _ = layer(x)
    ((y * upstream).sum() + aux).backward()
    whole = make_layer(8, 2, drop_tokens=True, drop_policy=policy, capacity_factor=0.5, min_capacity=1)
    x2, _ = inputs_of(rank, UNEVEN[rank])
    y2, aux2, _ = whole(x2)
    ((y2 * upstream).sum() + aux2).backward()
    assert_close(y, y2)
    assert_close(x.grad, x2.grad)
    assert int(layer.counters.routed_E.sum()) <= int(layer.counters.selected_E.sum())
    return int(layer.counters.routed_E.sum()), layer.counters.computed_rows, layer.counters.all_to_all_bytes


def test_drops_and_counters():
    answers = run_ranks(4, train_with_drops)
    for policy in ("probs", "position"):
        routed, computed, moved_bytes = zip(*[answer[policy] for answer in answers], strict=True)
        assert sum(routed) == sum(computed) < 2 * sum(UNEVEN)
        assert moved_bytes[2] > 0  # no token of its own, but results of others' tokens


# One count exchange, one sync, one order


def record_collectives():
    rank = dist.get_rank()
    layers = [make_layer(8, 2, rank=rank, world=4) for _ in range(2)]
    for index, layer in enumerate(layers):
        layer.set_dispatcher(FlatDispatcher(exchange(label=f"layer{index}")))
    calls, syncs = [], []
    all_to_all, tolist = dist.all_to_all_single, torch.Tensor.tolist

    def recorded(output, input, *splits, **options):
        calls.append((str(input.dtype), tuple(input.shape[1:]), bool(splits)))
        return all_to_all(output, input, *splits, **options)

    dist.all_to_all_single = recorded
    torch.Tensor.tolist = lambda self: (syncs.append(self.shape), tolist(self))[1]
    for name in ("item", "__int__", "__bool__", "__float__", "nonzero", "cpu", "numpy"):
        setattr(torch.Tensor, name, lambda self, name=name: syncs.append(name))
    x, _ = inputs_of(rank, UNEVEN[rank])
    y, first, _ = layers[0](x)
    y, second, _ = layers[1](y)
    forward = len(calls)
    (y.sum() + first + second).backward()
    return calls, forward, len(syncs)


def test_one_count_exchange_one_sync_and_one_order_of_collectives():
    # Public thread: Megatron-LM#5749.
    answers = run_ranks(4, record_collectives)
    calls, forward, syncs = answers[0]
    assert all(answer == answers[0] for answer in answers)
    assert syncs == 2  # one for each layer
    assert forward == 2 * 4
    assert sum(dtype == "torch.int64" for dtype, _, _ in calls) == 2
    assert len(calls) == forward + 2 * 3


# Checkpointing over ranks: the recompute exchanges rows again, counts never


def checkpointed(way):
    """Gradients of two batches; counts are sent once for each."""
    rank = dist.get_rank()
    noise = {"sample_second_expert": True, "drop_tokens": True, "capacity_factor": 0.6, "min_capacity": 1}
    layer = make_layer(8, 2, rank=rank, world=4, input_jitter=0.2, **noise)
    layer.set_dispatcher(FlatDispatcher(exchange()))
    batches = [inputs_of(rank, UNEVEN[rank]), inputs_of(rank + 10, UNEVEN[-1 - rank])]
    gradients, num_integers = gradients_by(way, layer, batches)
    assert num_integers == 2
    assert int(layer.gate.step_counts.sum()) == 2 * sum(len(x) for x, _ in batches)
    return gradients


def checkpoint_by_all_ways():
    ways = checkpoint_ways()
    expected = checkpointed(ways.pop("plain"))
    for name, way in ways.items():
        for found, wanted in zip(checkpointed(way), expected, strict=True):
            assert_close(found, wanted, what=name)


def test_checkpointing_over_ranks():
    run_ranks(4, checkpoint_by_all_ways)


def autocasted():
    rank = dist.get_rank()
    layer = make_layer(8, 2, rank=rank, world=2).float()
    layer.set_dispatcher(FlatDispatcher(exchange()))
    whole = make_layer(8, 2).float()
    x = inputs_of(rank, 6 * rank)[0].detach().float()  # rank 0 has none
    with torch.autocast("cpu", torch.bfloat16):
        y, aux, _ = layer(x)
        y2, aux2, _ = whole(x)
    (y.float().sum() + aux).backward()
    assert y.dtype == y2.dtype
    assert_close(y, y2, dtype=torch.bfloat16)
    assert torch.equal(aux, aux2)


def test_autocast_over_ranks():
    run_ranks(2, autocasted)


# A rank that does not come


def skip_on(missing, where):
    """The missing rank returns, and lives on until all have."""
    rank = dist.get_rank()
    layer = make_layer(8, 2, rank=rank, world=dist.get_world_size())
    layer.set_dispatcher(FlatDispatcher(exchange(timeout_s=5.0)))
    x, _ = inputs_of(rank, 5)
    dist.barrier()  # both are there
    if where == "layer":
        if rank != missing:
            layer.eval()(x)
    else:
        y, _, _ = layer(x)
        if rank != missing:
            y.sum().backward()


@pytest.mark.parametrize(("where", "operation"), [("layer", "exchange of counts"), ("backward", "combine of rows")])
def test_a_rank_that_skips_a_layer_is_reported_by_the_others(where, operation):
    # Public threads: DeepSpeed#5794, deepspeed-course PR 28 (evaluation on one rank only).
    answers = run_ranks(2, skip_on, 1, where, return_exceptions=True)
    assert isinstance(answers[0], RuntimeError)
    message = str(answers[0])
    assert f"blocks.3.moe: {operation}" in message
    assert "rank 0 has waited 5 s" in message
    assert "did not reach" in message
    assert answers[1] is None


def evaluate(batches):
    rank = dist.get_rank()
    layer = make_layer(8, 2, rank=rank, world=2).eval()
    layer.set_dispatcher(FlatDispatcher(exchange()))
    plain = make_layer(8, 2).eval()
    plain.set_dispatcher(LocalDispatcher())
    with torch.no_grad():
        for index in range(max(batches)):
            x, _ = inputs_of(rank + 10 * index, 4 if index < batches[rank] else 0)
            assert_close(layer(x)[0], plain(x)[0])
    return layer.counters.computed_rows


def test_evaluation_with_unequal_batches_and_without_gradients():
    assert run_ranks(2, evaluate, [3, 1]) == [0, 0]
