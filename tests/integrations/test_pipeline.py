"""PipelineModule: stages with and without experts train as the unpiped model does, auxiliary losses included.

SGD at rate 1, so that a step shows the gradient.
"""

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from ds_nets import EXPERT_KEY, PLAIN, D, MoE, batch, config, gather_whole, init_distributed, mlp
from torch import nn

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


def _unpiped(stages, clip, replicas=2):
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


def _piped(stages, **options):
    """Parameters after the same step of the pipeline, by global name, and the norm it reports."""
    init_distributed()
    layers = [LayerSpec(Block, size) for size in stages]
    net = PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="uniform")
    _, whole = _whole(stages)
    _load(net, whole)
    ds = config(kind="SGD", lr=1.0, accumulation=PARTS, **options)
    engine = initialize(model=net, config=ds)[0]
    place = engine.mpu.get_data_parallel_rank()
    bf16 = options.get("bf16", False)
    parts = [[t.bfloat16() if bf16 else t for t in batch(part, place)] for part in range(PARTS)]
    engine.train_batch(iter(parts))
    return gather_whole(net), float(engine.get_global_grad_norm())


def _check(cases):
    for case in cases:
        options = {**case}
        stages = EP_SIZES[options.pop("stages")]
        expected, norm = _unpiped(stages, options.get("clip", 0.0))
        found, found_norm = _piped(stages, **options)
        assert found_norm == pytest.approx(norm, rel=1e-5), case
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            error = float((found[key].double() - value).abs().max())
            assert error < 1e-6, f"{case} {key}: {error}"


@pytest.mark.parametrize("stages", list(EP_SIZES))
def test_gradients_equal_the_unpiped_models(stages):
    """Two stages of two ranks: experts on both, of two sizes, on the first alone, on the last alone."""
    run_ranks(4, _check, [{"stages": stages, "stage": stage} for stage in (0, 1)], timeout_s=60)
