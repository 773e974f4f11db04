"""What the held-out text is worth without a model: entropies of its own byte counts, unsmoothed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Bits per byte of the best predictor that sees no earlier byte, and that sees exactly one."""

    unigram_bits_per_byte: float
    bigram_bits_per_byte: float


def count_pairs(stream: NDArray[np.uint8], *, chunk: int = 1 << 22) -> NDArray[np.int64]:
    """``counts[a, b]``: how often byte b follows byte a in the stream, ``[256, 256]``."""
    counts = np.zeros(256 * 256, dtype=np.int64)
    for start in range(0, len(stream) - 1, chunk):
        piece = stream[start : start + chunk + 1].astype(np.int64)
        counts += np.bincount(piece[:-1] * 256 + piece[1:], minlength=256 * 256)
    return counts.reshape(256, 256)


def measure_baselines(stream: NDArray[np.uint8]) -> Baselines:
    """H(next byte) and H(next byte | byte) of the stream's own pair counts.

    Both are the least any predictor of that form can reach on this very text, since the counts are the text's own:
    a model below the second uses more than the previous byte.
    """
    counts = count_pairs(stream).astype(np.float64)
    joint = _entropy_bits(counts.ravel())
    return Baselines(
        unigram_bits_per_byte=_entropy_bits(counts.sum(axis=0)),
        bigram_bits_per_byte=joint - _entropy_bits(counts.sum(axis=1)),
    )


def _entropy_bits(counts: NDArray[np.float64]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())
