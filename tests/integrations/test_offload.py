"""The optimizer's states and steps on the host: the same losses and norms as without offload."""

import pytest
import torch
from ds_nets import PLAIN, Net, config, engine_of, init_distributed, local_state, train, whole_state

from xmoe import ConfigError
from xmoe.integrations.deepspeed import initialize
from xmoe.testing import run_ranks

pytestmark = pytest.mark.dist

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def _run(stage, *, bf16, offload, accumulation):
    """Losses and norms of three steps of Adam, clipped, from one state."""
    net = Net(ep_size=2, **PLAIN)
    net.load_state_dict(local_state(whole_state(), net))
    zero = {"stage": stage, **(OFFLOAD if offload else {})}
    # "torch_adam", which config() sets, is torch's: DeepSpeedCPUAdam would have to be compiled here.
    engine = engine_of(net, ds=config(bf16=bf16, clip=0.5, accumulation=accumulation, zero_optimization=zero))
    assert engine.optimizer.cpu_offload is offload
    losses, norms = [], []
    for step in range(3):
        losses += train(engine, [step], dtype=torch.bfloat16 if bf16 else torch.float32)
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def _equal(stage, cases):
    init_distributed()
    for bf16, accumulation in cases:
        options = {"bf16": bf16, "accumulation": accumulation}
        losses, norms = _run(stage, offload=True, **options)
        expected, expected_norms = _run(stage, offload=False, **options)
        assert losses == pytest.approx(expected, rel=1e-5), options
        assert norms == pytest.approx(expected_norms, rel=1e-5), options


@pytest.mark.parametrize(("stage", "cases"), [(1, [(False, 1), (True, 2)]), (2, [(False, 2), (True, 1)])])
def test_losses_and_norms_equal_those_without_offload(stage, cases):
    """fp32 and bf16, with accumulation and without."""
    run_ranks(2, _equal, stage, cases)


def _refused():
    ds = config(zero_optimization={"stage": 0, **OFFLOAD})
    with pytest.raises(ConfigError, match=r"zero_optimization\.offload_optimizer\.device.*'cpu'.*stage to 1 or 2"):
        initialize(model=Net(**PLAIN), config=ds)


def test_offload_without_zero_is_refused():
    run_ranks(2, _refused)
