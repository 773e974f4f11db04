"""Settings that only constructors were given: ranks that build a layer otherwise are told so, all of them alike."""

import pytest
import torch
import torch.distributed as dist
from ds_nets import PLAIN, Net, batch, engine_of, mlp
from torch import nn

from xmoe.integrations.deepspeed import MoE, init_distributed
from xmoe.integrations.deepspeed.alike import check_alike
from xmoe.testing import run_ranks

pytestmark = pytest.mark.dist

DIFFERENT = [
    ("overlap_chunks", 1, 2),
    ("dispatch", "flat", "gpu"),
    ("ranks_per_node", None, 1),
    ("k", 2, 3),
    ("capacity_factor", 1.0, 1.5),
    ("drop_tokens", True, False),
    ("use_rts", True, False),
    ("noisy_gate_policy", None, "RSample"),
    ("score_function", "softmax", "sigmoid"),
    ("sequence_shard", False, True),
    ("correction_bias", False, True),
    ("num_experts", 8, 4),
    ("ep_size", 1, 2),
]
# Each rank's own affair.
FREE = [
    ("kernels", "auto", "torch"),
    ("stage_times", False, True),
    ("self_row_guard", "on", "off"),
    ("collective_timeout_s", 20.0, 30.0),
]


def _refused():
    init_distributed()
    rank = dist.get_rank()
    for key, *values in DIFFERENT:
        net = Net(ep_size=2, **PLAIN)
        options = {"num_experts": 8, "ep_size": 2, "k": 2, **PLAIN, key: values[rank]}
        net.b = MoE(net.first.in_features, mlp(), **options)
        with pytest.raises(ValueError, match="layer 'b'") as error:
            engine_of(net)
        said = [None, None]
        dist.all_gather_object(said, str(error.value))
        assert said[0] == said[1]
        found = f"layer 'b' has {key}={values[0]!r} on rank 0 and {key}={values[1]!r} on rank 1: every rank"
        assert said[0].startswith(found), said[0]


def test_a_layer_built_otherwise_on_one_rank_is_named():
    run_ranks(2, _refused)


def _taken():
    init_distributed()
    rank = dist.get_rank()
    # In the JSON for all, and in the constructor of one: the same after all.
    options = {"overlap_chunks": 2} if rank == 0 else {}
    net = Net(ep_size=2, **PLAIN, **options, **{key: values[rank] for key, *values in FREE})
    engine = engine_of(net, xmoe={"overlap_chunks": 2})
    engine.backward(engine(*batch(0)))
    engine.step()
    assert all(torch.isfinite(p).all() for p in net.parameters())
    # Stages of a pipeline have layers of other names.
    shared = nn.Linear(8, 8) if rank else None
    check_alike([(f"{rank}.moe", MoE(8, mlp(), 4, 2, 1 + rank, shared_mlp=shared))])
    with pytest.raises(ValueError, match=r"layer '0\.moe' has k=1 on rank 0 and k=2 on rank 1"):
        check_alike([("0.moe", MoE(8, mlp(), 4, 2, 1 + rank, shared_mlp=shared))])


def test_what_is_a_ranks_own_may_differ():
    run_ranks(2, _taken)
