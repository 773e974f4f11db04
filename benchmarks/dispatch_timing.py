"""Times of ranks that work together: samples by rank, then round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch.distributed as dist


def timed(run: Callable[[], object]) -> float:
    """Seconds from the moment all ranks are ready to this rank's end."""
    dist.barrier()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def slowest_of_rounds(samples: list[list[float]]) -> list[float]:
    """The slowest rank's, for each round."""
    return [max(of_round) for of_round in zip(*samples, strict=True)]


def median_of_slowest(samples: list[list[float]]) -> float:
    return statistics.median(slowest_of_rounds(samples))
