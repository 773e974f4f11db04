"""Agreement between ranks: one error for all, and communicators that are warm."""

import socket

import pytest
import torch
import torch.distributed as dist

from xmoe.config import ConfigError
from xmoe.groups import (
    TensorParallelUnit,
    host_names,
    part_of_group,
    raise_together,
    same_everywhere,
    warm_up,
)
from xmoe.testing import run_ranks


class Awkward(Exception):
    """An exception that no other rank can build from its text."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def fail_on(ranks, kind):
    rank = dist.get_rank()
    error = {
        "config": ConfigError("data.paths", f"/of/rank{rank}", "must exist"),
        "value": ValueError(f"wrong on {rank}"),
        "awkward": Awkward("one", rank),
        "os": FileNotFoundError(2, "No such file or directory", f"/of/rank{rank}"),
    }[kind]
    try:
        raise_together(error if rank in ranks else None)
    except Exception as caught:
        dist.barrier()  # every rank is past the same collective
        return type(caught).__name__, str(caught)
    dist.barrier()
    return None


@pytest.mark.dist
@pytest.mark.parametrize(
    ("ranks", "kind", "expected"),
    [
        ([], "value", None),
        ([2], "value", ("ValueError", "wrong on 2")),
        ([3, 1], "config", ("ConfigError", "data.paths is '/of/rank1': must exist")),
        ([3], "awkward", ("RuntimeError", "Awkward: one and 3")),
        ([0], "os", ("FileNotFoundError", "[Errno 2] No such file or directory: '/of/rank0'")),
    ],
)
def test_an_error_on_some_ranks_is_raised_on_all(ranks, kind, expected):
    assert run_ranks(4, fail_on, ranks, kind) == [expected] * 4


def test_without_a_group_the_error_is_simply_raised():
    raise_together(None)
    with pytest.raises(KeyError):
        raise_together(KeyError("x"))
    same_everywhere(object(), "anything")


def differ(values):
    try:
        same_everywhere(values[dist.get_rank()], "the number of layers")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.dist
def test_a_difference_is_told_to_every_rank():
    assert run_ranks(2, differ, [3, 3]) == [None, None]
    (message, other) = run_ranks(2, differ, [3, 4])
    assert message == other
    assert "the number of layers differs" in message
    assert "rank 0 has 3" in message
    assert "rank 1 has 4" in message


def warm_again():
    calls = []
    all_to_all = dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **options: (calls.append(1), all_to_all(*args, **options))[1]
    for _ in range(2):
        warm_up(dist.group.WORLD, torch.device("cpu"))
    assert len(calls) == 1
    groups = [dist.new_group() for _ in range(5)]
    for group in groups:
        warm_up(group, torch.device("cpu"))
    dist.barrier()  # the other rank may still be reading from this one
    return len(calls)


@pytest.mark.dist
def test_every_group_is_warmed_once():
    assert run_ranks(2, warm_again) == [6, 6]


def units():
    rank = dist.get_rank()
    unit = TensorParallelUnit(2)
    of_batch = dist.get_process_group_ranks(unit.get_tensor_model_parallel_group())
    of_place = dist.get_process_group_ranks(unit.get_data_parallel_group())
    assert of_batch[unit.get_model_parallel_rank()] == of_place[unit.get_data_parallel_rank()] == rank
    assert (len(of_batch), len(of_place)) == (unit.get_model_parallel_world_size(), unit.get_data_parallel_world_size())
    with pytest.raises(ValueError, match=r"tensor-parallel size \(4\) must divide the number of ranks \(6\)"):
        TensorParallelUnit(4)
    return of_batch, of_place


@pytest.mark.dist
def test_a_tensor_parallel_unit_lays_out_consecutive_ranks():
    found = run_ranks(6, units)
    assert [of_batch for of_batch, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert [of_place for _, of_place in found] == [[0, 2, 4], [1, 3, 5]] * 3


def parts():
    rank = dist.get_rank()
    calls = []
    socket.gethostname = lambda: (calls.append(1), "ab"[rank % 2])[1]
    group = dist.group.WORLD
    assert [host_names(group) for _ in range(2)] == [["a", "b", "a", "b"]] * 2
    assert len(calls) == 1
    own = [other for other in range(4) if other % 2 == rank % 2]
    part = part_of_group(group, own, torch.device("cpu"))
    assert part_of_group(group, own, torch.device("cpu")) is part
    assert dist.get_process_group_ranks(part) == own
    total = torch.tensor(10**rank)
    dist.all_reduce(total, group=part)
    with pytest.raises(ValueError, match=r"ranks \[3, 1\] of the job must ascend"):
        part_of_group(group, [3, 1], torch.device("cpu"))
    dist.barrier()
    return int(total)


@pytest.mark.dist
def test_parts_of_a_group_are_made_once_by_their_own_ranks():
    assert run_ranks(4, parts) == [101, 1010, 101, 1010]
