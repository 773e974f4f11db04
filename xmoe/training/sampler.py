"""Which sequences a micro-batch holds: a pure function of seed, step, rank, world and accumulation index.

Nothing is remembered between steps, so a resumed run continues exactly where the interrupted one stopped.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Visits every sequence of a stream once per epoch, each epoch in another order.

    ``num_tokens``       length of the stream; sequence i covers tokens ``i*S`` to ``i*S + S`` inclusive, whose
                         first S are inputs and whose last S are targets
    ``sequence_length``  S
    ``seed``             seed of the orders
    ``micro_batch``      sequences of one rank's micro-batch
    ``accumulation``     micro-batches of one optimizer step
    ``world``            ranks, each with other sequences
    """

    num_tokens: int
    sequence_length: int
    seed: int
    micro_batch: int
    accumulation: int
    world: int

    def __post_init__(self) -> None:
        if self.num_sequences < 1:
            raise ValueError(
                f"a stream of {self.num_tokens} tokens holds no sequence of data.sequence_length "
                f"({self.sequence_length}) and one token more"
            )

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch."""
        return (self.num_tokens - 1) // self.sequence_length

    def starts(self, step: int, rank: int, *, accumulation_index: int = 0) -> NDArray[np.int64]:
        """First token of each of the ``micro_batch`` sequences, ``[B]``.

        The draws of step, accumulation index, rank and row are numbered in this order without a gap; draw i is the
        ``i % num_sequences``-th of epoch ``i // num_sequences``.
        """
        batch = (step * self.accumulation + accumulation_index) * self.world + rank
        draws = np.arange(batch * self.micro_batch, (batch + 1) * self.micro_batch, dtype=np.int64)
        epochs, positions = np.divmod(draws, self.num_sequences)
        sequences = np.empty_like(draws)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            sequences[of_epoch] = permute(positions[of_epoch], self.num_sequences, seed=self.seed, epoch=int(epoch))
        return sequences * self.sequence_length


def permute(positions: NDArray[np.int64], size: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Image of ``positions`` under a pseudo-random permutation of ``range(size)`` that is never stored.

    A Feistel network permutes ``range(2**(2*bits)) >= size``; a value that falls outside ``range(size)`` is permuted
    again until it falls inside, which keeps the map one-to-one.
    """
    bits = max(1, (int(size - 1).bit_length() + 1) // 2)
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    keys = np.frombuffer(digest, dtype="<u8")[:_NUM_ROUNDS]
    values = positions.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], keys, bits=bits)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], *, bits: int) -> NDArray[np.uint64]:
    shift, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scrambles 64-bit words: multiply by odd constants, fold the high half down (modulo 2**64 by intent)."""
    for factor in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F):
        values = (values ^ (values >> np.uint64(32))) * np.uint64(factor)
    return values ^ (values >> np.uint64(32))
