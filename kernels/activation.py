"""Activations of ragged rows with the routing weights applied, forward and backward, outside the GEMMs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation_math import activate, activate_with_slopes
from .launch import Cost, Launch, arch_of, launch
from .reference_activation import Activation
from .tuning import config_for


@triton.jit
def _activation_forward_kernel(up, gate, weights, hidden, width, ACTIVATION: tl.constexpr, BLOCK_F: tl.constexpr):
    """Program (m, j) writes block j of row m of hidden, ``weights[m]`` times the activation.

    Example: relu, up (-1, 2), weight 0.5 gives (0, 1).
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = columns < width
    places = row * width + columns
    up_values = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    gate_values = None
    if gate is not None:
        gate_values = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    value = activate(up_values, gate_values, ACTIVATION) * tl.load(weights + row)
    tl.store(hidden + places, value.to(hidden.dtype.element_ty), mask=inside)


def activation_forward(up_MF: Tensor, gate_MF: Tensor | None, weights_M: Tensor, activation: Activation) -> Tensor:
    """``hidden[m] = weights[m] * act(up[m])``, for swiglu ``weights[m] * silu(gate[m]) * up[m]``; in up's dtype."""
    num_rows, width = _check(up_MF, gate_MF, weights_M, activation)
    up_MF, gate_MF = up_MF.contiguous(), gate_MF.contiguous() if gate_MF is not None else None
    weights_M = weights_M.contiguous()
    hidden_MF = torch.empty_like(up_MF)
    config = config_for("activation_forward", arch=arch_of(up_MF), dtype=up_MF.dtype, width=width, rows=num_rows)
    blocks = triton.cdiv(width, config.blocks["BLOCK_F"])
    row_bytes = width * up_MF.element_size()
    launch(
        Launch(
            op="activation_forward",
            kernel=_activation_forward_kernel,
            grid=(num_rows, blocks),
            arguments=dict(
                up=up_MF, gate=gate_MF, weights=weights_M, hidden=hidden_MF, width=width, ACTIVATION=activation
            ),
            config=config,
            cost=Cost(
                bytes_read=num_rows * ((1 if gate_MF is None else 2) * row_bytes + 4 * blocks),
                bytes_written=num_rows * row_bytes,
            ),
        )
    )
    return hidden_MF


@triton.jit
def _activation_backward_kernel(
    d_hidden,
    up,
    gate,
    weights,
    hidden,
    d_up,
    d_gate,
    d_weights,
    width,
    ACTIVATION: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Program m computes row m's activation again, and from it hidden, the gradients and the weight's gradient.

    Example: relu, d_hidden (1, 1), up (-1, 2), weight 0.5 gives hidden (0, 1), d_up (0, 0.5), d_weight 2.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    weight = tl.load(weights + row)
    total = tl.zeros((BLOCK_F,), dtype=tl.float32)
    for start in range(0, width, BLOCK_F):
        columns = start + tl.arange(0, BLOCK_F)
        inside = columns < width
        places = row * width + columns
        up_values = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
        gate_values = None
        if gate is not None:
            gate_values = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
        value, up_slope, gate_slope = activate_with_slopes(up_values, gate_values, ACTIVATION)
        tl.store(hidden + places, (weight * value).to(hidden.dtype.element_ty), mask=inside)
        gradient = tl.load(d_hidden + places, mask=inside, other=0.0).to(tl.float32)
        total += gradient * value
        gradient *= weight
        tl.store(d_up + places, (gradient * up_slope).to(d_up.dtype.element_ty), mask=inside)
        if gate is not None:
            tl.store(d_gate + places, (gradient * gate_slope).to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_weights + row, tl.sum(total, axis=0))


def activation_backward(
    d_hidden_MF: Tensor, up_MF: Tensor, gate_MF: Tensor | None, weights_M: Tensor, activation: Activation
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Of :func:`activation_forward`: hidden itself, d_up and d_gate (or None) in up's dtype, and ``d_weights_M``.

    The activation is computed again from the pre-activations. ``d_weights[m] = sum over f of d_hidden * act``,
    float32.
    """
    num_rows, width = _check(up_MF, gate_MF, weights_M, activation)
    if d_hidden_MF.shape != up_MF.shape or d_hidden_MF.dtype != up_MF.dtype:
        raise ValueError(
            f"d_hidden_MF ({tuple(d_hidden_MF.shape)}, {d_hidden_MF.dtype}) must be of up_MF's shape and dtype "
            f"({tuple(up_MF.shape)}, {up_MF.dtype})"
        )
    d_hidden_MF, up_MF, weights_M = d_hidden_MF.contiguous(), up_MF.contiguous(), weights_M.contiguous()
    gate_MF = gate_MF.contiguous() if gate_MF is not None else None
    hidden_MF, d_up_MF = torch.empty_like(up_MF), torch.empty_like(up_MF)
    d_gate_MF = torch.empty_like(up_MF) if gate_MF is not None else None
    d_weights_M = up_MF.new_empty((num_rows,), dtype=torch.float32)
    config = config_for("activation_backward", arch=arch_of(up_MF), dtype=up_MF.dtype, width=width, rows=num_rows)
    moved = 2 if gate_MF is None else 3  # rows read, and as many written
    row_bytes = width * up_MF.element_size()
    launch(
        Launch(
            op="activation_backward",
            kernel=_activation_backward_kernel,
            grid=(num_rows,),
            arguments=dict(
                d_hidden=d_hidden_MF,
                up=up_MF,
                gate=gate_MF,
                weights=weights_M,
                hidden=hidden_MF,
                d_up=d_up_MF,
                d_gate=d_gate_MF,
                d_weights=d_weights_M,
                width=width,
                ACTIVATION=activation,
            ),
            config=config,
            cost=Cost(
                bytes_read=num_rows * (moved * row_bytes + 4),
                bytes_written=num_rows * (moved * row_bytes + 4),
            ),
        )
    )
    return hidden_MF, d_up_MF, d_gate_MF, d_weights_M


def _check(up_MF: Tensor, gate_MF: Tensor | None, weights_M: Tensor, activation: Activation) -> tuple[int, int]:
    """M and F. Raises ValueError naming what does not fit."""
    if up_MF.dim() != 2:
        raise ValueError(f"up_MF must be [rows, width], found shape {tuple(up_MF.shape)}")
    if (activation == "swiglu") != (gate_MF is not None):
        raise ValueError(f'activation "{activation}" takes {"a" if gate_MF is None else "no"} gate_MF')
    if gate_MF is not None and (gate_MF.shape != up_MF.shape or gate_MF.dtype != up_MF.dtype):
        raise ValueError(
            f"gate_MF ({tuple(gate_MF.shape)}, {gate_MF.dtype}) must be of up_MF's shape and dtype "
            f"({tuple(up_MF.shape)}, {up_MF.dtype})"
        )
    num_rows, width = up_MF.shape
    if weights_M.shape != (num_rows,) or weights_M.dtype != torch.float32:
        raise ValueError(
            f"weights_M must be float32 with one entry for each of {num_rows} rows, found {weights_M.dtype} "
            f"{tuple(weights_M.shape)}"
        )
    return num_rows, width
