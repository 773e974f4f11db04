"""What hierarchical dispatch costs: waits of the host, collectives before rows move, and what backward keeps."""

import pytest
import torch
import torch.distributed as dist
from hierarchical_layers import HIDDEN, UNEVEN, dispatcher_of, inputs_of, make_layer
from syncs import recorded_syncs

from xmoe.testing import run_ranks

pytestmark = pytest.mark.dist


# One exchange of counts, one of references, one sync, one order


def record(levels, ranks_per_node):
    rank, world = dist.get_rank(), dist.get_world_size()
    layers = [make_layer(2 * world, 3, rank=rank, world=world) for _ in range(2)]
    for index, layer in enumerate(layers):
        layer.set_dispatcher(dispatcher_of(levels, ranks_per_node, label=f"layer{index}"))
    x, upstream = inputs_of(rank, UNEVEN[rank])
    calls = []
    all_to_all = dist.all_to_all_single

    def recorded(output, input, *splits, **options):
        calls.append(("rows" if input.dim() == 2 else str(input.dtype), dist.get_world_size(options["group"])))
        return all_to_all(output, input, *splits, **options)

    with recorded_syncs() as syncs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", recorded)
        y, first, _ = layers[0](x)
        y, second, _ = layers[1](y)
        loss = (y * upstream).sum() + first + second
        forward = len(calls)
        loss.backward()
    return calls[:forward], calls[forward:], list(syncs)


RECORDED = [("gpu", 2), ("node", 2), ("node+gpu", 2), ("node+gpu", 4)]  # levels, ranks on each node


def record_all():
    return [record(*case) for case in RECORDED]


def test_one_sync_and_two_collectives_before_rows_move():
    answers = run_ranks(4, record_all)
    assert all(answer == answers[0] for answer in answers)
    counts, references, weights = ("torch.int64", 4), ("torch.int32", 4), ("torch.float64", 4)
    for (levels, ranks_per_node), (forward, backward, syncs) in zip(RECORDED, answers[0], strict=True):
        assert syncs == ["tolist"] * 2  # one for each layer, none in backward
        hops = [("rows", 4)]
        if "node" in levels and ranks_per_node == 2:
            hops.append(("rows", 2))
        # Weights leave beside the first hop.
        assert forward == 2 * [counts, references, hops[0], weights, *hops[1:], *hops[::-1]], levels
        assert backward == 2 * [*hops, *hops[1:], weights, hops[0]], levels


def test_the_recorder_sees_what_waits():
    x = torch.tensor([1, 0, 2])
    waiting = {
        "item": lambda: x[0].item(),
        "tolist": lambda: x.tolist(),
        "numpy": lambda: x.numpy(),
        "cpu": lambda: x.cpu(),
        "__bool__": lambda: bool(x[0]),
        "__int__": lambda: int(x[0]),
        "__getitem__": lambda: x[x > 0],
        "nonzero": lambda: torch.nonzero(x),
        "where": lambda: torch.where(x > 0),
        "unique": lambda: x.unique(),
        "masked_select": lambda: x.masked_select(x > 0),
        "bincount": lambda: torch.bincount(x),
        "repeat_interleave": lambda: torch.repeat_interleave(x, x),
        "to": lambda: x.to("cpu"),
    }
    for name, call in waiting.items():
        with recorded_syncs() as syncs:
            call()
        assert syncs == [name]
    with recorded_syncs() as syncs:
        torch.repeat_interleave(x, x, output_size=3)
        torch.where(x > 0, x, 0).to(torch.int32)[x]
    assert syncs == []


# What backward keeps


def keep(levels):
    """Rows kept for backward, and rows and assignments on this rank."""
    rank = dist.get_rank()
    layer = make_layer(12, 6, rank=rank, world=4)
    dispatcher = dispatcher_of(levels, 2)
    layer.set_dispatcher(dispatcher)
    plans = []
    plan = dispatcher.plan
    dispatcher.plan = lambda buffers: (plans.extend(plan(buffers)), plans)[1]
    x, _ = inputs_of(rank, 20)
    own = {parameter.data_ptr() for parameter in layer.parameters()} | {x.data_ptr()}
    kept = {}

    def pack(tensor):
        if tensor.dim() == 2 and tensor.shape[1] == HIDDEN and tensor.is_floating_point():
            kept[tensor.data_ptr()] = len(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    rows = sum(count for address, count in kept.items() if address not in own)
    return rows, plans[0].num_arrived, plans[0].row_ids_M.numel()


def keep_by_levels():
    return {levels: keep(levels) for levels in ("gpu", "node+gpu")}


def test_backward_keeps_each_row_once_however_many_experts_it_serves():
    for found in run_ranks(4, keep_by_levels):
        for levels, (kept, arrived, assigned) in found.items():
            assert kept == arrived, levels
            assert arrived < 0.8 * assigned, levels
