"""Hierarchical dispatch over gloo ranks: payloads bit by bit, layers against one process, what the host waits for."""

import pytest
import torch
import torch.distributed as dist
from hierarchy import LEVELS, routing_of, wanted_assignments, wanted_rows
from torch import nn

from xmoe.dispatch.make import make_dispatcher
from xmoe.experts import Experts
from xmoe.layer import RoutedMLP
from xmoe.ops.collectives import Exchange
from xmoe.permute import permute
from xmoe.replay import fresh_decisions
from xmoe.router import RouterSettings, TopKRouter
from xmoe.testing import assert_close, check_assignments, run_ranks
from xmoe.topology import NodeLayout

pytestmark = pytest.mark.dist

HIDDEN = 8
UNEVEN = [5, 6, 0, 13, 1, 9, 0, 4]
SHAPES = [(1, 2), (1, 4), (2, 1), (2, 2), (4, 2), (2, 4)]  # nodes, ranks on each


def dispatcher_of(levels, ranks_per_node, *, group=None, **options):
    options = {"label": "blocks.3.moe", "timeout_s": 30.0} | options
    exchange = Exchange(group=dist.group.WORLD if group is None else group, **options)
    return make_dispatcher(levels, exchange, ranks_per_node=ranks_per_node, device=torch.device("cpu"))


# Dispatch alone: a row says which token of which rank it is, so that any misroute changes a number.


def send_codes(ranks_per_node, cases, guard):
    world, rank = dist.get_world_size(), dist.get_rank()
    for levels, per_rank, k, kind, tokens_of_rank in cases:
        num_experts = per_rank * world
        routings = [routing_of(n, num_experts, k, kind, seed) for seed, n in enumerate(tokens_of_rank[:world])]
        codes = [(1000.0 * w + torch.arange(len(r.topk_ids_TK)))[:, None].repeat(1, 3) for w, r in enumerate(routings)]
        dispatcher = dispatcher_of(levels, ranks_per_node, self_row_guard=guard)
        x, mine = codes[rank].clone().requires_grad_(), routings[rank]
        buffer = permute(mine, decide=fresh_decisions())
        plan = dispatcher.plan(buffer)
        rows = dispatcher.dispatch(x, buffer, plan)

        wanted = wanted_assignments(routings, rank, per_rank)
        check_assignments(plan, len(rows.x_RD))
        expected = [codes[w][slot // k] for w, slot, _ in wanted]
        assert torch.equal(rows.x_RD[plan.row_ids_M.long()], torch.stack(expected) if wanted else torch.empty(0, 3))
        weights = [routings[w].topk_weights_TK.flatten()[slot] for w, slot, _ in wanted]
        assert torch.equal(rows.weights_M, torch.stack(weights) if wanted else torch.empty(0))

        # Each row times the number of its assignments: home comes each token times the number of its experts.
        times_R1 = torch.bincount(plan.row_ids_M, minlength=len(rows.x_RD)).float()[:, None]
        out = dispatcher.combine(rows.x_RD * times_R1, buffer, plan)
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
        assert dispatcher.rows_sent_away(plan) == traffic.inside_node + traffic.between_nodes
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


class Tanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return torch.tanh(self.fc(x))


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 12, bias=False), nn.Linear(HIDDEN, 12, bias=False)
        self.down_proj = nn.Linear(12, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


EXPERTS = {"fused": SwiGLU, "loop": Tanh}


def fill(module, logical_id):
    generator = torch.Generator().manual_seed(logical_id)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def make_layer(num_experts, k, *, rank=0, world=1, expert="fused", dispatcher=None, **options):
    settings = RouterSettings(top_k=k, **({"drop_tokens": False, "sample_second_expert": False} | options))
    gate = TopKRouter(HIDDEN, num_experts, settings=settings)
    local = num_experts // world
    experts = Experts(EXPERTS[expert](), local, first_id=rank * local, initialize=fill)
    layer = RoutedMLP(gate, experts, dispatcher=dispatcher).double()
    fill(gate, 99)
    return layer


def inputs_of(rank, tokens, kind="random"):
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    if kind == "skewed":
        x = 0.2 * x + torch.linspace(-1, 1, HIDDEN, dtype=torch.float64)
    return x.requires_grad_(), torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)


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
