"""The key "kernels" under the engine: to train on the Triton kernels, interpreted, is to train on the twins."""

import pytest
import torch
from ds_nets import PLAIN, Net, batch, config, engine_of, init_distributed, local_state, whole_state

from xmoe.kernels.launch import counting
from xmoe.testing import run_ranks

pytestmark = pytest.mark.dist


def _train(kernels, stage):
    init_distributed()
    net = Net(ep_size=2, **PLAIN)
    net.load_state_dict(local_state(whole_state(), net))
    engine = engine_of(net, ds=config(stage=stage, kind="SGD", lr=0.1, xmoe={"kernels": kernels}))
    losses = []
    with counting() as launches:
        for step in range(2):
            loss = engine(*batch(step))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    # The gradients of an expert are views of all experts' at once: they must end in the parameters all the same.
    weights = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    return losses, weights, dict(launches)


@pytest.mark.parametrize("stage", [0, 2])
def test_training_on_the_kernels_equals_training_on_the_twins(stage):
    for (expected, weights, none), (found, others, launches) in zip(
        run_ranks(2, _train, "torch", stage), run_ranks(2, _train, "triton", stage), strict=True
    ):
        assert not none
        # Two layers and two forwards, each with a first and a second product.
        assert launches["grouped_forward_activated"] == launches["grouped_forward"] == 4
        assert found == pytest.approx(expected, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(others[name], weight, rtol=1e-4, atol=1e-6, msg=name)
