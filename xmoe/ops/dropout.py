"""Dropout in what each of several ranks computes on its own part of their common tokens.

Tensor-parallel ranks promise one another equal random states: dropout in replicated layers must draw the same masks on
all of them. A rank that drops out of a slice, or of the rows that came to its experts, draws as many numbers as it has
rows, so the states would part. Its draws therefore come from a stream of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def drops_out(module: nn.Module) -> bool:
    """Whether a dropout module in ``module`` would draw random numbers now; alike on ranks with equal modules."""
    return any(isinstance(part, _DropoutNd) and part.training and part.p > 0 for part in module.modules())


@contextmanager
def own_dropout(module: nn.Module, place: int | None, device: torch.device) -> Iterator[None]:
    """Within it ``module``, called with inputs on ``device``, draws from a stream of the rank at ``place`` alone.

    Afterwards the generators (the CPU's and the device's) are where one draw of one number on the CPU leaves them,
    however many were drawn within; that number is the stream's seed. So states that were equal on the ranks are equal
    again, the next call draws other masks, and a recompute from a restored state the same ones. Needs no device sync.
    A module that does not drop out, or ``place`` None (no other rank has these tokens), changes nothing.
    """
    if place is None or not drops_out(module):
        yield
        return
    seed = int(torch.randint(2**62, (), device="cpu")) + place
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    with torch.random.fork_rng(devices=[device], device_type=device.type):
        torch.default_generator.manual_seed(seed)
        accelerator = torch.get_device_module(device)
        with accelerator.device(device):
            accelerator.manual_seed(seed)
        yield
