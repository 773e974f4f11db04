"""What a layer says of its traffic and its time, against what it really sends and where it really waits."""

import functools
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from hierarchical_layers import HIDDEN, dispatcher_of, inputs_of, make_layer
from torch.utils.checkpoint import checkpoint

from xmoe.experts import Experts
from xmoe.ops import clock, relay
from xmoe.ops.collectives import Begun, Exchange
from xmoe.sequence_shard import SequenceShard
from xmoe.testing import run_ranks

pytestmark = pytest.mark.dist

TOKENS = [9, 0, 6, 3]


def sent_and_counted(levels, *, autocast, needs_grad):
    """Bytes (to itself, inside its node, between nodes) that this rank hands to exchanges, and those it counted."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = make_layer(8, 3, rank=rank, world=world).float()
    layer.set_dispatcher(dispatcher_of(levels, 2))
    sent = [0, 0, 0]
    all_to_all = dist.all_to_all_single

    def recorded(output, input, *splits, group, **options):
        if input.shape[1:] == (HIDDEN,):
            for other, rows in zip(dist.get_process_group_ranks(group), splits[1], strict=True):
                link = 0 if other == rank else 1 if other // 2 == rank // 2 else 2
                sent[link] += rows * HIDDEN * input.element_size()
        return all_to_all(output, input, *splits, group=group, **options)

    dist.all_to_all_single = recorded
    x = inputs_of(rank, TOKENS[rank], "skewed")[0].detach().float().requires_grad_(needs_grad)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)[0]
    y.float().sum().backward()
    dist.all_to_all_single = all_to_all
    counters = layer.take_counters()
    inside = counters.all_to_all_bytes - counters.between_nodes_bytes
    return sent, [counters.to_self_bytes, inside, counters.between_nodes_bytes]


def traffic_of_all(cases):
    return [
        sent_and_counted(levels, autocast=autocast, needs_grad=needs_grad) for levels, autocast, needs_grad in cases
    ]


def test_bytes_counted_are_bytes_sent():
    """Each rank's own, where loads are uneven, results have another dtype than tokens, or tokens no gradient."""
    cases = [("flat", False, True), ("flat", True, True), ("node+gpu", True, True), ("node+gpu", False, False)]
    answers = run_ranks(4, traffic_of_all, cases)
    for index, case in enumerate(cases):
        for rank, found in enumerate(answers):
            sent, counted = found[index]
            assert counted == sent, f"{case}, rank {rank}"
        assert sum(found[index][0][2] for found in answers) > 0
    assert len({tuple(found[0][0]) for found in answers}) > 1, (
        "all ranks send alike: the test would not see whose bytes"
    )


def counted_by_ways():
    """What a layer counts of the same batch: plain, and within each kind of checkpoint."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = make_layer(8, 3, rank=rank, world=world)
    layer.set_dispatcher(dispatcher_of("flat", 1))
    ways = [lambda run, x: run(x)]
    ways += [functools.partial(checkpoint, use_reentrant=reentrant) for reentrant in (False, True)]
    found = []
    for way in ways:
        x, upstream = inputs_of(rank, 7)
        (way(lambda x: layer(torch.tanh(x))[0], x) * upstream).sum().backward()
        counters = layer.take_counters()
        found.append((counters.all_to_all_bytes, counters.to_self_bytes))
    return found


def test_checkpoints_count_what_a_plain_step_sends():
    """Also where the only run that is counted records no graph."""
    for plain, *others in run_ranks(2, counted_by_ways):
        assert min(plain) > 0
        assert others == [plain, plain]


def held_on_the_way_home(num_chunks):
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = make_layer(8, 3, rank=rank, world=world).eval()
    layer.set_dispatcher(dispatcher_of("flat", 1, num_chunks=num_chunks))
    computed, alive = [], []
    compute, end = Experts.forward, relay.Homeward.sum_by_token

    def recorded(self, rows, *args):
        results = compute(self, rows, *args)
        computed.append((weakref.ref(rows.x_RD), weakref.ref(results)))
        return results

    def at_the_end(self, between):
        home = end(self, between)
        references, deadline = computed[len(alive)], time.monotonic() + 10
        # gloo's thread lets go of what it sent a moment after it said so.
        while any(reference() is not None for reference in references) and time.monotonic() < deadline:
            time.sleep(0.01)
        alive.append([reference() is not None for reference in references])
        return home

    Experts.forward, relay.Homeward.sum_by_token = recorded, at_the_end
    with torch.no_grad():
        layer(inputs_of(rank, 12)[0])
    return alive


def test_rows_and_results_are_let_go_on_the_way_home():
    for num_chunks in (1, 3):
        for alive in run_ranks(2, held_on_the_way_home, num_chunks):
            assert alive == [[False, False]] * num_chunks


def stages_of_exchanges():
    """The stage in which each exchange of a sequence-sharded layer is waited for, by its label."""
    layer = make_layer(8, 3)
    layer.set_sequence_shard(SequenceShard(Exchange(group=dist.group.WORLD, label="layer", timeout_s=30.0)))
    layer.clock.enabled = True
    stages = {}
    finish = Begun.finish

    def recorded(self):
        running = clock._CLOCK.get()
        stages[self._exchange.label] = running.current if running is not None else None
        finish(self)

    Begun.finish = recorded
    x, upstream = inputs_of(0, 6)
    y, aux, _ = layer(x)
    ((y * upstream).sum() + aux).backward()
    return stages


def test_a_sharded_layers_gathers_have_a_stage():
    for stages in run_ranks(2, stages_of_exchanges):
        assert stages["layer: gather of results"] == "combine"
        assert stages["layer: gather of the input's gradient"] == "dispatch_backward"
