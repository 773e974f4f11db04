"""The key "kernels" under the engine: to train on the Triton kernels, interpreted, is to train on the twins."""

import pytest
import torch
from ds_nets import PLAIN, Net, batch, config, engine_of, init_distributed, local_state, whole_state

from xmoe.kernels.launch import counting
from xmoe.testing import run_ranks

pytestmark = pytest.mark.dist


def _trained(kernels, stage):
    """Loss of a step, the weights after it, and the launches of each kernel."""
    net = Net(ep_size=2, num_experts=4, **PLAIN)
    net.load_state_dict(local_state(whole_state(4), net))
    engine = engine_of(net, ds=config(stage=stage, kind="SGD", lr=0.1, xmoe={"kernels": kernels}))
    with counting() as launches:
        loss = engine(*batch(0))
        engine.backward(loss)
        engine.step()
    # The gradients of an expert are views of all experts' at once: they must end in the parameters all the same.
    return float(loss.detach()), dict(net.named_parameters()), dict(launches)


def _compare(stage):
    init_distributed()
    expected, weights, none = _trained("torch", stage)
    found, others, launches = _trained("triton", stage)
    assert not none
    # Two layers, each with a first and a second product.
    assert launches["grouped_forward_activated"] == launches["grouped_forward"] == 2
    assert found == pytest.approx(expected, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("stage", [0, 2])
def test_training_on_the_kernels_equals_training_on_the_twins(stage):
    run_ranks(2, _compare, stage)
