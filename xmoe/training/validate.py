"""Loss on the held-out text."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from xmoe.metrics import take_layer_loads
from xmoe.models.transformer import IGNORED_TARGET


def read_batch(
    stream: NDArray[Any], starts: NDArray[np.int64], *, length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 ``[B, S]``: tokens ``start`` to ``start + S - 1`` and the ones after them."""
    windows = stream[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    batch = torch.from_numpy(windows).to(device)
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def spread_starts(num_tokens: int, *, length: int, count: int) -> NDArray[np.int64]:
    """First tokens of up to ``count`` disjoint sequences, spread evenly over the stream."""
    available = (num_tokens - 1) // length
    chosen = np.unique(np.arange(min(count, available), dtype=np.int64) * available // min(count, available))
    return chosen * length


@torch.no_grad()
def validation_bits(
    engine: Any, stream: NDArray[Any], *, length: int, count: int, micro_batch: int, tp_size: int = 1
) -> float:
    """Mean bits per token over ``count`` held-out sequences of ``length`` tokens, shared out over the ranks.

    ``tp_size`` consecutive ranks take the same sequences.

    Collective. Every rank runs the same number of batches, since an MoE layer's exchange needs all of them: a rank
    whose share is short repeats a sequence without counting it. Random states and layer loads are left as if
    nothing had run.
    """
    rank, world = dist.get_rank() // tp_size, dist.get_world_size() // tp_size
    starts = spread_starts(len(stream), length=length, count=count)
    num_batches = math.ceil(len(starts) / (world * micro_batch))
    mine = np.resize(starts[rank::world], num_batches * micro_batch) if len(starts) > rank else None
    counted = len(starts[rank::world])
    if mine is None:
        mine, counted = np.resize(starts, num_batches * micro_batch), 0
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    engine.eval()
    for first in range(0, len(mine), micro_batch):
        tokens_BS, targets_BS = read_batch(
            stream, mine[first : first + micro_batch], length=length, device=engine.device
        )
        targets_BS[max(0, counted - first) :] = IGNORED_TARGET
        num_targets = (targets_BS != IGNORED_TARGET).sum()
        loss, _ = engine(tokens_BS, targets_BS)
        total += torch.stack((loss.double() * num_targets, num_targets.double()))
    engine.train()
    take_layer_loads(engine.module)
    dist.all_reduce(total)
    return float(total[0] / total[1]) / math.log(2)


@contextlib.contextmanager
def without_routed_experts(model: nn.Module) -> Iterator[None]:
    """Zeroes the routed experts' output of every MoE layer inside the block; shared experts stay."""
    layers = [layer.deepspeed_moe for layer in model.moe_layers]  # type: ignore[union-attr]
    for layer in layers:
        layer.zero_routed_output = True
    try:
        yield
    finally:
        for layer in layers:
            layer.zero_routed_output = False
