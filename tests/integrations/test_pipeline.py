"""PipelineModule: stages with and without experts train as the unpiped model does, auxiliary losses included.

SGD at rate 1, so that a step shows the gradient.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from ds_nets import EXPERT_KEY, PLAIN, D, MoE, batch, config, gather_whole, init_distributed, mlp
from torch import nn

from xmoe import ConfigError
from xmoe.integrations.deepspeed import initialize
from xmoe.testing import run_ranks

pytestmark = pytest.mark.dist

AUX = 0.3
PARTS = 2  # micro-batches of a step
EP_SIZES = {"both": (2, 2), "sizes": (2, 1), "first": (2, None), "last": (None, 2)}


class Block(nn.Module):
    """A dense layer, then experts if ``ep_size`` says so; what a pipeline passes on is one tensor."""

    def __init__(self, ep_size=None, kind=MoE):
        super().__init__()
        self.dense = nn.Linear(D, D)
        self.moe = None if ep_size is None else kind(D, mlp(), 4, ep_size, 2, **PLAIN)

    def forward(self, x):
        h = self.dense(x)
        if self.moe is None:
            return x + h
        y, l_aux, _ = self.moe(h)
        return self.moe.carry_loss(x + y, AUX * l_aux)


def loss_of(out, y):
    return (out - y).float().square().mean()


def _whole(stages):
    """The unpiped model's parameters under global expert ids; every expert differs."""
    torch.manual_seed(5)
    net = nn.Sequential(*[Block(None if size is None else 1) for size in stages])
    return net, {key: torch.randn_like(value) * 0.4 for key, value in net.named_parameters()}


def _load(net, whole):
    state = {}
    for key, value in net.named_parameters():
        found = EXPERT_KEY.fullmatch(key)
        if found:
            layer = dict(net.named_modules())[key.split(".deepspeed_moe.")[0]]
            first = dist.get_rank() % layer.ep_size * layer.num_local_experts
            value.data.copy_(whole[f"{found[1]}{first + int(found[2])}{found[3]}"])
        else:
            value.data.copy_(whole[key])
    return state


def _unpiped(stages, clip=0.0, replicas=2):
    """Parameters after a step of the whole model in one process, in float64, and the norm of its gradient."""
    net, whole = _whole(stages)
    net.load_state_dict(whole)
    net.double()
    losses = []
    for part in range(PARTS):
        for place in range(replicas):
            x, y = (t.double() for t in batch(part, place))
            aux = []
            for block in net:
                h = block.dense(x)
                if block.moe is not None:
                    h, l_aux, _ = block.moe(h)
                    aux.append(l_aux)
                x = x + h
            losses.append((x - y).square().mean() + AUX * sum(aux))
    gradients = torch.autograd.grad(sum(losses) / len(losses), list(net.parameters()))
    norm = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
    factor = min(1.0, clip / norm) if clip else 1.0
    pairs = zip(whole.items(), gradients, strict=True)
    return {key: value.double() - factor * grad for (key, value), grad in pairs}, norm


def _engine(stages, *, interval=0, tensor_parallel=1, **options):
    init_distributed()
    layers = [LayerSpec(Block, size) for size in stages]
    replicas = dist.get_world_size() // 2 // tensor_parallel
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=tensor_parallel, num_dp=replicas)
    net = PipelineModule(
        layers,
        topology=topology if tensor_parallel > 1 else None,
        num_stages=2,
        loss_fn=loss_of,
        partition_method="uniform",
        activation_checkpoint_interval=interval,
    )
    _load(net, _whole(stages)[1])
    return net, initialize(model=net, config=config(**{"kind": "SGD", "accumulation": PARTS, **options}))[0]


def _parts(engine, step=0):
    place, dtype = engine.mpu.get_data_parallel_rank(), torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    return iter([[t.to(dtype) for t in batch(10 * step + part, place)] for part in range(PARTS)])


def _piped(stages, **options):
    """Parameters after the same step of the pipeline, by global name, and the norm it reports."""
    net, engine = _engine(stages, lr=1.0, **options)
    engine.train_batch(_parts(engine))
    return gather_whole(net), float(engine.get_global_grad_norm())


def _check(cases):
    init_distributed()
    for case in cases:
        options = {**case}
        stages = EP_SIZES[options.pop("stages")]
        replicas = 2 // options.get("tensor_parallel", 1)
        expected, norm = _unpiped(stages, options.get("clip", 0.0), replicas)
        found, found_norm = _piped(stages, **options)
        if options.get("bf16"):
            assert found_norm == pytest.approx(norm, rel=0.02), case
            continue
        assert found_norm == pytest.approx(norm, rel=1e-5), case
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            error = float((found[key].double() - value).abs().max())
            assert error < 1e-6, f"{case} {key}: {error}"


RECOMPUTED = {"stage": 0, "clip": 0.1, "interval": 1}
BF16 = [{"stage": 0, "bf16": True}, {"stage": 1, "bf16": True}]
CASES = {
    "both": [{"stage": 0}, {"stage": 1, "clip": 0.1}, BF16[1]],
    "sizes": [{"stage": 1}, RECOMPUTED, BF16[0]],
    "first": [{"stage": 1}, RECOMPUTED, *BF16],
    "last": [{"stage": 0}, {"stage": 1, "clip": 0.1}, *BF16],
}


@pytest.mark.parametrize("names", [("both", "sizes"), ("first", "last")], ids=["all stages", "one stage"])
def test_gradients_equal_the_unpiped_models(names):
    """Two stages of two ranks: experts on both, of two expert-parallel sizes, on the first alone, on the last alone.

    In fp32 with clipping and checkpointed activations; in bf16 the norm.
    """
    run_ranks(4, _check, [{"stages": name, **case} for name in names for case in CASES[name]], timeout_s=100)


def test_pipelines_of_tensor_parallel_ranks():
    """Two stages of two ranks that share their tokens, and hold different experts."""
    cases = [{"stages": "both", "stage": 0}, {"stages": "first", "stage": 1, "clip": 0.1}]
    run_ranks(4, _check, [{**case, "tensor_parallel": 2} for case in cases], timeout_s=100)


def _resumes(folder):
    for name, stage in (("first", 0), ("last", 1), ("sizes", 0)):
        options = {"stage": stage, "kind": "Adam"}
        net, engine = _engine(EP_SIZES[name], **options)
        engine.train_batch(_parts(engine))
        engine.save_checkpoint(f"{folder}/{name}", tag="t")
        dist.barrier()
        expected = [float(engine.train_batch(_parts(engine, step))) for step in (1, 2)]
        net, engine = _engine(EP_SIZES[name], **options)
        for parameter in net.parameters():
            parameter.data.zero_()
        engine.load_checkpoint(f"{folder}/{name}")
        assert [float(engine.train_batch(_parts(engine, step))) for step in (1, 2)] == expected, name
        with pytest.raises(ValueError, match=r"(stage 0|without a ZeRO|by a ZeRO)"):
            _engine(EP_SIZES[name], **{**options, "stage": 1 - stage})[1].load_checkpoint(f"{folder}/{name}")


def test_stages_without_experts_save_and_resume(tmp_path):
    """Every rank takes part in the checks of a checkpoint, and raises their error."""
    run_ranks(4, _resumes, str(tmp_path), timeout_s=100)


def _evaluates():
    _, engine = _engine((2, None), stage=1)
    engine.eval_batch(_parts(engine))
    before = [float(engine.eval_batch(_parts(engine))) for _ in range(2)]
    engine.train_batch(_parts(engine))
    assert before[0] == before[1]
    assert float(engine.eval_batch(_parts(engine))) != before[0]
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage.*pipelines train at ZeRO stage 0 or 1"):
        _engine((None, 2), stage=2)
    net = PipelineModule([LayerSpec(Block), LayerSpec(Block, 4)], num_stages=2, loss_fn=loss_of)
    with pytest.raises(ValueError, match=r"ep_size \(4\) of layer '1\.moe' must divide .* pipeline stage \(2\)"):
        initialize(model=net, config=config())


def test_evaluation_and_what_is_refused():
    """Errors of one stage's layers are every rank's."""
    run_ranks(4, _evaluates, timeout_s=100)


def test_a_carried_loss_is_a_term_of_the_loss():
    layer = MoE(D, mlp(), 4, 1, 2, **PLAIN)
    x, y = batch(0, 0)
    gradients = []
    for carried in (False, True):
        out, l_aux, _ = layer(x)
        out = layer.carry_loss(out, AUX * l_aux) if carried else out
        loss = loss_of(out, y) if carried else loss_of(out, y) + AUX * l_aux
        gradients.append(torch.autograd.grad(loss, list(layer.parameters())))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)
    assert copy.deepcopy(layer).loss_scale() == 1.0
