"""The clock of a layer's stages: what counts for which stage, boundaries on a device, and waits for slower ranks."""

import copy
import threading
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from xmoe.dispatch.make import make_dispatcher
from xmoe.experts import Experts
from xmoe.layer import RoutedMLP
from xmoe.metrics import take_layer_loads
from xmoe.ops import clock as clocks
from xmoe.ops import collectives
from xmoe.ops.clock import STAGE_TIMES, StageClock, timed, timed_backward, timed_run, timed_wait, use_clock
from xmoe.ops.collectives import Exchange
from xmoe.ops.overlap import to_end
from xmoe.router import RouterSettings, TopKRouter
from xmoe.testing import run_ranks
from xmoe.types import Rows

CPU = torch.device("cpu")
HIDDEN = 8


class Now:
    """A clock on the wall that moves only when told to."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self):
        return self.seconds

    def passes(self, seconds):
        self.seconds += seconds

    def loses(self, seconds):
        self.passes(seconds)
        raise RuntimeError("lost")


@pytest.fixture
def now(monkeypatch):
    now = Now()
    monkeypatch.setattr(clocks, "time", now)
    return now


@pytest.fixture
def clock():
    clock = StageClock()
    clock.enabled = True
    return clock


# What counts for what


def test_a_wait_counts_for_its_stage_and_apart(now, clock):
    with use_clock(clock):
        for _ in range(2):
            with timed("dispatch", CPU):
                now.passes(1)
                with timed_wait(CPU):
                    now.passes(10)
                now.passes(2)
            now.passes(1000)  # of no stage
        with timed("combine", CPU), timed_wait(CPU):
            now.passes(5)
    assert clock.take() == {"dispatch": 26, "dispatch_wait": 20, "combine": 5, "combine_wait": 5}
    assert clock.take() == {}


def test_a_stage_within_a_stage_counts_for_both_and_waits_are_the_inner_ones(now, clock):
    with use_clock(clock), timed("experts", CPU):
        now.passes(1)
        with timed("plan", CPU), timed_wait(CPU):
            now.passes(2)
        with timed_wait(CPU):
            now.passes(4)
    assert clock.take() == {"experts": 7, "plan": 2, "plan_wait": 2, "experts_wait": 4}


def test_pauses_of_a_run_do_not_count(now, clock):
    def run():
        now.passes(1)
        yield
        now.passes(2)
        return "sent"

    def others_meanwhile(run):
        for _ in run:
            now.passes(100)
        return ended[0]

    def keep(run):
        ended.append((yield from run))

    ended = []
    with use_clock(clock):
        assert others_meanwhile(keep(timed_run("dispatch", run(), CPU))) == "sent"
        assert to_end(timed_run("combine", run(), CPU)) == "sent"
    assert clock.take() == {"dispatch": 3, "combine": 3}


def test_backward_has_the_name_of_the_stage_it_was_met_in_whichever_thread_runs_it(now, clock):
    with use_clock(clock):
        with timed("dispatch", CPU):
            of_dispatch = timed_backward()
        with timed("experts", CPU):
            of_experts = timed_backward()

    def backward():
        # A device's backward runs in a thread of autograd's, which knows nothing of the layer.
        with of_experts(CPU):
            now.passes(1)
        with of_dispatch(CPU), timed_wait(CPU):
            now.passes(2)
        with timed_wait(CPU):
            now.passes(4)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    found = clock.take()
    assert {name: seconds for name, seconds in found.items() if "backward" in name} == {
        "experts_backward": 1,
        "dispatch_backward": 2,
        "dispatch_backward_wait": 2,
    }
    assert set(found) <= set(STAGE_TIMES)


def test_a_failing_stage_is_counted_and_left(now, clock):
    with use_clock(clock):
        with pytest.raises(RuntimeError, match="lost"), timed("dispatch", CPU), timed_wait(CPU):
            now.loses(3)
        assert clock.current == "other"
        with timed("combine", CPU), timed_wait(CPU):
            now.passes(1)
    with timed("experts", CPU):
        now.passes(1)  # no clock is in use any more
    assert clock.take() == {"dispatch": 3, "dispatch_wait": 3, "combine": 1, "combine_wait": 1}


def test_a_layer_within_a_layer_does_not_count_on_its_clock(now, clock):
    with use_clock(clock), timed("shared_experts", CPU):
        with use_clock(StageClock()), timed("dispatch", CPU), timed_wait(CPU):
            now.passes(1)
        with use_clock(None), timed("combine", CPU):
            now.passes(2)
        with timed_wait(CPU):
            now.passes(4)
    assert clock.take() == {"shared_experts": 7, "shared_experts_wait": 4}


def test_off_nothing_is_read_and_nothing_kept(monkeypatch):
    def touched(*_):
        raise AssertionError("a boundary was taken")

    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=touched))
    monkeypatch.setattr(torch, "get_device_module", touched)
    clock = StageClock()
    for device in (CPU, torch.device("cuda")):
        with use_clock(clock), timed("dispatch", device), timed_wait(device):
            assert to_end(timed_run("combine", short_run(), device)) == 7
            backward = timed_backward()
        with backward(device):
            pass
    assert clock.take() == {}
    assert (clock._seconds, list(clock._unread), clock._names) == ({}, [], [])


def short_run():
    yield
    return 7


# Boundaries on a device


class Device:
    """A device whose streams have times of their own; ``asked`` is what the host waited for or read, in order.

    ``found`` has the seconds it read.
    """

    def __init__(self):
        self.queued = Counter()  # seconds of work, by stream
        self.asked = []
        self.found = []
        self.num_events = 0

    def works(self, seconds, index=0):
        self.queued[f"stream of {index}"] += seconds

    def current_stream(self, device):
        return f"stream of {device.index or 0}"

    def Event(self, *, enable_timing):
        assert enable_timing
        self.num_events += 1
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.at, self.done = device, None, False

    def __reduce__(self):
        raise TypeError("an event cannot be copied")

    def record(self, stream):
        self.at, self.stream = self.device.queued[stream], stream

    def synchronize(self):
        self.device.asked.append("wait")
        self.done = True

    def elapsed_time(self, end):
        assert end.done
        assert end.stream == self.stream
        self.device.asked.append("read")
        self.device.found.append(end.at - self.at)
        return 1e3 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch):
    fake = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    # The host's clock must not be looked at.
    monkeypatch.setattr(clocks, "time", SimpleNamespace())
    return fake


def test_on_a_device_boundaries_are_events_that_are_read_when_times_are_taken(device, clock):
    cuda = torch.device("cuda")
    with use_clock(clock):
        for _ in range(3):
            with timed("dispatch", cuda):
                device.works(1)
                with timed_wait(cuda):
                    device.works(2)
            device.works(100)
        with timed("dispatch", cuda):
            backward = timed_backward()
    with backward(cuda):
        device.works(4)
    assert device.asked == []
    assert device.num_events == 2 * (3 * 2 + 2)
    assert clock.take() == pytest.approx({"dispatch": 9, "dispatch_wait": 6, "dispatch_backward": 4})
    assert device.asked == ["wait", "read"] * 8
    assert clock.take() == {}


def test_events_are_in_the_stream_of_the_tensors_device(device, clock):
    with use_clock(clock), timed("experts", torch.device("cuda", 1)):
        device.works(3, index=1)
        device.works(50, index=0)
    assert clock.take() == pytest.approx({"experts": 3})


def test_times_nobody_takes_are_read_in_passing_the_oldest_first(device, clock, monkeypatch):
    monkeypatch.setattr(clocks, "_MAX_UNREAD", 4)
    for seconds in range(1, 11):
        with use_clock(clock), timed("experts", torch.device("cuda")):
            device.works(seconds)
        assert device.found == list(range(1, seconds - 4 + 1))
        assert device.asked == ["wait", "read"] * len(device.found)
        assert len(clock._unread) <= 4
    assert clock.take() == pytest.approx({"experts": 55})


def test_a_stage_without_a_first_boundary_leaves_no_name(device, clock, monkeypatch):
    def fails(*, enable_timing):
        raise RuntimeError("no such device")

    monkeypatch.setattr(device, "Event", fails)
    with use_clock(clock), pytest.raises(RuntimeError, match="no such device"), timed("experts", torch.device("cuda")):
        pass
    assert clock.current == "other"


def test_a_layer_can_be_copied_while_its_times_are_unread(device, clock):
    with use_clock(clock), timed("experts", torch.device("cuda")):
        device.works(1)
    twin = copy.deepcopy(clock)
    assert twin.enabled
    assert twin.take() == {}
    assert clock.take() == pytest.approx({"experts": 1})


# A layer's stages


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 12, bias=False), nn.Linear(HIDDEN, 12, bias=False)
        self.down_proj = nn.Linear(12, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def make_layer(*, num_chunks=1, timed=True):
    """Four experts on two ranks, each token on both ranks, with a shared expert."""
    settings = RouterSettings(top_k=4, drop_tokens=False, sample_second_expert=False)
    experts = Experts(SwiGLU(), 2, first_id=2 * dist.get_rank())
    layer = RoutedMLP(TopKRouter(HIDDEN, 4, settings=settings), experts, shared_mlp=nn.Linear(HIDDEN, HIDDEN))
    exchange = Exchange(group=dist.group.WORLD, label="layer", timeout_s=30.0)
    layer.set_dispatcher(make_dispatcher("flat", exchange, ranks_per_node=1, device=CPU, num_chunks=num_chunks))
    layer.clock.enabled = timed
    return layer


def run_once(layer, *, through=lambda layer, x_TD: layer(x_TD)):
    y, aux, _ = through(layer, torch.randn(6, HIDDEN, requires_grad=True))
    (y.sum() + aux).backward()


def times_of_a_layer():
    found = []
    for options in ({}, {"num_chunks": 3}, {"timed": False}):
        layer = make_layer(**options)
        run_once(layer)
        (load,), (again,) = take_layer_loads(layer), take_layer_loads(layer)
        assert load.to_self_bytes == 4 * 6 * 2 * HIDDEN * 4  # each way twice: rows of 6 tokens for 2 experts, float32
        assert (again.stage_s, again.to_self_bytes) == ({}, 0)
        found.append(load.stage_s)
    layer = make_layer()
    run_once(layer, through=lambda layer, x_TD: checkpoint(layer, x_TD, use_reentrant=False))
    return [*found, take_layer_loads(layer)[0].stage_s]


@pytest.mark.dist
def test_a_layer_reports_every_stage_of_forward_and_backward():
    moved = [f"{stage}{part}" for stage in ("dispatch", "combine") for part in ("", "_backward")]
    stages = {"route", "plan", "experts", "experts_backward", "shared_experts", *moved}
    waits = {"plan_wait", *(f"{name}_wait" for name in moved)}
    for whole, chunked, off, recomputed in run_ranks(2, times_of_a_layer):
        for found in (whole, chunked, recomputed):
            assert set(found) == stages | waits
            assert set(found) <= set(STAGE_TIMES)
            assert all(seconds > 0 for seconds in found.values())
            assert all(found[wait] <= found[wait.removesuffix("_wait")] for wait in waits)
        assert off == {}


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RD, weights_M, in_backward):
        ctx.in_backward = in_backward
        return x_RD.view_as(x_RD), weights_M.view_as(weights_M)

    @staticmethod
    def backward(ctx, *grads):
        ctx.in_backward()
        return *grads, None


def times_beside_a_late_rank(path):
    """Rank 1 lets 100 s pass in its experts, and 1000 s after their backward, each once rank 0 waits for it.

    The time is a number in a store that both ranks read, so that no machine is too slow.
    """
    store, rank = dist.FileStore(path, 2), dist.get_rank()
    clocks.time = SimpleNamespace(perf_counter=lambda: float(store.add("seconds", 0)))
    layer = make_layer()
    dispatch, forward = layer.dispatcher.dispatch, layer.experts.forward

    @contextmanager
    def telling_wait(device):
        with timed_wait(device):
            store.set(f"rank {rank}: {layer.clock.current}", "")
            yield

    def late(seconds, what):
        store.wait([f"rank 0: {what}"])
        store.add("seconds", seconds)

    def late_dispatch(*chunk):
        rows = yield from dispatch(*chunk)
        x_RD, weights_M = Late.apply(rows.x_RD, rows.weights_M, lambda: late(1000, "dispatch_backward_wait"))
        return Rows(x_RD=x_RD, weights_M=weights_M)

    def late_experts(*args, **options):
        y_RD = forward(*args, **options)
        late(100, "combine_wait")
        return y_RD

    collectives.timed_wait = telling_wait
    if rank == 1:
        layer.dispatcher.dispatch, layer.experts.forward = late_dispatch, late_experts
    run_once(layer)
    return {name: seconds for name, seconds in layer.clock.take().items() if seconds}


@pytest.mark.dist
def test_a_late_rank_is_the_others_wait(tmp_path):
    prompt, late = run_ranks(2, times_beside_a_late_rank, str(tmp_path / "store"))
    assert prompt == {
        "combine": 100,
        "combine_wait": 100,
        "dispatch_backward": 1000,
        "dispatch_backward_wait": 1000,
    }
    # In backward it was late between two stages.
    assert late == {"experts": 100}
