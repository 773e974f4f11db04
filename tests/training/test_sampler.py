"""The sampler: a pure function that visits every sequence once per epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmoe.training.sampler import Sampler, permute
from xmoe.training.validate import read_batch, spread_starts


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**20))
@settings(deadline=None)
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    image = permute(np.arange(size), size, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(image), np.arange(size))


def test_permute_moves_nearly_everything_and_differs_between_epochs_and_seeds() -> None:
    size = 4096
    images = [permute(np.arange(size), size, seed=s, epoch=e) for s, e in ((0, 0), (0, 1), (1, 0))]
    for image in images:
        assert (image == np.arange(size)).sum() < 10
        # Neighbours are spread: the mean distance of two random positions is size / 3.
        assert np.abs(np.diff(image)).mean() == pytest.approx(size / 3, rel=0.1)
    assert (images[0] == images[1]).sum() < 10
    assert (images[0] == images[2]).sum() < 10


def make(num_sequences: int, *, micro_batch: int, accumulation: int, world: int) -> Sampler:
    return Sampler(
        num_tokens=num_sequences * 4 + 1,
        sequence_length=4,
        seed=7,
        micro_batch=micro_batch,
        accumulation=accumulation,
        world=world,
    )


def draws(sampler: Sampler, num_steps: int) -> np.ndarray:
    return np.concatenate(
        [
            sampler.starts(step, rank, accumulation_index=index)
            for step in range(num_steps)
            for index in range(sampler.accumulation)
            for rank in range(sampler.world)
        ]
    )


@given(
    num_sequences=st.integers(1, 60),
    micro_batch=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    world=st.integers(1, 4),
)
@settings(deadline=None)
def test_each_epoch_visits_every_sequence_once(
    num_sequences: int, micro_batch: int, accumulation: int, world: int
) -> None:
    sampler = make(num_sequences, micro_batch=micro_batch, accumulation=accumulation, world=world)
    per_step = micro_batch * accumulation * world
    starts = draws(sampler, -(-2 * num_sequences // per_step))
    everything = np.arange(num_sequences) * 4
    assert np.array_equal(np.sort(starts[:num_sequences]), everything)
    assert np.array_equal(np.sort(starts[num_sequences : 2 * num_sequences]), everything)


def test_the_same_data_whatever_the_ranks_share_it_by() -> None:
    one = draws(make(50, micro_batch=8, accumulation=1, world=1), 10)
    four = draws(make(50, micro_batch=1, accumulation=2, world=4), 10)
    assert np.array_equal(one, four)


def test_a_stream_shorter_than_a_sequence_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"data\.sequence_length \(4\)"):
        Sampler(num_tokens=4, sequence_length=4, seed=0, micro_batch=1, accumulation=1, world=1)


def test_targets_are_the_next_tokens() -> None:
    stream = np.arange(20, dtype=np.uint8)
    import torch

    tokens, targets = read_batch(stream, np.array([0, 8]), length=4, device=torch.device("cpu"))
    assert tokens.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert targets.tolist() == [[1, 2, 3, 4], [9, 10, 11, 12]]


@given(num_tokens=st.integers(9, 5000), count=st.integers(1, 100))
@settings(deadline=None)
def test_validation_sequences_are_disjoint_and_inside(num_tokens: int, count: int) -> None:
    starts = spread_starts(num_tokens, length=8, count=count)
    assert len(starts) == min(count, (num_tokens - 1) // 8)
    assert np.all(np.diff(starts) >= 8)
    assert starts[-1] + 9 <= num_tokens
