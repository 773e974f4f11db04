"""Gradients, norms and clipping against one process that computes the whole batch, at every layout and ZeRO stage.

SGD throughout: Adam divides a wrong scale away.
"""

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime import engine as deepspeed_engine
from ds_nets import (
    PLAIN,
    D,
    MoE,
    Net,
    batch,
    config,
    engine_of,
    gather_whole,
    init_distributed,
    local_state,
    mlp,
    reference_steps,
    whole_state,
)
from torch import nn

from xmoe.integrations.deepspeed import initialize
from xmoe.testing import assert_close, run_ranks

pytestmark = pytest.mark.dist

LR = 0.05
STEPS = 2
DATA_FIRST = "use_data_before_expert_parallelism"


def tokens_of(rank, uneven):
    return (5, 0, 9, 1)[rank] if uneven else 6


def _train(ep_size, k, *, accumulation=1, uneven=False, **options):
    """Norms of the steps, parameters after them, and the batches: ``[step][part]``, the ranks' ``(x, y)``."""
    init_distributed()
    whole = whole_state(k=k)
    net = Net(ep_size=ep_size, k=k, **PLAIN)
    net.load_state_dict(local_state(whole, net, data_first=options.get(DATA_FIRST, False)))
    engine = engine_of(net, kind="SGD", lr=LR, accumulation=accumulation, **options)
    ranks = range(dist.get_world_size())
    batches = [
        [[batch(10 * step + part, r, tokens=tokens_of(r, uneven)) for r in ranks] for part in range(accumulation)]
        for step in range(STEPS)
    ]
    norms = []
    for step in range(STEPS):
        for part in range(accumulation):
            engine.backward(engine(*batches[step][part][dist.get_rank()]))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms, gather_whole(net), batches


def _check_fp32(cases):
    for case in cases:
        norms, found, batches = _train(**case)
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, norms)
        if dist.get_rank() != 0:  # one comparison is enough: the ranks' parameters agree
            continue
        expected, expected_norms = reference_steps(
            whole_state(k=case["k"]), batches, k=case["k"], lr=LR, clip=case.get("clip", 0.0)
        )
        for norms in everywhere:
            assert norms == pytest.approx(expected_norms, rel=2e-5), case
        for key in expected:
            assert_close(found[key], expected[key], what=f"{case} {key}")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_and_norms_equal_the_single_process_reference(stage):
    cases = [
        {"ep_size": (1, 4), "k": 1, "stage": stage, "uneven": True},
        {"ep_size": 2, "k": 3, "stage": stage, "uneven": True, "accumulation": 2},
        {"ep_size": 1, "k": 2, "stage": stage, "clip": 0.5, "accumulation": 2},
        {"ep_size": 4, "k": 2, "stage": stage, "clip": 0.1},
    ]
    if stage == 2:
        offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
        cases.append({"ep_size": 2, "k": 2, "clip": 0.5, "zero_force_ds_cpu_optimizer": False, **offload})
    run_ranks(4, _check_fp32, cases, timeout_s=100)


def test_the_other_layout_of_groups_gives_the_same_gradients():
    cases = [{"ep_size": 2, "k": 2, "stage": stage, DATA_FIRST: True} for stage in (0, 1)]
    run_ranks(4, _check_fp32, cases)


def _norm_of_this_model(cases):
    """bf16: the norm the engine reports against the norm of the very gradients it holds, gathered; and the clipping."""
    init_distributed()
    whole = {key: v.bfloat16().float() for key, v in whole_state().items()}
    _, expected_norms = reference_steps(whole, [[[batch(0, r) for r in range(4)]]], k=2, lr=LR)
    for case in cases:
        options = {**case}
        if options.pop("fused", False):
            # DeepSpeed takes its fused fp16 wrapper for FusedAdam alone, which needs a device to build.
            deepspeed_engine.FusedAdam = torch.optim.SGD
        net = Net(ep_size=options.pop("ep_size"), k=2, **PLAIN)
        net.load_state_dict(local_state(whole, net))
        engine = engine_of(net, kind="SGD", lr=LR, bf16=True, **options)
        x, y = batch(0)
        engine.backward(engine(x.bfloat16(), y.bfloat16()))
        engine.step()
        norm = float(engine.get_global_grad_norm())
        assert norm == pytest.approx(expected_norms[0], rel=0.02), (case, type(engine.optimizer).__name__)
        after = gather_whole(net)
        moved = torch.stack([(after[key] - whole[key]).square().sum() for key in whole]).sum().sqrt() / LR
        clip = options.get("clip", 0.0)
        assert clip < 0.8 * expected_norms[0], "the clipping would not show"
        expected = clip or expected_norms[0]
        # bf16 parameters round each step away to 3 digits.
        assert float(moved) == pytest.approx(expected, rel=0.2), (case, type(engine.optimizer).__name__)


def test_bfloat16_norms_and_clipping_equal_the_reference():
    fp32_sums = {"data_types": {"grad_accum_dtype": "fp32"}}
    engines = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 1, **fp32_sums}]
    engines += [{"stage": 0, "fused": True}]  # the last, as it stays so
    cases = [{"ep_size": e, "clip": c, **engine} for engine in engines for e, c in ((4, 0.0), (2, 0.5))]
    run_ranks(4, _norm_of_this_model, cases, timeout_s=100)


class Block(nn.Module):
    """One pipeline stage's layer; the auxiliary loss stays out, as pipelines pass tensors only."""

    def __init__(self, ep_size):
        super().__init__()
        self.dense = nn.Linear(D, D)
        self.moe = MoE(D, mlp(), 4, ep_size, 2, correction_bias=True, **PLAIN)

    def forward(self, x):
        return x + self.moe(self.dense(x))[0]


def _pipeline(ep_size):
    init_distributed()
    layers = [LayerSpec(Block, ep_size), LayerSpec(Block, ep_size)]
    net = PipelineModule(layers, num_stages=2, loss_fn=lambda out, y: (out - y).float().square().mean())
    ds = config(kind="SGD", lr=1.0, accumulation=2, clip=1e-3, xmoe={"correction_bias_update_rate": 0.5})
    engine = initialize(model=net, config=ds)[0]
    before = [p.detach().float().clone() for p in net.parameters()]
    place = engine.mpu.get_data_parallel_rank()
    engine.train_batch(iter([batch(part, place) for part in range(2)]))
    norm = float(engine.get_global_grad_norm())
    bias = [b for n, b in net.named_buffers() if "correction_bias" in n]
    assert len(bias) == 1
    moved = [(p.detach().float() - old).square().sum() for p, old in zip(net.parameters(), before, strict=True)]
    expert = ["expert" in name for name, _ in net.named_parameters()]
    dense = sum(float(square) for square, flag in zip(moved, expert, strict=True) if not flag)
    experts = sum(float(square) for square, flag in zip(moved, expert, strict=True) if flag)
    return norm, dense, experts, bool(bias[0].any())


@pytest.mark.parametrize("world", [2, 4])
def test_the_norm_of_a_pipeline_counts_every_stage(world):
    """Clipped SGD at rate 1 moves the model by exactly the clipping value, if the norm is the whole model's."""
    replicas = world // 2
    answers = run_ranks(world, _pipeline, replicas)
    norms = {norm for norm, *_ in answers}
    assert len(norms) == 1
    assert norms.pop() > 1e-2
    dense = sum(answer[1] for answer in answers) / replicas
    experts = sum(answer[2] for answer in answers)
    assert (dense + experts) ** 0.5 == pytest.approx(1e-3, rel=1e-3)
    assert all(answer[3] for answer in answers), "a stage's balancing bias did not move"
