"""What each rank of bench_dispatch.py does: check every contestant, count what it moves, time all in turns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import dispatch_peers
import torch
import torch.distributed as dist
from dispatch_timing import timed
from torch import Tensor

from xmoe.integrations.deepspeed import init_distributed
from xmoe.ops.collectives import Exchange, exchange_rows
from xmoe.testing import assert_close
from xmoe.testing_cluster import read_traffic

PROBE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting.

    ``tokens``      of each rank
    ``dtype``       of rows, and so on every wire
    ``popularity``  the exponent s of Zipf's law: the expert of place i, from 0, is drawn with odds ``(i + 1) ** -s``.
                    0 is uniform. Places are dealt to experts by a shuffle of fixed seed, so that popular experts lie
                    on any rank
    """

    nodes: int
    ranks_per_node: int
    experts: int
    k: int
    hidden: int
    tokens: int
    dtype: str
    popularity: float
    link_mbit_per_s: float
    rounds: int
    timeout_s: float
    contestants: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Counted:
    """One forward and backward of a contestant on one rank, as its calls of the transport say.

    ``crossing_bytes``  bytes to ranks of other nodes
    ``crossing_rows``   rows of the model's width among them
    ``planned_rows``    rows that cross in one direction by an xmoe plan
    ``staying_bytes``   bytes to other ranks of this node
    ``interface_bytes`` bytes that left this node's interface (the same on each rank of a node)
    ``host_syncs``      device-to-host reads of one forward
    """

    crossing_bytes: int
    crossing_rows: int
    planned_rows: int | None
    staying_bytes: int
    interface_bytes: int
    host_syncs: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank found."""

    seconds: dict[str, list[float]]
    counted: dict[str, Counted]
    crossing_pairs: int
    flat_exchange_s: list[float]
    flat_exchange_bytes: tuple[int, int]  # sent to other nodes, received from them
    loopback_s: list[float]
    loopback_bytes: int


@dataclass
class Transport:
    """Counts what ``all_to_all_single``, which carries everything here, sends from this rank."""

    ranks_per_node: int
    row_bytes: int
    crossing_bytes: int = 0
    crossing_rows: int = 0
    staying_bytes: int = 0
    row_dtypes: set[str] = field(default_factory=set)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        original = dist.all_to_all_single

        def counted(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
            splits = kwargs.get("input_split_sizes", args[1] if len(args) > 1 else None)
            self.add(input, splits, kwargs.get("group"))
            if input.dim() > 1:
                self.row_dtypes.add(str(input.dtype).removeprefix("torch."))
            return original(output, input, *args, **kwargs)

        dist.all_to_all_single = counted
        try:
            yield
        finally:
            dist.all_to_all_single = original

    def add(self, sent: Tensor, splits: list[int] | None, group: dist.ProcessGroup | None) -> None:
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        splits = splits or [sent.shape[0] // len(ranks)] * len(ranks)
        unit = sent[0].numel() * sent.element_size() if sent.shape[0] else 0
        own = dist.get_rank()
        for rank, count in zip(ranks, splits, strict=True):
            if rank // self.ranks_per_node != own // self.ranks_per_node:
                self.crossing_bytes += count * unit
                self.crossing_rows += count * unit // self.row_bytes if unit >= self.row_bytes else 0
            elif rank != own:
                self.staying_bytes += count * unit


def routing_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, selected experts (int32, distinct) and float32 weights of this rank, the same in every run."""
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    place_E = torch.randperm(case.experts, generator=torch.Generator().manual_seed(0))  # the same on all ranks
    x_TD = torch.randn(case.tokens, case.hidden, generator=generator).to(getattr(torch, case.dtype))
    odds_E = (place_E + 1).double() ** -case.popularity
    ids_TK = torch.multinomial(odds_E.expand(case.tokens, -1), case.k, generator=generator).to(torch.int32)
    weights_TK = torch.rand(case.tokens, case.k, generator=generator).softmax(dim=1)
    return x_TD, ids_TK, weights_TK


def crossing_pairs(case: Case, ids_TK: Tensor) -> int:
    """Distinct (token, remote node) pairs of this rank: the fewest rows that can cross."""
    per_node = case.experts // case.nodes
    used_TG = torch.zeros(case.tokens, case.nodes, dtype=torch.bool).scatter_(1, (ids_TK // per_node).long(), True)
    used_TG[:, dist.get_rank() // case.ranks_per_node] = False
    return int(used_TG.sum())


@contextlib.contextmanager
def interface_bytes() -> Iterator[list[int]]:
    """Appends what all ranks of this node together send to other nodes meanwhile."""
    found: list[int] = []
    dist.barrier()
    before = read_traffic()
    dist.barrier()  # nobody starts before all have read
    yield found
    dist.barrier()
    found.append((read_traffic() - before).sent_bytes)
    dist.barrier()


def check(name: str, case: Case, found: tuple[Tensor, ...], inputs: tuple[Tensor, ...], upstream: Tensor) -> None:
    """Output and gradients equal the closed form in float64, within the dtype's tolerances. Raises RuntimeError."""
    x_TD, ids_TK, weights_TK = inputs
    scales_TK = dispatch_peers.expert_scales(case.experts).double()[ids_TK.long()]
    factor_T1 = (weights_TK.double() * scales_TK).sum(dim=1, keepdim=True)
    product_T1 = (x_TD.double() * upstream.double()).sum(dim=1, keepdim=True)
    wanted = x_TD.double() * factor_T1, upstream.double() * factor_T1, product_T1 * scales_TK
    for what, actual, expected in zip(("output", "input gradient", "weight gradient"), found, wanted, strict=True):
        try:
            assert_close(actual, expected, dtype=getattr(torch, case.dtype), what=f"{name}: {what}")
        except AssertionError as error:
            raise RuntimeError(f"{error}, on rank {dist.get_rank()}") from None


@dataclass
class HostReads:
    """Counts calls that read a tensor on the host, or whose result's size depends on its values."""

    count: int = 0
    inside: bool = field(default=False, repr=False)

    READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")
    SIZED_BY_VALUES = ("nonzero", "unique", "unique_consecutive", "masked_select", "bincount", "argwhere")

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        owned = [(Tensor, name) for name in {*self.READS, *self.SIZED_BY_VALUES} if hasattr(Tensor, name)]
        owned += [(torch, name) for name in self.SIZED_BY_VALUES]
        saved = [(owner, name, getattr(owner, name)) for owner, name in owned]
        for owner, name, original in saved:
            setattr(owner, name, self._counted(original, lambda args, kwargs: True))
        repeat, getitem = torch.repeat_interleave, Tensor.__getitem__
        torch.repeat_interleave = self._counted(repeat, lambda args, kwargs: kwargs.get("output_size") is None)
        Tensor.__getitem__ = self._counted(getitem, lambda args, kwargs: _indexes_by_mask(args[1]))
        try:
            yield
        finally:
            torch.repeat_interleave, Tensor.__getitem__ = repeat, getitem
            for owner, name, original in saved:
                setattr(owner, name, original)

    def _counted(self, original: Callable[..., Any], reads: Callable[[Any, Any], bool]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            outermost = not self.inside
            self.count += outermost and reads(args, kwargs)
            self.inside = True
            try:
                return original(*args, **kwargs)
            finally:
                self.inside = not outermost

        return call


def _indexes_by_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


def step(run: dispatch_peers.Exchanger, inputs: tuple[Tensor, ...], upstream: Tensor) -> None:
    """Forward and backward."""
    x_TD, ids_TK, weights_TK = inputs
    run(x_TD.detach().requires_grad_(), ids_TK, weights_TK.detach().requires_grad_()).backward(upstream)


def examine(
    name: str, case: Case, run: dispatch_peers.Exchanger, inputs: tuple[Tensor, ...], upstream: Tensor
) -> Counted:
    """Checks one forward and backward, and counts at the transport and at the node's interface what it moves."""
    transport, reads = Transport(case.ranks_per_node, case.hidden * inputs[0].element_size()), HostReads()
    x, weights = inputs[0].clone().requires_grad_(), inputs[2].clone().requires_grad_()
    with interface_bytes() as left_node, transport.counting():
        with reads.counting():
            out = run(x, inputs[1], weights)
        out.backward(upstream)
    assert x.grad is not None
    assert weights.grad is not None
    check(name, case, (out.detach(), x.grad, weights.grad), inputs, upstream)
    if transport.row_dtypes - {case.dtype}:
        raise RuntimeError(f"{name}: rows travelled as {sorted(transport.row_dtypes)}, not as {case.dtype}")
    return Counted(
        crossing_bytes=transport.crossing_bytes,
        crossing_rows=transport.crossing_rows,
        planned_rows=run.traffic.between_nodes if isinstance(run, dispatch_peers.Ours) else None,
        staying_bytes=transport.staying_bytes,
        interface_bytes=left_node[0],
        host_syncs=reads.count,
    )


def flat_exchange(
    case: Case, ids_TK: Tensor, rows_width: int, dtype: torch.dtype
) -> tuple[Callable[[], object], tuple[int, int]]:
    """One exchange of flat's rows and nothing else, and its bytes that this rank sends to and gets from other nodes."""
    world, own = dist.get_world_size(), dist.get_rank()
    sent_W = torch.bincount(ids_TK.reshape(-1) // (case.experts // world), minlength=world)
    received_W = torch.empty_like(sent_W)
    dist.all_to_all_single(received_W, sent_W)
    send, recv = sent_W.tolist(), received_W.tolist()
    rows = torch.ones(sum(send), rows_width, dtype=dtype)
    exchange = Exchange(group=dist.group.WORLD, label="rows of flat", timeout_s=case.timeout_s)
    others = [rank for rank in range(world) if rank // case.ranks_per_node != own // case.ranks_per_node]
    row_bytes = rows_width * rows.element_size()
    away = sum(send[rank] for rank in others) * row_bytes, sum(recv[rank] for rank in others) * row_bytes
    return lambda: exchange_rows(rows, send, recv, exchange), away


def loopback(case: Case) -> tuple[Callable[[], object], int]:
    """One exchange among the ranks of node 0, and the bytes of it that leave this rank."""
    size = case.ranks_per_node
    group = dist.new_group(list(range(size)))
    if dist.get_rank() >= size or size == 1:
        return lambda: None, 0
    rows = torch.ones(size, PROBE_BYTES // size // 4)
    received = torch.empty_like(rows)
    return lambda: dist.all_to_all_single(received, rows, group=group), PROBE_BYTES * (size - 1) // size


def measure(case: Case) -> Measured:
    """The whole of one rank's part."""
    torch.set_num_threads(1)
    init_distributed()
    inputs = routing_of(case)
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(dist.get_rank())).to(inputs[0])
    contestants = dispatch_peers.build(case.contestants, case.experts, case.timeout_s)
    counted = {name: examine(name, case, run, inputs, upstream) for name, run in contestants.items()}
    exchange_flat, flat_bytes = flat_exchange(case, inputs[1], case.hidden, inputs[0].dtype)
    exchange_local, local_bytes = loopback(case)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    flat_s, loopback_s = [], []
    for _ in range(case.rounds):
        for name, run in contestants.items():
            seconds[name].append(timed(lambda run=run: step(run, inputs, upstream)))
        flat_s.append(timed(exchange_flat))
        loopback_s.append(timed(exchange_local))
    dist.barrier()
    return Measured(
        seconds=seconds,
        counted=counted,
        crossing_pairs=crossing_pairs(case, inputs[1]),
        flat_exchange_s=flat_s,
        flat_exchange_bytes=flat_bytes,
        loopback_s=loopback_s,
        loopback_bytes=local_bytes,
    )
