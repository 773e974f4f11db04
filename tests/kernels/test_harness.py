"""The harness itself: bfloat16 against torch, and every check against a kernel that does wrong."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from harness import Chosen, KernelFault, allowed, only_programs, program_order, race_check, traffic
from interpreter_floats import narrow, widen
from triton.runtime import interpreter

from xmoe.kernels.ragged import stack
from xmoe.kernels.rows import gather_rows

BLOCK = 16


@triton.jit
def _cast_kernel(x, out, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(out + places, tl.load(x + places).to(out.dtype.element_ty))


@triton.jit
def _arithmetic_kernel(x, y, sums, products, less, larger, negative, chosen, N: tl.constexpr):
    places = tl.arange(0, N)
    a, b = tl.load(x + places), tl.load(y + places)
    tl.store(sums + places, a + b)
    tl.store(products + places, a * b)
    tl.store(less + places, a < b)
    tl.store(larger + places, tl.maximum(a, b))
    tl.store(negative + places, -tl.abs(a))
    tl.store(chosen + places, tl.where(a < b, a, b))


@triton.jit
def _reduce_kernel(x, total, top, place, running, ROWS: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, N)
    values = tl.load(x + rows[:, None] * N + columns[None, :])
    tl.store(total + rows, tl.sum(values, axis=1))
    tl.store(top + rows, tl.max(values, axis=1))
    tl.store(place + rows, tl.argmax(values, axis=1))
    tl.store(running + rows[:, None] * N + columns[None, :], tl.cumsum(values, axis=1))


@triton.jit
def _dot_kernel(a, b, out, N: tl.constexpr, PRECISION: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x, y = tl.load(a + rows * N + columns), tl.load(b + rows * N + columns)
    tl.store(out + rows * N + columns, tl.dot(x, y, input_precision=PRECISION))


@triton.jit
def _shifted_copy_kernel(x, out, size, shift, N: tl.constexpr):
    places = tl.program_id(0) * N + tl.arange(0, N)
    inside = places < size
    tl.store(out + places, tl.load(x + places + shift, mask=inside, other=0.0), mask=inside)


@triton.jit
def _no_other_kernel(x, out, size, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(out + places, tl.load(x + places, mask=places < size))


@triton.jit
def _expert_kernel(weight, out, stride, expert, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(out + places, tl.load(weight + expert * stride + places))


@triton.jit
def _order_kernel(out, counter):
    tl.store(out + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.load(counter))
    tl.store(counter, tl.load(counter) + 1)


@triton.jit
def _multiply_kernel(out, a, b):
    tl.store(out, a * b)


@triton.jit
def _same_place_kernel(out):
    tl.store(out, tl.program_id(0))


@triton.jit
def _lanes_kernel(out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N) // 2, tl.arange(0, N))


@triton.jit
def _neighbour_kernel(x, N: tl.constexpr):
    place = tl.program_id(0)
    tl.store(x + place, tl.load(x + (place + 1) % N))


@triton.jit
def _read_back_kernel(x, out, BARRIER: tl.constexpr):
    tl.store(x, 1.0)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out, tl.load(x))


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _calls_kernel(x, out):
    tl.store(out + tl.program_id(0), _twice(_twice(tl.load(x + tl.program_id(0)))))


@triton.jit
def _add_atomically_kernel(ids, counts, N: tl.constexpr):
    tl.atomic_add(counts + tl.load(ids + tl.arange(0, N)), 1)


def all_patterns() -> torch.Tensor:
    return torch.arange(65536).to(torch.int32).sub(32768).to(torch.int16).view(torch.bfloat16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit by bit, any NaN equal to any."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(((a.view(kind) == b.view(kind)) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("wanted", [torch.float32, torch.float16])
def test_every_bfloat16_casts_as_in_torch(wanted):
    x = all_patterns()
    out = torch.empty(x.numel(), dtype=wanted)
    _cast_kernel[(1,)](x, out, N=x.numel())
    assert same_bits(out, x.to(wanted))


@pytest.mark.parametrize("given", [torch.float32, torch.float16])
def test_casts_to_bfloat16_round_to_nearest_even(given):
    # Every upper half with lower halves around a tie, beyond random ones; infinity, NaN and subnormals among them.
    upper = torch.arange(65536, dtype=torch.int64)
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] * 65536 + lower).flatten()
    bits = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
    x = bits.view(torch.float32) if given == torch.float32 else upper.sub(32768).to(torch.int16).view(torch.float16)
    x = x[: 1 << (x.numel().bit_length() - 1)] if given == torch.float16 else x[torch.randperm(x.numel())[: 1 << 18]]
    out = torch.empty(x.numel(), dtype=torch.bfloat16)
    _cast_kernel[(1,)](x, out, N=x.numel())
    assert same_bits(out, x.to(torch.bfloat16))


def test_float32_casts_to_float16_as_in_torch():
    x = torch.cat([torch.randn(8192) * 10.0 ** torch.randint(-8, 6, (8192,)), torch.full((8192,), 65520.0)])
    out = torch.empty(x.numel(), dtype=torch.float16)
    _cast_kernel[(1,)](x, out, N=x.numel())
    assert same_bits(out, x.half())


def test_widening_and_narrowing_are_inverse():
    bits = np.arange(65536, dtype=np.uint16)
    numbers = ~np.isnan(widen(bits))
    assert np.array_equal(narrow(widen(bits))[numbers], bits[numbers])
    assert np.isnan(widen(narrow(widen(bits))[~numbers])).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_arithmetic_equals_torch(dtype):
    size = 4096
    x, y = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    sums, products, larger, negative, chosen = (torch.empty(size, dtype=dtype) for _ in range(5))
    less = torch.empty(size, dtype=torch.bool)
    _arithmetic_kernel[(1,)](x, y, sums, products, less, larger, negative, chosen, N=size)
    assert torch.equal(sums, x + y)
    assert torch.equal(products, x * y)
    assert torch.equal(less, x < y)
    assert torch.equal(larger, torch.maximum(x, y))
    assert torch.equal(negative, -x.abs())
    assert torch.equal(chosen, torch.minimum(x, y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reductions_equal_torch(dtype):
    rows, size = 8, 32
    x = torch.randn(rows, size).to(dtype)
    total, top, running = torch.empty(rows, dtype=dtype), torch.empty(rows, dtype=dtype), torch.empty_like(x)
    place = torch.empty(rows, dtype=torch.int32)
    _reduce_kernel[(1,)](x, total, top, place, running, ROWS=rows, N=size)
    assert torch.equal(top, x.amax(1))
    assert torch.equal(place.long(), x.argmax(1))
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 0.0}
    torch.testing.assert_close(total.double(), x.double().sum(1), **tolerance)
    torch.testing.assert_close(running.double(), x.double().cumsum(1), **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_is_exact_where_float32_is(dtype):
    # Small integers: every product and every sum is exact in float32.
    a, b = (torch.randint(-8, 9, (32, 32)).to(dtype) for _ in range(2))
    out = torch.empty(32, 32)
    _dot_kernel[(1,)](a, b, out, N=32, PRECISION="ieee")
    assert torch.equal(out, a.float() @ b.float())


def test_a_dot_without_ieee_is_refused():
    a = torch.ones(16, 16)
    with pytest.raises(KernelFault, match="input_precision"):
        _dot_kernel[(1,)](a, a, torch.empty(16, 16), N=16, PRECISION="tf32")


@pytest.mark.parametrize("shift", [1, -1])
def test_an_access_outside_its_tensor_names_the_kernel(shift):
    # Both neighbours are arguments too: the pointer's own tensor counts, not just any.
    buffer = torch.zeros(3 * BLOCK)
    with pytest.raises(KernelFault, match=r"_shifted_copy_kernel.*loads out of bounds of x "):
        _shifted_copy_kernel[(1,)](buffer[BLOCK : 2 * BLOCK], buffer[: 3 * BLOCK], BLOCK, shift, N=BLOCK)
    with pytest.raises(KernelFault, match=r"_shifted_copy_kernel.*stores out of bounds of out "):
        _shifted_copy_kernel[(1,)](buffer, buffer[: BLOCK - 1], BLOCK, 0, N=BLOCK)
    with pytest.raises(KernelFault, match="out of bounds"):
        _shifted_copy_kernel[(1,)](buffer[:0], torch.empty(BLOCK), BLOCK, 0, N=BLOCK)


def test_masked_lanes_and_whole_tensors_are_in_bounds():
    x, out = torch.randn(BLOCK + 1), torch.empty(BLOCK + 1)
    _shifted_copy_kernel[(2,)](x, out, BLOCK + 1, 0, N=BLOCK)
    assert torch.equal(out, x)


def test_the_gap_between_rows_of_a_view_is_out_of_bounds():
    x = torch.zeros(4, 2 * BLOCK)[:, :BLOCK]
    with pytest.raises(KernelFault, match="4 pieces"):
        _shifted_copy_kernel[(1,)](x, torch.empty(2 * BLOCK), 2 * BLOCK, 0, N=2 * BLOCK)


def test_an_allowed_tensor_may_be_reached():
    buffer = torch.arange(2.0 * BLOCK)
    out = torch.empty(BLOCK)
    with allowed(buffer):
        _shifted_copy_kernel[(1,)](buffer[:BLOCK], out, BLOCK, BLOCK, N=BLOCK)
    assert torch.equal(out, buffer[BLOCK:])


def test_every_matrix_of_a_stack_is_in_bounds_and_no_gap():
    weights = list(torch.randn(3, 2 * BLOCK)[:, :BLOCK].unbind())
    stacked = stack(weights)
    out = torch.empty(BLOCK)
    for expert in range(3):
        _expert_kernel[(1,)](stacked.first, out, stacked.stride, expert, N=BLOCK)
        assert torch.equal(out, weights[expert])
    for wrong, stride in ((3, stacked.stride), (1, stacked.stride - 1)):
        with pytest.raises(KernelFault, match="weight"):
            _expert_kernel[(1,)](stacked.first, out, stride, wrong, N=BLOCK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_lanes_without_other_hold_garbage(dtype):
    x, out = torch.zeros(BLOCK, dtype=dtype), torch.empty(BLOCK, dtype=dtype)
    _no_other_kernel[(1,)](x, out, 3, N=BLOCK)
    assert (out[:3] == 0).all()
    assert (out[3:] > 2**29).all() if dtype == torch.int32 else out[3:].isnan().all()


def test_an_unwritten_integer_is_garbage():
    assert torch.empty(4, dtype=torch.int32).min() > 2**29
    assert torch.zeros(1).new_empty(3, dtype=torch.int64).min() > 2**61


@pytest.mark.parametrize("order", ["forward", "reversed", "random"])
def test_programs_run_in_the_order_asked_for(order):
    grid = (5, 3)
    out, counter = torch.empty(15, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with program_order(order):
        _order_kernel[grid](out, counter)
    expected = list(range(15))
    assert sorted(out.tolist()) == expected
    assert (out.tolist() == expected) == (order == "forward")
    assert (out.tolist() == expected[::-1]) == (order == "reversed")


def test_chosen_programs_run_alone_in_a_grid_of_any_size():
    out, counter = torch.full((6,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with only_programs(lambda kernel, grid: Chosen((2, 3), [5, 1]) if kernel == "_order_kernel" else None):
        _order_kernel[(1, 1)](out, counter)
        _same_place_kernel[(3,)](counter)
    assert out.tolist() == [-1, 1, -1, -1, -1, 0]
    assert counter.item() == 2


def test_int32_overflow_is_found():
    _multiply_kernel[(1,)](torch.empty(1, dtype=torch.int32), 2**15, 2**15)
    with pytest.raises(KernelFault, match=r"_multiply_kernel: int32 multiply overflows"):
        _multiply_kernel[(1,)](torch.empty(1, dtype=torch.int32), 2**16, 2**15)


def test_races_are_found():
    out = torch.zeros(BLOCK, dtype=torch.int32)
    _same_place_kernel[(2,)](out)  # only inside race_check
    with race_check():
        with pytest.raises(KernelFault, match="writes of out what another one writes"):
            _same_place_kernel[(2,)](out)
        with pytest.raises(KernelFault, match="disagree"):
            _lanes_kernel[(1,)](out, N=BLOCK)
        with pytest.raises(KernelFault, match="what another one"):
            _neighbour_kernel[(BLOCK,)](torch.zeros(BLOCK), N=BLOCK)
        with pytest.raises(KernelFault, match="without a barrier"):
            _read_back_kernel[(1,)](torch.zeros(1), torch.zeros(1), BARRIER=False)
        _read_back_kernel[(1,)](torch.zeros(1), torch.zeros(1), BARRIER=True)
        _same_place_kernel[(1,)](out)


def test_traffic_counts_what_masks_let_through():
    x, out = torch.randn(BLOCK + 1).bfloat16(), torch.empty(BLOCK + 1)
    with traffic() as launches:
        _shifted_copy_kernel[(2,)](x, out, BLOCK + 1, 0, N=BLOCK)
        counts = torch.zeros(2, dtype=torch.int64)
        _add_atomically_kernel[(1,)](torch.zeros(4, dtype=torch.int32), counts, N=4)
    copy, add = launches
    assert copy.kernel == "_shifted_copy_kernel"
    assert copy.loaded == {"x": BLOCK + 1}
    assert copy.stored == {"out": BLOCK + 1}
    assert (copy.bytes_read, copy.bytes_written) == (2 * (BLOCK + 1), 4 * (BLOCK + 1))
    assert copy.declared is None
    assert add.loaded == {"ids": 4, "counts": 4}
    assert add.stored == {"counts": 4}
    assert (add.bytes_read, add.bytes_written) == (16 + 32, 32)
    assert counts.tolist() == [4, 0]


def test_traffic_holds_the_declared_cost_of_launchers():
    with traffic() as launches:
        gather_rows(torch.randn(3, 7), torch.tensor([0, 2], dtype=torch.int32), 1)
    assert [launch.kernel for launch in launches] == ["_gather_rows_kernel"]
    assert launches[0].declared is not None
    assert launches[0].declared.bytes_written == 2 * 7 * 4


def test_the_language_is_replaced_once_a_launch_and_is_itself_again_afterwards(monkeypatch):
    replaced, replace = [], interpreter._patch_lang_core
    monkeypatch.setattr(interpreter, "_patch_lang_core", lambda *which: (replaced.append(which[0]), replace(*which)))
    before, out = dict(vars(tl)), torch.empty(3)
    for launches in (1, 2):
        _calls_kernel[(3,)](torch.arange(3.0), out)
        assert out.tolist() == [0.0, 4.0, 8.0]
        assert replaced == [tl] * launches
        assert vars(tl) == before
