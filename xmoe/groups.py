"""Agreement between ranks, and communicators made ready before training starts."""

from __future__ import annotations

import pickle
import socket
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# Groups compare by identity; a destroyed one leaves, so that another at its address is warmed in its turn.
_WARM: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_HOSTS: weakref.WeakKeyDictionary[dist.ProcessGroup, list[str]] = weakref.WeakKeyDictionary()
_PARTS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def raise_together(error: Exception | None, *, group: dist.ProcessGroup | None = None) -> None:
    """Raises the same error on every rank when any rank has one: the lowest such rank's.

    A collective of ``group``, by default of all ranks.

    Call it after each piece of work that can fail on one rank only (reading a file, checking a setting) and before
    the next collective: the alternative is one rank's traceback and all others' hang. Without a process group it
    raises ``error`` if there is one. The error raised elsewhere is of the same type where that type can be pickled.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        if error is not None:
            raise error
        return
    own = None if error is None else _portable(error)
    errors: list[Exception | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, own, group=group)
    for found in errors:
        if found is not None:
            raise found from error


def _portable(error: Exception) -> Exception:
    try:
        copy = pickle.loads(pickle.dumps(error))
        return error if str(copy) == str(error) else type(error)(str(error))
    except Exception:  # whatever a foreign error's pickling raises: its text must still arrive
        return RuntimeError(f"{type(error).__name__}: {error}")


def same_everywhere(value: Any, what: str) -> None:
    """Raises ValueError on every rank when ``value`` (compared by ``repr``) differs between ranks. A collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    values: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(values, repr(value))
    for rank, other in enumerate(values):
        if other != values[0]:
            raise ValueError(
                f"{what} differs between ranks: rank 0 has {_short(values[0])}, rank {rank} has {_short(other)}; "
                "every rank must be given the same"
            )


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Makes the group's communicator by one all-to-all, once for each group. A collective of the group.

    Communicators made lazily, inside the first forward, are made in whatever order the ranks come to them; made
    here, at start and in module order, they cannot wait for each other.
    """
    if group in _WARM:
        return
    _WARM.add(group)
    ones = torch.ones(dist.get_world_size(group), dtype=torch.int64, device=device)
    received = torch.empty_like(ones)
    dist.all_to_all_single(received, ones, group=group)
    if int(received.sum()) != ones.numel():
        raise RuntimeError(f"the expert-parallel group of rank {dist.get_rank()} exchanges wrong data")


def host_names(group: dist.ProcessGroup) -> list[str]:
    """The host name of each rank of the group, in its order; gathered once. A collective of the group."""
    if group not in _HOSTS:
        names: list[str] = [""] * dist.get_world_size(group)
        dist.all_gather_object(names, socket.gethostname(), group=group)
        _HOSTS[group] = names
    return _HOSTS[group]


def hosts_of_job() -> list[str] | None:
    """The host name of each rank of the job, if :func:`host_names` was asked for them, which takes all ranks."""
    return None if dist.group.WORLD is None else _HOSTS.get(dist.group.WORLD)


def part_of_group(group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """A group of these ranks of ``group``, this one among them, in the order of ``group``; warm, and made once.

    A collective of the new group's ranks alone: parts of different groups, and of different pipeline stages, are
    made at their own times.
    """
    parts = _PARTS.setdefault(group, {})
    key = tuple(ranks)
    if key not in parts:
        members = [dist.get_global_rank(group, rank) for rank in ranks]
        if members != sorted(members):
            raise ValueError(f"ranks {members} of the job must ascend: torch numbers the ranks of a group so")
        parts[key] = dist.new_group(members, backend=dist.get_backend(group), use_local_synchronization=True)
        warm_up(parts[key], device)
    return parts[key]


class TensorParallelUnit:
    """An ``mpu``, as Megatron's: ``size`` consecutive ranks share one batch, ranks of one place make data parallel.

    Making it is a collective of all ranks. Raises ValueError when the groups do not divide the ranks.
    """

    def __init__(self, size: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        if size < 1 or world % size:
            raise ValueError(f"tensor-parallel size ({size}) must divide the number of ranks ({world})")
        self._size = size
        tensor = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
        data = [dist.new_group(list(range(place, world, size))) for place in range(size)]
        self._tensor, self._data = tensor[rank // size], data[rank % size]

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tensor

    def get_model_parallel_world_size(self) -> int:
        return self._size

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank() % self._size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self._size

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // self._size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
