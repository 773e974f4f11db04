"""Hierarchical dispatch over gloo ranks: payloads bit by bit, and layers against one process."""

import pytest
import torch
import torch.distributed as dist
from hierarchical_layers import UNEVEN, dispatcher_of, inputs_of, make_layer
from hierarchy import LEVELS, routing_of, wanted_assignments, wanted_rows

from xmoe.dispatch.tensor_parallel import SharedTokens
from xmoe.ops.collectives import Exchange
from xmoe.ops.overlap import to_end
from xmoe.permute import permute
from xmoe.replay import fresh_decisions
from xmoe.testing import assert_close, check_assignments, run_ranks
from xmoe.topology import NodeLayout

pytestmark = pytest.mark.dist

SHAPES = [(1, 2), (1, 4), (2, 1), (2, 2), (4, 2), (2, 4)]  # nodes, ranks on each


# Dispatch alone: a row says which token of which rank it is, so that any misroute changes a number.


def send_codes(ranks_per_node, cases, guard):
    world, rank = dist.get_world_size(), dist.get_rank()
    for levels, per_rank, k, kind, tokens_of_rank in cases:
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


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), SHAPES)
def test_every_row_arrives_where_its_experts_are(nodes, ranks_per_node, guard):
    cases = [
        (levels, per_rank, min(k, per_rank * nodes * ranks_per_node), kind, tokens)
        for levels in LEVELS
        for per_rank, k, kind, tokens in [
            (1, 1, "random", UNEVEN),
            (2, 4, "dropped", UNEVEN),
            (4, 8, "random", UNEVEN),
            (2, 2, "rank 0", UNEVEN),
            (2, 3, "skewed", UNEVEN[::-1]),
            (1, 2, "random", [0] * 8),
        ]
    ]
    run_ranks(nodes * ranks_per_node, send_codes, ranks_per_node, cases, guard)


# The whole layer against one process that sees all tokens


def train_layers(ranks_per_node, cases):
    torch.use_deterministic_algorithms(True)
    rank, world = dist.get_rank(), dist.get_world_size()
    results = []
    for levels, num_experts, k, kind, expert, options in cases:
        layer = make_layer(num_experts, k, rank=rank, world=world, expert=expert, **options)
        layer.set_dispatcher(dispatcher_of(levels, ranks_per_node))
        found = []
        for _ in range(2):
            x, upstream = inputs_of(rank, UNEVEN[rank], kind)
            layer.zero_grad()
            y, aux, counts = layer(x)
            ((y * upstream).sum() + aux).backward()
            gradients = {name: p.grad for name, p in layer.named_parameters()}
            found.append((y.detach(), aux.detach(), counts, x.grad, gradients))
        for a, b in zip(found[0][:4], found[1][:4], strict=True):
            assert torch.equal(a, b), "two runs differ"
        assert all(torch.equal(g, found[1][4][name]) for name, g in found[0][4].items()), "two runs differ"
        results.append(found[0])
    return results


DROPS = {"drop_tokens": True, "drop_policy": "probs", "capacity_factor": 0.5, "min_capacity": 1}


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 4), (2, 1), (2, 2), (4, 2), (2, 4)])
def test_layers_equal_one_process(nodes, ranks_per_node):
    world = nodes * ranks_per_node
    cases = [
        (levels, *case)
        for levels in LEVELS
        for case in [
            (world, 1, "random", "fused", {}),
            (2 * world, 3, "skewed", "loop", {}),
            (2 * world, 4, "random", "fused", DROPS),
            (4 * world, 8, "skewed", "fused", {}),
        ]
    ]
    answers = run_ranks(world, train_layers, ranks_per_node, cases)
    for index, (levels, num_experts, k, kind, expert, options) in enumerate(cases):
        layer = make_layer(num_experts, k, expert=expert, **options)
        xs = []
        for rank in range(world):
            x, upstream = inputs_of(rank, UNEVEN[rank], kind)
            y, aux, counts = layer(x)
            ((y * upstream).sum() + aux).backward()
            found = answers[rank][index]
            what = f"{levels} {num_experts} {k} {kind} {expert}, rank {rank}"
            assert_close(found[0], y, what=f"output of {what}")
            assert torch.equal(found[1], aux.detach())
            assert torch.equal(found[2], counts)
            assert_close(found[3], x.grad, what=f"input gradient of {what}")
            xs.append(x)
        per_rank = num_experts // world
        for name, reference in layer.named_parameters():
            if name.startswith("experts"):
                _, _, expert_id, rest = name.split(".", 3)
                rank, local = divmod(int(expert_id), per_rank)
                found = answers[rank][index][4][f"experts.mlps.{local}.{rest}"]
            else:
                found = sum(answer[index][4][name] for answer in answers)
            assert_close(found, reference.grad, what=f"{name} of {levels} {num_experts} {k} {kind} {expert}")


# Checkpointing: the recompute sends rows again, and decides nothing


def checkpointed(way, levels):
    from deepspeed import checkpointing
    from torch.utils.checkpoint import checkpoint

    ways = {
        "plain": lambda function, x: function(x),
        "torch reentrant": lambda function, x: checkpoint(function, x, use_reentrant=True),
        "torch non-reentrant": lambda function, x: checkpoint(function, x, use_reentrant=False),
        "DeepSpeed": checkpointing.checkpoint,
    }
    rank = dist.get_rank()
    layer = make_layer(8, 3, rank=rank, world=4, input_jitter=0.2)
    layer.set_dispatcher(dispatcher_of(levels, 2))
    integers = []
    all_to_all = dist.all_to_all_single

    def recorded(output, input, *splits, **options):
        integers.append(not input.is_floating_point())
        return all_to_all(output, input, *splits, **options)

    dist.all_to_all_single = recorded
    torch.manual_seed(rank)
    xs, losses = [], []
    for index, tokens in enumerate((UNEVEN[rank], UNEVEN[-1 - rank])):
        x, upstream = inputs_of(rank + 10 * index, tokens)
        y, aux, _ = ways[way](lambda x: layer(torch.tanh(x)), x)
        xs.append(x)
        losses.append((y * upstream).sum() + aux)
    for loss in reversed(losses):
        loss.backward()
    assert sum(integers) == 4
    return [x.grad for x in xs], [p.grad for p in layer.parameters()]


@pytest.mark.parametrize("levels", ["gpu", "node+gpu"])
def test_checkpointing_replays_the_plan(levels):
    expected = run_ranks(4, checkpointed, "plain", levels)
    for way in ("torch reentrant", "torch non-reentrant", "DeepSpeed"):
        for (grads, weights), (other, others) in zip(run_ranks(4, checkpointed, way, levels), expected, strict=True):
            for a, b in zip(grads + weights, other + others, strict=True):
                assert_close(a, b)


# Tensor-parallel ranks share their tokens; kernels in the interpreter; autocast


def share_tokens(levels):
    """Ranks 2i and 2i + 1 hold the same tokens; experts are spread over all four, two nodes of two."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer, whole = make_layer(8, 3, rank=rank, world=4), make_layer(8, 3)
    same = Exchange(group=pairs[rank // 2], label="pair", timeout_s=30.0)
    layer.set_dispatcher(SharedTokens(dispatcher_of(levels, 2), same))
    x, upstream = inputs_of(rank // 2, 7)
    expected, reference_upstream = inputs_of(rank // 2, 7)
    for module, rows, weight in ((layer, x, upstream), (whole, expected, reference_upstream)):
        y, aux, _ = module(rows)
        ((y * weight).sum() + aux).backward()
        module.y = y.detach()
    assert_close(layer.y, whole.y)
    assert_close(x.grad, expected.grad)
    assert_close(layer.gate.wg.weight.grad, whole.gate.wg.weight.grad)


@pytest.mark.parametrize("levels", LEVELS)
def test_tensor_parallel_ranks_share_their_tokens(levels):
    run_ranks(4, share_tokens, levels)


def compute_on(kernels, levels):
    rank = dist.get_rank()
    layer = make_layer(8, 3, rank=rank, world=4).float()
    layer.kernels = kernels
    layer.set_dispatcher(dispatcher_of(levels, 2))
    x, upstream = (value.detach().float() for value in inputs_of(rank, UNEVEN[rank]))
    y, aux, _ = layer(x.requires_grad_())
    ((y * upstream).sum() + aux).backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("levels", ["node", "node+gpu"])
def test_triton_kernels_give_what_their_twins_give(levels):
    found, expected = (run_ranks(4, compute_on, kernels, levels) for kernels in ("triton", "torch"))
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b, what=f"rank {rank}")


def autocasted(levels):
    rank = dist.get_rank()
    layer, whole = make_layer(8, 3, rank=rank, world=4).float(), make_layer(8, 3).float()
    layer.set_dispatcher(dispatcher_of(levels, 2))
    x = inputs_of(rank, UNEVEN[rank])[0].detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        y, aux, _ = layer(x)
        expected, aux2, _ = whole(x)
    (y.float().sum() + aux).backward()
    assert y.dtype == expected.dtype
    assert_close(y, expected, dtype=torch.bfloat16)
    assert torch.equal(aux, aux2)


def test_autocast_over_ranks():
    run_ranks(4, autocasted, "node+gpu")
