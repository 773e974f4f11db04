"""Activation kernels: autograd in float64 checks the twins, and both check the kernels."""

import pytest
import torch
from torch.nn import functional

from xmoe.kernels import reference, triton_kernels
from xmoe.testing import assert_close

BACKENDS = [reference, triton_kernels]
ACTIVATIONS = ["swiglu", "gelu", "gelu_tanh", "relu"]
SIZES = {"no rows": (0, 20), "one": (1, 1), "off every block": (7, 63), "many rows": (21, 7)}
NAMES = ("hidden", "d_up", "d_gate", "d_weights")


def formula(up, gate, weights, activation):
    if activation == "swiglu":
        value = functional.silu(gate) * up
    elif activation == "relu":
        value = torch.relu(up)
    else:
        value = functional.gelu(up, approximate="tanh" if activation == "gelu_tanh" else "none")
    return weights[:, None] * value


def make_case(num_rows, width, activation, dtype, *, scale=1.5):
    up = (scale * torch.randn(num_rows, width)).to(dtype)
    gate = (scale * torch.randn(num_rows, width)).to(dtype) if activation == "swiglu" else None
    return torch.randn(num_rows, width).to(dtype), up, gate, torch.rand(num_rows) + 0.1


def oracle(d_hidden, up, gate, weights, activation):
    """hidden, d_up, d_gate and d_weights in float64."""
    leaves = [x.double().clone().requires_grad_() if x is not None else None for x in (up, gate, weights)]
    hidden = formula(*leaves, activation)
    grads = iter(torch.autograd.grad(hidden, [leaf for leaf in leaves if leaf is not None], d_hidden.double()))
    return [hidden, *(next(grads) if leaf is not None else None for leaf in leaves)]


def check(found, expected, up, what):
    for name, actual, wanted in zip(NAMES, found, expected, strict=True):
        if wanted is None:
            assert actual is None, f"{what} {name}"
            continue
        assert actual.dtype == (torch.float32 if name == "d_weights" else up.dtype)
        assert_close(actual, wanted, what=f"{what} {name}")


CASES = [
    *((name, torch.float32) for name in SIZES),
    *(("off every block", dtype) for dtype in (torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("size", "dtype"), CASES)
def test_activation_equals_autograd(size, dtype, activation):
    d_hidden, up, gate, weights = case = make_case(*SIZES[size], activation, dtype)
    expected = oracle(*case, activation)
    for backend in BACKENDS:
        forward = backend.activation_forward(up, gate, weights, activation)
        backward = backend.activation_backward(d_hidden, up, gate, weights, activation)
        check(backward, expected, up, backend.__name__)
        assert_close(forward, expected[0], what=f"{backend.__name__} forward")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_values_stay_finite_and_right(activation):
    values = torch.tensor([0.0, 1e-20, 1.0, 9.0, 30.0, 100.0, 1e4])
    up, gate = torch.meshgrid(torch.cat([values, -values]), torch.cat([values, -values]), indexing="ij")
    up, gate = up.contiguous(), gate.contiguous() if activation == "swiglu" else None
    weights = torch.ones(len(up))
    expected = oracle(torch.ones_like(up), up, gate, weights, activation)
    for backend in BACKENDS:
        found = backend.activation_backward(torch.ones_like(up), up, gate, weights, activation)
        for name, actual, wanted in zip(NAMES, found, expected, strict=True):
            if wanted is not None:
                torch.testing.assert_close(
                    actual.double(), wanted, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
                )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_nan_stays_in_its_row(activation):
    d_hidden, up, gate, weights = make_case(3, 20, activation, torch.float32)
    up[1, 4] = float("nan")
    for backend in BACKENDS:
        hidden, d_up, _, d_weights = backend.activation_backward(d_hidden, up, gate, weights, activation)
        assert torch.isnan(hidden).nonzero().tolist() == [[1, 4]], backend.__name__
        assert torch.isnan(d_weights).tolist() == [False, True, False]
        assert not torch.isnan(d_up[[0, 2]]).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "gelu"}, '"gelu" takes no gate_MF'),
        ({"gate": None}, '"swiglu" takes a gate_MF'),
        ({"gate": torch.ones(3, 4)}, r"\(3, 4\).*\(3, 5\)"),
        ({"gate": torch.ones(3, 5).half()}, "float16.*float32"),
        ({"weights": torch.ones(4)}, r"3 rows.*\(4,\)"),
        ({"weights": torch.ones(3).half()}, "float16"),
        ({"up": torch.ones(3)}, r"up_MF must be .*\(3,\)"),
        ({"d_hidden": torch.ones(2, 5)}, r"\(2, 5\).*\(3, 5\)"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    good = {"d_hidden": torch.ones(3, 5), "up": torch.ones(3, 5), "gate": torch.ones(3, 5), "weights": torch.ones(3)}
    arguments = list({**good, "activation": "swiglu", **change}.values())
    with pytest.raises(ValueError, match=message):
        triton_kernels.activation_backward(*arguments)
    if "d_hidden" not in change:
        with pytest.raises(ValueError, match=message):
            triton_kernels.activation_forward(*arguments[1:])
