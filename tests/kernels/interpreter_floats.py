"""bfloat16 as a GPU computes it, in Triton's interpreter, which keeps it as uint16 and computes with those integers.

Every operation on bfloat16 widens to float32, computes, and rounds to nearest even; casts and stores round likewise.
float16 needs nothing: numpy's is IEEE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle
Patches = list[tuple[Any, str, Any]]


class KernelFault(AssertionError):
    """What a GPU would have done wrong in silence."""


def widen(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16 kept as uint16; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """bfloat16, as uint16, nearest to ``values``; ties go to even, NaN stays NaN."""
    values = np.asarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x0040
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


def is_bfloat16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def numbers(handle: Any) -> np.ndarray:
    """The handle's values as numpy computes with them."""
    return widen(handle.data) if is_bfloat16(handle) else handle.data


def _elementwise(original: Callable[..., Any]) -> Callable[..., Any]:
    """Unary, binary and ternary operations: ``original(builder, *operands, op)``."""

    def compute(builder: Any, *operands_and_op: Any) -> Any:
        *operands, op = operands_and_op
        if not is_bfloat16(operands[-1]) or op is np.where:  # a choice moves bits
            return original(builder, *operands_and_op)
        found = op(*[numbers(operand) for operand in operands])
        return Handle(found, tl.int1) if found.dtype == np.bool_ else Handle(narrow(found), tl.bfloat16)

    return compute


def _cast(builder: Any, source: Any, wanted: Any) -> Any:
    values = numbers(source)
    if wanted.scalar == tl.bfloat16:
        return Handle(narrow(values.astype(np.float32)), tl.bfloat16)
    return Handle(values.astype(interpreter._get_np_dtype(wanted)), wanted.scalar)


def _cast_float(original: Callable[..., Any]) -> Callable[..., Any]:
    eight_bits = 8

    def cast(builder: Any, source: Any, wanted: Any, rounding: Any) -> Any:
        widths = (source.dtype.scalar.primitive_bitwidth, wanted.scalar.primitive_bitwidth)
        if min(widths) <= eight_bits or rounding not in (None, ir.ROUNDING_MODE.RTNE):
            return original(builder, source, wanted, rounding)
        return _cast(builder, source, wanted)

    return cast


def _fma(original: Callable[..., Any]) -> Callable[..., Any]:
    def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
        if not is_bfloat16(z):
            return original(builder, x, y, z)
        x, y, z = (numbers(operand).astype(np.float64) for operand in (x, y, z))
        return Handle(narrow(x * y + z), tl.bfloat16)

    return fma


def _dot(builder: Any, a: Any, b: Any, accumulator: Any, input_precision: Any, max_imprecise: Any) -> Any:
    """Products of 16-bit operands are exact in float32; sums are float32's, as in the hardware's."""
    if input_precision != ir.INPUT_PRECISION.IEEE:
        raise KernelFault(f'tl.dot says input_precision {input_precision}: some GPUs round float32; say "ieee"')
    dtype = accumulator.dtype.scalar
    wide = np.float64 if dtype == tl.float64 else np.int32 if dtype == tl.int32 else np.float32
    found = numbers(a).astype(wide) @ numbers(b).astype(wide) + numbers(accumulator).astype(wide)
    return Handle(narrow(found) if dtype == tl.bfloat16 else found.astype(accumulator.data.dtype), dtype)


def _over_axis(original: Callable[..., Any]) -> Callable[..., Any]:
    """Reductions and scans of one tensor: ``original(self, input, ...)`` gives one tensor or several."""

    def reduce(self: Any, input: Any, *more: Any, **options: Any) -> Any:
        first = input[0] if isinstance(input, tuple) else input
        if not is_bfloat16(first.handle):
            return original(self, input, *more, **options)
        wide = original(self, self.to_tensor(numbers(first.handle), tl.float32), *more, **options)
        found = [_narrowed(one) for one in wide] if isinstance(wide, tuple | list) else _narrowed(wide)
        return tuple(found) if isinstance(wide, tuple) else found

    return reduce


def _narrowed(found: Any) -> Any:
    if found.dtype != tl.float32:  # the index of an argmax
        return found
    shape = found.type.shape if found.type.is_block() else []
    kind = tl.block_type(tl.bfloat16, shape) if shape else tl.bfloat16
    return tl.core.tensor(Handle(narrow(found.handle.data), tl.bfloat16), kind)


def patches() -> Patches:
    """(owner, attribute, replacement) of everything that touches bfloat16."""
    found: Patches = [
        (Builder, name, _elementwise(getattr(Builder, name))) for name in ("unary_op", "binary_op", "ternary_op")
    ]
    found += [
        (Builder, "cast_impl", _cast),
        (Builder, "create_fp_to_fp", _cast_float(Builder.create_fp_to_fp)),
        (Builder, "create_fma", _fma(Builder.create_fma)),
        (Builder, "create_dot", _dot),
    ]
    for owner, names in ((interpreter.ReduceOps, ("sum", "min_max")), (interpreter.ScanOps, ("cumsum", "cumprod"))):
        found += [(owner, name, _over_axis(getattr(owner, name))) for name in names]
    return found
