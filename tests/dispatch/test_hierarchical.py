"""Hierarchical dispatch over gloo ranks: payloads bit by bit, and layers against one process."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from hierarchical_layers import UNEVEN, checkpoint_ways, dispatcher_of, gradients_by, inputs_of, make_layer
from hierarchy import LEVELS, routing_of, wanted_assignments, wanted_rows

from xmoe.dispatch.tensor_parallel import SharedTokens
from xmoe.ops.collectives import Exchange
from xmoe.ops.overlap import to_end
from xmoe.permute import permute
from xmoe.replay import fresh_decisions
from xmoe.testing import assert_close, check_assignments, run_ranks
from xmoe.topology import NodeLayout

pytestmark = pytest.mark.dist

# Dispatch alone: a row says which token of which rank it is, so that any misroute changes a number.


def send_codes(layouts, guard):
    world, rank = dist.get_world_size(), dist.get_rank()
    cases = itertools.product(layouts, LEVELS, CASES)
    for ranks_per_node, levels, (per_rank, k, kind, tokens_of_rank) in cases:
        print(f"{ranks_per_node=} {levels=} {per_rank=} {k=} {kind=} {tokens_of_rank=}")
        num_experts = per_rank * world
        routings = [routing_of(n, num_experts, k, kind, seed) for seed, n in enumerate(tokens_of_rank[:world])]
        codes = [(1000.0 * w + torch.arange(len(r.topk_ids_TK)))[:, None].repeat(1, 3) for w, r in enumerate(routings)]
        dispatcher = dispatcher_of(levels, ranks_per_node, self_row_guard=guard)
        x, mine = codes[rank].clone().requires_grad_(), routings[rank]
        (buffer,) = buffers = permute(mine, decide=fresh_decisions())
        (plan,) = dispatcher.plan(buffers)
        rows = to_end(dispatcher.dispatch(x, buffer, plan))

        wanted = wanted_assignments(routings, rank, per_rank)
        check_assignments(plan, len(rows.x_RD))
        expected = [codes[w][slot // k] for w, slot, _ in wanted]
        assert torch.equal(rows.x_RD[plan.row_ids_M.long()], torch.stack(expected) if wanted else torch.empty(0, 3))
        weights = [routings[w].topk_weights_TK.flatten()[slot] for w, slot, _ in wanted]
        assert torch.equal(rows.weights_M, torch.stack(weights) if wanted else torch.empty(0))

        # Each row times the number of its assignments: home comes each token times the number of its experts.
        times_R1 = torch.bincount(plan.row_ids_M, minlength=len(rows.x_RD)).float()[:, None]
        out = to_end(dispatcher.combine(rows.x_RD * times_R1, buffer, plan))
        kept = (mine.topk_ids_TK >= 0).sum(1).float()
        assert torch.equal(out, codes[rank] * kept[:, None])
        (out.sum() + 5 * rows.weights_M.sum()).backward()
        assert torch.equal(x.grad, kept[:, None].repeat(1, 3))
        assert torch.equal(mine.topk_weights_TK.grad, 5.0 * (mine.topk_ids_TK >= 0))

        layout = NodeLayout.from_ranks_per_node(range(world), ranks_per_node)
        own_rows, between, _ = wanted_rows(mine, rank, layout, levels, per_rank)
        traffic = dispatcher.traffic(plan)
        assert traffic.between_nodes == len(between)
        assert traffic.to_self == sum(target == rank for _, target, *_ in own_rows)
        assert traffic.assigned == int(kept.sum())
        totals = torch.tensor([traffic.inside_node + traffic.between_nodes, traffic.received])
        dist.all_reduce(totals)
        assert int(totals[0]) == int(totals[1])


CASES = [  # experts a rank, experts a token, routing, tokens of each rank
    (1, 1, "random", UNEVEN),
    (2, 4, "dropped", UNEVEN),
    (4, 8, "random", UNEVEN),
    (2, 2, "rank 0", UNEVEN),
    (2, 3, "skewed", UNEVEN[::-1]),
    (1, 2, "random", [0] * 8),
]


# Ranks make one node, several, or nodes of one rank each; six make three nodes, or nodes with two to pass rows on to.
@pytest.mark.parametrize(
    ("world", "layouts", "guard"),
    [(2, [1, 2], False), (4, [1, 2, 4], False), (4, [2], True), (6, [2, 3], False), (8, [2, 4], False)],
)
def test_every_row_arrives_where_its_experts_are(world, layouts, guard):
    run_ranks(world, send_codes, layouts, guard)


# The whole layer against one process that sees all tokens


DROPS = {"drop_tokens": True, "drop_policy": "probs", "capacity_factor": 0.5, "min_capacity": 1}
LAYERS = [  # experts a rank, at most so many experts a token, inputs, kind of expert, options
    (1, 1, "random", "fused", {}),
    (2, 3, "skewed", "loop", {}),
    (2, 4, "random", "fused", DROPS),
    (4, 8, "skewed", "fused", {}),
]


def layer_of(index, *, rank=0, world=1, num_ranks=1):
    """Layer ``index`` over ``num_ranks`` ranks, of which this has a share of ``1 / world``."""
    per_rank, k, _, expert, options = LAYERS[index]
    num_experts = per_rank * num_ranks
    return make_layer(num_experts, min(k, num_experts), rank=rank, world=world, expert=expert, **options)


def results_of(layer, rank, kind):
    """Output, loss, selections and all gradients of this rank's tokens; the layer's gradients add up."""
    x, upstream = inputs_of(rank, UNEVEN[rank], kind)
    y, aux, counts = layer(x)
    ((y * upstream).sum() + aux).backward()
    return y.detach(), aux.detach(), counts, x.grad, {name: p.grad for name, p in layer.named_parameters()}


def train_layers(ranks_per_node):
    torch.use_deterministic_algorithms(True)
    rank, world = dist.get_rank(), dist.get_world_size()
    answers = {}
    for levels, (index, (_, _, kind, _, _)) in itertools.product(LEVELS, enumerate(LAYERS)):
        layer = layer_of(index, rank=rank, world=world, num_ranks=world)
        layer.set_dispatcher(dispatcher_of(levels, ranks_per_node))
        answers[levels, index] = found = results_of(layer, rank, kind)
        layer.zero_grad()
        again = results_of(layer, rank, kind)
        for a, b in zip([*found[:4], *found[4].values()], [*again[:4], *again[4].values()], strict=True):
            assert torch.equal(a, b), f"two runs differ: {levels}, layer {index}"
    return answers


@functools.cache
def whole_layers(num_ranks):
    """Layers that hold every expert, and what they give for the tokens of each rank."""
    layers = [layer_of(index, num_ranks=num_ranks) for index in range(len(LAYERS))]
    return [
        (layer, [results_of(layer, rank, kind)[:4] for rank in range(num_ranks)])
        for layer, (_, _, kind, _, _) in zip(layers, LAYERS, strict=True)
    ]


@pytest.mark.parametrize(("world", "ranks_per_node"), [(2, 1), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4)])
def test_layers_equal_one_process(world, ranks_per_node):
    answers = run_ranks(world, train_layers, ranks_per_node)
    for levels, (index, (layer, expected)) in itertools.product(LEVELS, enumerate(whole_layers(world))):
        found = [answer[levels, index] for answer in answers]
        for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            what = f"{levels}, layer {index}, rank {rank}"
            assert_close(ours[0], theirs[0], what=f"output of {what}")
            assert torch.equal(ours[1], theirs[1])
            assert torch.equal(ours[2], theirs[2])
            assert_close(ours[3], theirs[3], what=f"input gradient of {what}")
        per_rank = LAYERS[index][0]
        for name, reference in layer.named_parameters():
            if name.startswith("experts"):
                _, _, expert_id, rest = name.split(".", 3)
                rank, local = divmod(int(expert_id), per_rank)
                gradient = found[rank][4][f"experts.mlps.{local}.{rest}"]
            else:
                gradient = sum(answer[4][name] for answer in found)
            assert_close(gradient, reference.grad, what=f"{name} of {levels}, layer {index}")


# Checkpointing: the recompute sends rows again, and decides nothing


def checkpointed(way, levels):
    """Gradients of two batches; counts and references are sent once for each."""
    rank = dist.get_rank()
    layer = make_layer(8, 3, rank=rank, world=4, input_jitter=0.2)
    layer.set_dispatcher(dispatcher_of(levels, 2))
    batches = [inputs_of(rank, UNEVEN[rank]), inputs_of(rank + 10, UNEVEN[-1 - rank])]
    gradients, num_integers = gradients_by(way, layer, batches)
    assert num_integers == 4
    return gradients


def checkpoint_by_all_ways(levels):
    ways = checkpoint_ways()
    expected = checkpointed(ways.pop("plain"), levels)
    for name, way in ways.items():
        for found, wanted in zip(checkpointed(way, levels), expected, strict=True):
            assert_close(found, wanted, what=f"{name}, {levels}")


@pytest.mark.parametrize("levels", ["gpu", "node+gpu"])
def test_checkpointing_replays_the_plan(levels):
    run_ranks(4, checkpoint_by_all_ways, levels)


# Tensor-parallel ranks share their tokens; kernels in the interpreter; autocast


def share_tokens():
    """Ranks 2i and 2i + 1 hold the same tokens; experts are spread over all four, two nodes of two."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    same = Exchange(group=pairs[rank // 2], label="pair", timeout_s=30.0)
    for levels in LEVELS:
        layer, whole = make_layer(8, 3, rank=rank, world=4), make_layer(8, 3)
        layer.set_dispatcher(SharedTokens(dispatcher_of(levels, 2), same))
        x, upstream = inputs_of(rank // 2, 7)
        expected, reference_upstream = inputs_of(rank // 2, 7)
        for module, rows, weight in ((layer, x, upstream), (whole, expected, reference_upstream)):
            y, aux, _ = module(rows)
            ((y * weight).sum() + aux).backward()
            module.y = y.detach()
        assert_close(layer.y, whole.y, what=f"output, {levels}")
        assert_close(x.grad, expected.grad, what=f"input gradient, {levels}")
        assert_close(layer.gate.wg.weight.grad, whole.gate.wg.weight.grad, what=f"router gradient, {levels}")


def test_tensor_parallel_ranks_share_their_tokens():
    run_ranks(4, share_tokens)


def compute_on_both_kernels():
    """Launchers do not know of levels; what they make of other levels' plans is tested without processes."""
    rank = dist.get_rank()
    found = {}
    for kernels in ("triton", "torch"):
        layer = make_layer(8, 3, rank=rank, world=4).float()
        layer.kernels = kernels
        layer.set_dispatcher(dispatcher_of("node+gpu", 2))
        x, upstream = (value.detach().float() for value in inputs_of(rank, UNEVEN[rank]))
        y, aux, _ = layer(x.requires_grad_())
        ((y * upstream).sum() + aux).backward()
        found[kernels] = [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    for ours, theirs in zip(found["triton"], found["torch"], strict=True):
        assert_close(ours, theirs)


def test_triton_kernels_give_what_their_twins_give():
    run_ranks(4, compute_on_both_kernels)


def autocasted():
    rank = dist.get_rank()
    layer, whole = make_layer(8, 3, rank=rank, world=4).float(), make_layer(8, 3).float()
    layer.set_dispatcher(dispatcher_of("node+gpu", 2))
    x = inputs_of(rank, UNEVEN[rank])[0].detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        y, aux, _ = layer(x)
        expected, aux2, _ = whole(x)
    (y.float().sum() + aux).backward()
    assert y.dtype == expected.dtype
    assert_close(y, expected, dtype=torch.bfloat16)
    assert torch.equal(aux, aux2)


def test_autocast_over_ranks():
    run_ranks(4, autocasted)
