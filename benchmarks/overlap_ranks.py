"""What each rank of bench_overlap.py does: one routed layer, run over every dispatcher and number of chunks.

Beside the layer it times its parts alone, in the same rounds and on all ranks at once, as the layer's parts are:

    experts    the routed experts of each chunk, on rows that were dispatched before; nothing is exchanged
    exchanges  each chunk's rows out and home again; what came out goes home as it is
    shared     the shared experts
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from dispatch_timing import timed
from overlap_emulated import EmulatedExperts, EmulatedMLP
from overlap_trace import Trace, traced
from torch import Tensor, nn

from xmoe.dispatch.base import Dispatcher
from xmoe.dispatch.make import make_dispatcher
from xmoe.experts import Experts
from xmoe.layer import RoutedMLP
from xmoe.models.transformer import SwiGLU
from xmoe.ops._backend import use_kernels
from xmoe.ops.collectives import Exchange
from xmoe.ops.overlap import to_end
from xmoe.permute import permute, split_tokens
from xmoe.router import TopKRouter
from xmoe.router_settings import RouterSettings
from xmoe.testing import assert_close
from xmoe.types import ExpertPlan, Rows, TokenBuffer

Kind = tuple[str, int]  # the dispatcher's name and the number of chunks
Parts = dict[str, Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting. ``tokens`` is per rank; ``ffn`` an expert's width, ``shared_ffn`` that of the shared experts.

    ``emulated_us``  0, or what an assignment takes of an expert that sleeps in place of computing, forward + backward
    """

    nodes: int
    ranks_per_node: int
    experts: int
    k: int
    hidden: int
    ffn: int
    shared_ffn: int
    tokens: int
    link_mbit_per_s: float
    rounds: int
    timeout_s: float
    dispatchers: tuple[str, ...]
    chunks: tuple[int, ...]
    emulated_us: float = 0.0

    @property
    def kinds(self) -> list[Kind]:
        return [(name, chunks) for name in self.dispatchers for chunks in self.chunks]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank found: seconds by kind, or by kind and part, for each round.

    ``cpu``     processor seconds of the experts alone, which other processes do not lengthen by much
    ``waits``   seconds of the layer's rounds in which the rank waited for an exchange of rows or weights
    ``traces``  what one more step of each kind did and when; of rank 0 only
    """

    layer: dict[Kind, list[float]] = field(default_factory=dict)
    waits: dict[Kind, list[float]] = field(default_factory=dict)
    parts: dict[Kind, dict[str, list[float]]] = field(default_factory=dict)
    cpu: dict[Kind, list[float]] = field(default_factory=dict)
    traces: dict[Kind, Trace] = field(default_factory=dict)


def _fill(module: nn.Module, logical_id: int) -> None:
    generator = torch.Generator().manual_seed(logical_id)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)


def build(case: Case) -> RoutedMLP:
    """The layer of this rank, float32; the same weights in every run."""
    local = case.experts // dist.get_world_size()
    settings = RouterSettings(top_k=case.k, drop_tokens=False, sample_second_expert=False)
    gate = TopKRouter(case.hidden, case.experts, settings=settings)
    _fill(gate, 10_000)
    if case.emulated_us:
        slept = EmulatedMLP(case.emulated_us * case.shared_ffn / case.ffn) if case.shared_ffn else None
        return RoutedMLP(gate, EmulatedExperts(case.emulated_us), shared_mlp=slept)  # type: ignore[arg-type]
    first = dist.get_rank() * local
    experts = Experts(SwiGLU(case.hidden, case.ffn), local, first_id=first, initialize=_fill)
    shared = SwiGLU(case.hidden, case.shared_ffn) if case.shared_ffn else None
    if shared is not None:
        _fill(shared, 10_001)
    return RoutedMLP(gate, experts, shared_mlp=shared)


def dispatchers_of(case: Case) -> dict[Kind, Dispatcher]:
    exchange = Exchange(group=dist.group.WORLD, label="bench_overlap", timeout_s=case.timeout_s)
    return {
        (name, chunks): make_dispatcher(
            name, exchange, ranks_per_node=None, device=torch.device("cpu"), num_chunks=chunks
        )
        for name, chunks in case.kinds
    }


def step(layer: RoutedMLP, x_TD: Tensor, upstream_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward: the output and the input's gradient. Parameters' gradients add up."""
    x_TD = x_TD.detach().requires_grad_()
    y_TD, aux, _ = layer(x_TD)
    torch.autograd.backward([y_TD, aux], [upstream_TD, torch.ones_like(aux)])
    assert x_TD.grad is not None
    return y_TD.detach(), x_TD.grad


def results_of(layer: RoutedMLP, x_TD: Tensor, upstream_TD: Tensor) -> dict[str, Tensor]:
    """Output and all gradients by name."""
    layer.zero_grad()
    y_TD, grad_TD = step(layer, x_TD, upstream_TD)
    found = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    layer.zero_grad()
    return {"output": y_TD, "gradient of the input": grad_TD, **found}


def check(kind: Kind, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """The same as one chunk's, within the dtype's tolerances. Raises RuntimeError."""
    if found.keys() != wanted.keys():
        raise RuntimeError(f"{kind}: gradients of other parameters: {sorted(found.keys() ^ wanted.keys())}")
    for name, expected in wanted.items():
        try:
            assert_close(found[name], expected, what=f"{kind[0]} in {kind[1]} chunks: {name}")
        except AssertionError as error:
            raise RuntimeError(f"{error}, on rank {dist.get_rank()}") from None


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of this rank's tokens with its plan, and the rows that its experts get."""

    x_TD: Tensor
    buffer: TokenBuffer
    plan: ExpertPlan
    rows: Rows


def chunks_of(layer: RoutedMLP, dispatcher: Dispatcher, x_TD: Tensor) -> list[Chunk]:
    """What the layer makes of ``x_TD`` before its experts, detached."""
    with torch.no_grad():
        routing = layer.gate(x_TD, None)
        buffers = permute(routing, decide=lambda decision: decision(), num_chunks=dispatcher.num_chunks)
        plans = dispatcher.plan(buffers)
        xs = split_tokens(x_TD, [buffer.num_tokens for buffer in buffers])
        return [
            Chunk(x_TD=x, buffer=buffer, plan=plan, rows=to_end(dispatcher.dispatch(x, buffer, plan)))
            for x, buffer, plan in zip(xs, buffers, plans, strict=True)
        ]


def parts_of(layer: RoutedMLP, dispatcher: Dispatcher, x_TD: Tensor, upstream_TD: Tensor) -> Parts:
    """Forward and backward of each part alone."""
    chunks = chunks_of(layer, dispatcher, x_TD)

    def experts() -> None:
        prepared = layer.experts.prepare(x_TD.device.type, num_calls=len(chunks))
        for chunk in chunks:
            rows = Rows(
                x_RD=chunk.rows.x_RD.detach().requires_grad_(),
                weights_M=chunk.rows.weights_M.detach().requires_grad_(),
            )
            layer.experts(rows, chunk.plan, prepared).backward(chunk.rows.x_RD)

    def exchanges() -> None:
        outs = []
        for chunk in chunks:
            x = chunk.x_TD.detach().requires_grad_()
            weights = chunk.buffer.combine_weights_S.detach().requires_grad_()
            buffer = replace(chunk.buffer, combine_weights_S=weights)
            rows = to_end(dispatcher.dispatch(x, buffer, chunk.plan))
            out = to_end(dispatcher.combine(rows.x_RD, buffer, chunk.plan))
            outs += [(out, torch.ones_like(out)), (rows.weights_M, torch.ones_like(rows.weights_M))]
        torch.autograd.backward(*map(list, zip(*outs, strict=True)))

    def shared() -> None:
        if layer.shared_mlp is not None:
            layer.shared_mlp(x_TD.detach().requires_grad_()).backward(upstream_TD)

    return {"experts": experts, "exchanges": exchanges, "shared": shared}


def measure(case: Case) -> Measured:
    """The whole of one rank's part."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=case.timeout_s))
    layer = build(case)
    generator = torch.Generator().manual_seed(rank)
    x_TD, upstream_TD = (torch.randn(case.tokens, case.hidden, generator=generator) for _ in range(2))
    dispatchers = dispatchers_of(case)
    wanted: dict[str, Tensor] | None = None
    parts: dict[Kind, Parts] = {}
    with use_kernels(layer.kernels):
        for kind, dispatcher in dispatchers.items():
            layer.set_dispatcher(dispatcher)
            found = results_of(layer, x_TD, upstream_TD)
            wanted = found if wanted is None else wanted
            check(kind, found, wanted)
            parts[kind] = parts_of(layer, dispatcher, x_TD, upstream_TD)
        measured = Measured()
        for _ in range(case.rounds):
            for kind, dispatcher in dispatchers.items():
                layer.set_dispatcher(dispatcher)
                _one_round(layer, kind, parts[kind], measured, x_TD, upstream_TD)
        for kind, dispatcher in dispatchers.items():
            layer.set_dispatcher(dispatcher)
            dist.barrier()
            trace = traced(layer, lambda: step(layer, x_TD, upstream_TD))
            if rank == 0:
                measured.traces[kind] = trace
    dist.barrier()
    return measured


def _one_round(
    layer: RoutedMLP, kind: Kind, parts: Parts, measured: Measured, x_TD: Tensor, upstream_TD: Tensor
) -> None:
    layer.zero_grad()
    layer.clock.enabled = True
    measured.layer.setdefault(kind, []).append(timed(lambda: step(layer, x_TD, upstream_TD)))
    layer.clock.enabled = False
    waits = [seconds for name, seconds in layer.clock.take().items() if name.endswith("_wait") and name != "plan_wait"]
    measured.waits.setdefault(kind, []).append(sum(waits))
    for name, run in parts.items():
        layer.zero_grad()
        seconds, cpu_s = _with_processor_time(run)
        measured.parts.setdefault(kind, {}).setdefault(name, []).append(seconds)
        if name == "experts":
            measured.cpu.setdefault(kind, []).append(cpu_s)


def _with_processor_time(run: Callable[[], object]) -> tuple[float, float]:
    """:func:`timed`, and the seconds for which this thread had a processor."""
    used: list[float] = []

    def counted() -> None:
        before = time.thread_time()
        run()
        used.append(time.thread_time() - before)

    return timed(counted), used[0]
