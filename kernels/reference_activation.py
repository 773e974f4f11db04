"""PyTorch twins of the activation kernels: ``hidden = weight * act(up)``, or ``weight * silu(gate) * up``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from .dtypes import accumulator_dtype

aten = torch.ops.aten

Activation = Literal["swiglu", "gelu", "gelu_tanh", "relu"]
Scratch = Callable[[str], Tensor]


def activation_forward(up_MF: Tensor, gate_MF: Tensor | None, weights_M: Tensor, activation: Activation) -> Tensor:
    """``hidden[m] = weights[m] * act(up[m])``, for swiglu ``weights[m] * silu(gate[m]) * up[m]``; in up's dtype.

    Example: relu, up (-1, 2), weight 0.5 gives (0, 1).
    """
    out = torch.empty_like(up_MF, dtype=accumulator_dtype(up_MF.dtype))
    return activate(up_MF, gate_MF, activation, out=out).mul_(weights_M[:, None]).to(up_MF.dtype)


def activation_backward(
    d_hidden_MF: Tensor, up_MF: Tensor, gate_MF: Tensor | None, weights_M: Tensor, activation: Activation
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Of :func:`activation_forward`: hidden itself, d_up and d_gate (or None) in up's dtype, and ``d_weights_M``.

    The activation is computed again from the pre-activations. ``d_weights[m] = sum over f of d_hidden * act``, in at
    least float32.

    Example: relu, d_hidden (1, 1), up (-1, 2), weight 0.5 gives hidden (0, 1), d_up (0, 0.5), d_weight 2.
    """
    dtype = accumulator_dtype(up_MF.dtype)
    hidden, d_up, d_gate, d_weights_M = activate_backward(
        d_hidden_MF.to(dtype, copy=True),
        up_MF,
        gate_MF,
        weights_M[:, None],
        activation,
        scratch=lambda name: torch.empty_like(up_MF, dtype=dtype),
    )
    d_gate = d_gate.to(up_MF.dtype) if d_gate is not None else None
    return hidden.to(up_MF.dtype), d_up.to(up_MF.dtype), d_gate, d_weights_M


def _approximation(activation: Activation) -> str:
    return "tanh" if activation == "gelu_tanh" else "none"


def activate(up: Tensor, gate: Tensor | None, activation: Activation, *, out: Tensor) -> Tensor:
    """Post-activation without weights, in ``out``, which is of the accumulator's dtype."""
    up = up.to(out.dtype)
    if gate is not None:
        return aten.silu.out(gate.to(out.dtype), out=out).mul_(up)
    if activation == "relu":
        return torch.clamp(up, min=0, out=out)
    return aten.gelu.out(up, approximate=_approximation(activation), out=out)


def activate_backward(
    d_hidden: Tensor,
    up: Tensor,
    gate: Tensor | None,
    weight_N1: Tensor,
    activation: Activation,
    *,
    scratch: Scratch,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """From the gradient of ``hidden = weight * act``: hidden itself, d_up, d_gate (or None) and d_weight ``[n]``.

    All in the accumulator's dtype and in the buffers that ``scratch`` gives by name; ``d_hidden``, of that dtype, is
    overwritten.
    """
    up = up.to(d_hidden.dtype)
    product = scratch("product")
    if gate is None:
        hidden = activate(up, None, activation, out=scratch("hidden"))
        d_weight = torch.mul(d_hidden, hidden, out=product).sum(1)
        d_hidden.mul_(weight_N1)
        if activation == "relu":
            d_hidden.masked_fill_(up <= 0, 0.0)
        else:
            approximate = _approximation(activation)
            aten.gelu_backward.grad_input(d_hidden, up, approximate=approximate, grad_input=d_hidden)
        return hidden.mul_(weight_N1), d_hidden, None, d_weight
    gate = gate.to(d_hidden.dtype)
    sigmoid = torch.sigmoid(gate, out=scratch("sigmoid"))
    silu = torch.mul(gate, sigmoid, out=scratch("silu"))
    hidden = torch.mul(silu, up, out=scratch("hidden"))
    d_weight = torch.mul(d_hidden, hidden, out=product).sum(1)
    d_hidden.mul_(weight_N1)
    # silu' = sigmoid + silu * (1 - sigmoid): one exponential for silu and its derivative.
    slope = torch.addcmul(silu, sigmoid, torch.sub(1.0, silu, out=product), out=sigmoid)
    d_gate = torch.mul(d_hidden, up, out=product).mul_(slope)
    return hidden.mul_(weight_N1), silu.mul_(d_hidden), d_gate, d_weight
