"""Experts' matrices by one address and a stride."""

import numpy as np
import pytest
import torch
from triton.backends.amd.compiler import HIPBackend

from xmoe.kernels.ragged import Stacked, kernel_arguments, stack


def matrices(stacked: Stacked) -> list[torch.Tensor]:
    """Each expert's matrix, found as a kernel finds it."""
    first = stacked.first
    flat = first.as_strided((first.untyped_storage().nbytes() // first.element_size(),), (1,), 0)
    starts = [first.storage_offset() + expert * stacked.stride for expert in range(stacked.num_experts)]
    return [flat[start : start + first.numel()].view_as(first) for start in starts]


def equally_spaced() -> list[torch.Tensor]:
    return list(torch.randn(3, 4, 2).unbind())


def with_gaps() -> list[torch.Tensor]:
    buffer = torch.randn(3, 20)
    return [row[:8].view(4, 2) for row in buffer]


def backwards() -> list[torch.Tensor]:
    return equally_spaced()[::-1]


def unequally_spaced() -> list[torch.Tensor]:
    buffer = torch.randn(100)
    return [buffer[start : start + 8].view(4, 2) for start in (0, 8, 40)]


def transposed() -> list[torch.Tensor]:
    return [weight.t() for weight in torch.randn(3, 2, 4).unbind()]


@pytest.mark.parametrize("make", [equally_spaced, with_gaps, backwards, unequally_spaced, transposed])
@pytest.mark.parametrize("num_experts", [1, 2, 3])
def test_stack_finds_every_matrix(make, num_experts):
    weights = make()[:num_experts]
    stacked = stack(weights)
    assert stacked.num_experts == num_experts
    assert stacked.first.shape == weights[0].shape
    assert stacked.first.is_contiguous()
    for found, expected in zip(matrices(stacked), weights, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("make", [equally_spaced, with_gaps, backwards])
def test_stack_copies_nothing_that_is_equally_spaced(make):
    weights = make()
    assert stack(weights).first.data_ptr() == weights[0].data_ptr()


def test_stack_of_meta_tensors_has_a_shape():
    stacked = stack([torch.empty(4, 2, device="meta") for _ in range(3)])
    assert (tuple(stacked.first.shape), stacked.stride, stacked.num_experts) == ((4, 2), 8, 3)


def test_a_kernel_gets_every_matrix_and_its_stride_or_neither():
    up = stack(with_gaps())
    assert kernel_arguments(up=up, gate=None) == {"up": up.first, "up_stride": 20, "gate": None, "gate_stride": 0}


def apart(distance: int) -> list[torch.Tensor]:
    """Two matrices of storages of their own, ``distance`` bytes from one's start to the other's."""
    memory = np.empty(abs(distance) + 32, np.uint8)  # resident where it is touched
    starts = (0, distance) if distance > 0 else (-distance, 0)
    return [torch.from_numpy(memory[start : start + 32].view(np.float32).reshape(4, 2)) for start in starts]


@pytest.mark.parametrize(
    ("distance", "within"), [(64, True), (2**31 - 64, True), (2**31 - 16, False), (2**32 + 64, False), (-64, False)]
)
def test_triton_computes_offsets_of_far_matrices_in_64_bits(distance: int, within: bool):
    stacked = stack(apart(distance))
    assert stacked.stride * 4 == distance
    assert HIPBackend.is_within_2gb(stacked.first) == within


def test_triton_is_told_by_the_stack_alone():
    weights = apart(2**32)
    stack(weights)
    assert HIPBackend.is_within_2gb(weights[0])
