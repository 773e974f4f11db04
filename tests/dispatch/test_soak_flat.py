"""Minutes of random dispatch: what three hand-picked cases do not meet. `make soak` runs it."""

import random

import pytest
import torch
import torch.distributed as dist

from xmoe.dispatch.flat import FlatDispatcher
from xmoe.dispatch.local import LocalDispatcher
from xmoe.ops.collectives import Exchange
from xmoe.ops.overlap import to_end
from xmoe.permute import permute
from xmoe.replay import fresh_decisions
from xmoe.testing import run_ranks
from xmoe.types import Routing

pytestmark = [pytest.mark.dist, pytest.mark.soak]


def _random_routing(chance, tokens, num_experts, k):
    """A routing of any skew, with drops and masked tokens; weights are small integers, so that sums are exact."""
    skew = torch.rand(num_experts) * chance.choice([0.0, 0.5, 3.0])
    ids = (torch.rand(tokens, num_experts) + skew).argsort(dim=1, descending=True)[:, :k].int()
    ids = ids.masked_fill(torch.rand(tokens, k) < chance.choice([0.0, 0.3, 1.0]), -1)
    counts = torch.stack([(ids == e).sum() for e in range(num_experts)])
    return Routing(
        topk_ids_TK=ids,
        topk_weights_TK=torch.randint(1, 5, ids.shape).float().masked_fill(ids < 0, 0.0),
        selected_per_expert_E=counts,
        tokens_per_expert_E=counts,
        aux_loss=torch.zeros(()),
    )


def _same_results_as_local(num_cases, seed):
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange = Exchange(group=dist.group.WORLD, label="soak", timeout_s=60.0)
    together, apart = FlatDispatcher(exchange), LocalDispatcher()
    for case in range(num_cases):
        shared, own = random.Random(seed + case), random.Random((seed + case) * world + rank)
        per_rank, width = shared.choice([1, 2, 5]), shared.choice([1, 3, 8])
        num_experts = per_rank * world
        k = shared.randint(1, num_experts)
        tokens = own.choice([0, 1, own.randint(2, 40), own.randint(2, 300)])
        torch.manual_seed(seed * 1000 + case * world + rank)
        routing = _random_routing(own, tokens, num_experts, k)
        x = torch.randint(-8, 8, (tokens, width)).float()
        outputs, gradients = [], []
        for dispatcher in (together, apart):
            inputs = x.clone().requires_grad_()
            (buffer,) = buffers = permute(routing, decide=fresh_decisions())
            (plan,) = dispatcher.plan(buffers)
            rows = to_end(dispatcher.dispatch(inputs, buffer, plan))
            scaled = rows.x_RD.index_select(0, plan.row_ids_M) * rows.weights_M[:, None]
            y = torch.zeros_like(rows.x_RD).index_add(0, plan.row_ids_M, scaled)
            output = to_end(dispatcher.combine(y, buffer, plan))
            (output * output.detach()).sum().backward()
            outputs.append(output.detach())
            gradients.append(inputs.grad)
        assert torch.equal(*outputs), f"case {case}"
        assert torch.equal(*gradients), f"case {case}"
    return num_cases


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_exchanges_give_what_one_rank_gives(world):
    assert run_ranks(world, _same_results_as_local, 400, 17 * world, timeout_s=300.0) == [400] * world
