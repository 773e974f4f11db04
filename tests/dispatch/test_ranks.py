"""The test harness itself: results by rank, failures with their text, hangs that end."""

import pytest
import torch
import torch.distributed as dist

from xmoe.testing import RankFailure, run_ranks


def _rank_sum():
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def _fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("broken here")
    dist.barrier()


def _hang_on(rank):
    if dist.get_rank() != rank:
        dist.barrier()


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_answer_in_order(world_size):
    assert run_ranks(world_size, _rank_sum) == [(r, sum(range(world_size))) for r in range(world_size)]


def test_a_failure_names_its_rank():
    with pytest.raises(RankFailure, match=r"rank 1 raised ValueError: broken here"):
        run_ranks(2, _fail_on, 1)


def test_a_hang_ends_with_the_stack_of_who_hangs():
    run_ranks(1, _rank_sum)  # from now on ranks start at once
    with pytest.raises(RankFailure, match=r"(?s)rank 0 did not finish.*_hang_on"):
        run_ranks(2, _hang_on, 1, timeout_s=10.0)
