"""Activations and their slopes inside kernels, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(up, gate, ACTIVATION: tl.constexpr):
    """``silu(gate) * up`` for swiglu, else ``act(up)``, of float32 tensors; gate is None without swiglu.

    Example: relu of (-1, 2) is (0, 2).
    """
    value, _, _ = activate_with_slopes(up, gate, ACTIVATION)
    return value


@triton.jit
def activate_with_slopes(up, gate, ACTIVATION: tl.constexpr):
    """The activation and its derivatives by up and by gate (None without swiglu), of float32 tensors.

    Example: relu of (-1, 2) gives (0, 2), (0, 1), None.
    """
    if ACTIVATION == "swiglu":
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        # silu' = sigmoid + silu * (1 - sigmoid): one exponential for silu and its slope.
        return silu * up, silu, up * (sigmoid + silu * (1.0 - sigmoid))
    elif ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(up * 0.7071067811865476))
        return up * cdf, cdf + up * (0.3989422804014327 * tl.exp(-0.5 * up * up)), None
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) = sigmoid(2 z) with z = sqrt(2 / pi) * (x + 0.044715 x^3).
        square = up * up
        cdf = tl.sigmoid(1.5957691216057308 * up * (1.0 + 0.044715 * square))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * square)
        return up * cdf, cdf + up * cdf * (1.0 - cdf) * slope, None
    else:
        tl.static_assert(ACTIVATION == "relu", "activation must be swiglu, gelu, gelu_tanh or relu")
        # Comparisons that a NaN fails, so that it stays one.
        return tl.where(up <= 0.0, 0.0, up), tl.where(up <= 0.0, 0.0, 1.0), None
