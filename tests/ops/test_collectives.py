"""Uneven exchanges over gloo, their gradients, and what a collective that does not end says."""

import logging
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from xmoe.ops import collectives
from xmoe.ops.collectives import Begun, Exchange, exchange_counts, exchange_rows
from xmoe.ops.overlap import to_end
from xmoe.ops.relay import send_straight
from xmoe.testing import run_ranks

SENDS = {  # rows from rank (line) to rank (column)
    "uneven": [[1, 2, 0], [0, 3, 1], [2, 0, 0]],
    "one sends nothing": [[1, 2, 1], [0, 0, 0], [2, 0, 1]],
    "one receives nothing": [[1, 0, 1], [2, 0, 2], [0, 0, 1]],
    "only one sends": [[0, 0, 0], [4, 0, 3], [0, 0, 0]],
    "nobody sends": [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
}


def make_exchange(*, guard=False, timeout_s=30.0):
    return Exchange(group=dist.group.WORLD, label="layer 1: rows", timeout_s=timeout_s, self_row_guard=guard)


def exchange_codes(sends, guard, dtype):
    rank, world = dist.get_rank(), dist.get_world_size()
    to_me = [line[rank] for line in sends]
    exchange = make_exchange(guard=guard)
    counts = exchange_counts(torch.tensor(sends[rank]), exchange)
    assert counts.tolist() == to_me

    def codes(source, target, n):
        return (torch.arange(n) + 100 * source + 10 * target)[:, None].expand(n, 2).to(dtype)

    empty = torch.empty(0, 2, dtype=dtype)
    rows = torch.cat([empty, *[codes(rank, w, sends[rank][w]) for w in range(world)]]).requires_grad_()
    got = to_end(send_straight(rows, sends[rank], to_me, exchange))
    assert torch.equal(got, torch.cat([empty, *[codes(w, rank, to_me[w]) for w in range(world)]]))
    got.backward(10 * got.detach())
    assert torch.equal(rows.grad, 10 * rows.detach())
    flat = exchange_rows(rows.detach()[:, 0], sends[rank], to_me, exchange)
    assert torch.equal(flat, got.detach()[:, 0])


def exchange_all(guard, dtype):
    for sends in SENDS.values():
        exchange_codes(sends, guard, dtype)


@pytest.mark.dist
@pytest.mark.parametrize(("guard", "dtype"), [(False, torch.float64), (True, torch.bfloat16)], ids=["", "guard"])
def test_rows_arrive_by_source_and_gradients_return(guard, dtype):
    # Public thread: pytorch#146468 (ranks that send nothing).
    run_ranks(3, exchange_all, guard, dtype)


def count_rows(sends):
    """Rows handed to the collective on this rank with the guard on."""
    seen = []
    plain = dist.all_to_all_single

    def counted(out, rows, *splits, **options):
        seen.append((len(out), len(rows)))
        return plain(out, rows, *splits, **options)

    rank = dist.get_rank()
    to_me = [line[rank] for line in sends]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        exchange_rows(torch.zeros(sum(sends[rank]), 2), sends[rank], to_me, make_exchange(guard=True))
    return seen[0]


def count_rows_of_all(kinds):
    return [count_rows(SENDS[kind]) for kind in kinds]


@pytest.mark.dist
def test_the_guard_adds_one_row_only_where_a_rank_would_send_or_receive_none():
    one, nobody = zip(*run_ranks(3, count_rows_of_all, ["one sends nothing", "nobody sends"]), strict=True)
    assert one == ((3, 4), (3, 1), (2, 3))
    assert nobody == ((1, 1),) * 3


def die_on(victim):
    dist.barrier()  # the other one has begun by the time at which the harness counts its last seconds
    if dist.get_rank() == victim:
        os._exit(1)
    exchange_counts(torch.zeros(2, dtype=torch.int64), make_exchange())


@pytest.mark.dist
def test_a_dead_rank_makes_the_others_raise_with_the_label():
    answers = run_ranks(2, die_on, 1, return_exceptions=True)
    assert isinstance(answers[0], RuntimeError)
    assert "layer 1: rows" in str(answers[0])


def test_a_report_names_the_step_where_there_is_one():
    exchange = Exchange(group=None, label="blocks.3.moe", timeout_s=1.0)
    steps = iter([None, 17, 18])
    assert exchange.named("combine of rows").title == "blocks.3.moe: combine of rows"
    part = replace(exchange, step=lambda: next(steps)).named("combine of rows").named("backward")
    assert part.title == "blocks.3.moe: combine of rows: backward"
    assert [part.title for _ in range(2)] == [f"blocks.3.moe: combine of rows: backward, step {n}" for n in (17, 18)]


class FakeWork:
    def __init__(self, *, done):
        self.done = done

    def is_completed(self):
        return self.done


def test_on_devices_a_monitor_names_what_is_not_complete(monkeypatch, caplog):
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monitor, stuck = collectives._Monitor(), FakeWork(done=False)
    with caplog.at_level(logging.ERROR):
        monitor.watch(FakeWork(done=True), "layer 0: dispatch of rows", 0.2, torch.device("cpu"))
        monitor.watch(stuck, "layer 1: combine of rows", 0.2, torch.device("cpu"))
        deadline = time.monotonic() + 30
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "rank 5 has waited 0.2 s in 'layer 1: combine of rows'" in caplog.text
    assert "layer 0" not in caplog.text
    stuck.done = True


class LateWork:
    def wait(self, timeout):
        raise RuntimeError("Timed out")


def test_a_timeout_counts_from_when_the_exchange_began(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(collectives, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(collectives.dist, "get_rank", lambda: 3)
    begun = Begun(LateWork(), Exchange(group=None, label="rows", timeout_s=4.0), torch.device("cpu"))
    now[0] += 4.0  # computed meanwhile
    with pytest.raises(RuntimeError, match="rank 3 has waited 4 s in 'rows'"):
        begun.finish()
