"""Experts on several threads of a CPU: the same results, errors that arrive, observers that see every operator."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xmoe.kernels import host_threads
from xmoe.kernels.reference import ExpertWeights, expert_mlp_backward, expert_mlp_forward
from xmoe.testing import assignments_of


@pytest.fixture
def two_threads(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(host_threads, "MIN_FLOPS_PER_WORKER", 1.0)
    yield
    torch.set_num_threads(before)


def _run(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    counts = [3, 0, 5, 1]
    experts = ExpertWeights(
        up=[random(6, 8) for _ in counts], down=[random(8, 6) for _ in counts], gate=[random(6, 8) for _ in counts]
    )
    x, dy, weights = random(5, 8), random(5, 8), random(9)
    row_ids = torch.cat([torch.randperm(5, generator=generator)[:count] for count in counts]).int()
    arguments = dict(experts=experts, activation="swiglu")
    plan = (row_ids, assignments_of(row_ids, 5), weights, counts, torch.tensor(counts))
    y, up, gate = expert_mlp_forward(x, *plan, **arguments)
    grads = expert_mlp_backward(dy, x, *plan, **arguments, up_MF=up, gate_MF=gate)
    return [y, *grads[:2], *grads[2].up, *grads[2].down, *grads[2].gate]


def _parts():
    segments = [(0, slice(0, 3)), (2, slice(3, 8)), (3, slice(8, 9))]
    return host_threads.worker_parts(segments, like=torch.empty(1), flops_per_row=100.0)


def test_the_split_is_even_and_in_order(two_threads):
    assert _parts() == [[(2, slice(3, 8))], [(0, slice(0, 3)), (3, slice(8, 9))]]


def test_little_work_stays_on_one_thread(two_threads, monkeypatch):
    monkeypatch.setattr(host_threads, "MIN_FLOPS_PER_WORKER", 1e6)
    assert len(_parts()) == 1


def test_two_threads_give_the_results_of_one(two_threads):
    found = _run()
    assert len(_parts()) == 2
    torch.set_num_threads(1)
    for actual, expected in zip(found, _run(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_two_runs_are_bitwise_equal(two_threads):
    assert all(map(torch.equal, _run(torch.float32), _run(torch.float32)))


def test_inference_mode_reaches_the_threads(two_threads):
    with torch.inference_mode():
        assert all(torch.isfinite(result).all() for result in _run())


def test_an_observer_of_this_thread_sees_every_product(two_threads):
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func.overloadpacket is torch.ops.aten.mm
            return func(*args, **(kwargs or {}))

    with Products() as seen:
        _run()
    assert seen.count == 3 * (3 + 5)  # three experts with rows; addmm_ is the sixth product of a backward


def test_an_error_on_a_thread_is_raised_here_and_the_thread_count_restored(two_threads):
    def fail():
        raise ValueError("in the thread")

    with pytest.raises(ValueError, match="in the thread"):
        host_threads.run_workers([fail, lambda: None])
    assert torch.get_num_threads() == 2
