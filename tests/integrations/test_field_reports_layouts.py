"""What users of MoE training reported in public: stages and ranks without experts, saving experts with replicas.

Each test names its thread; docs/tested-reports.md is the map.
"""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import groups
from ds_nets import PLAIN, D, MoE, batch, config, engine_of, init_distributed, mlp
from torch import nn

from xmoe.integrations.deepspeed import initialize
from xmoe.metrics import routed_layers, take_layer_loads
from xmoe.testing import run_ranks
from xmoe.training.step_metrics import LocalStep, reduce_step

pytestmark = pytest.mark.dist

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def _a_list_without_experts():
    init_distributed()
    layers = [nn.Linear(D, D)] if dist.get_rank() == 1 else [MoE(D, mlp(), 4, 1, 1)]
    with pytest.raises(ValueError, match="the model's list of MoE layers differs between ranks"):
        initialize(model=nn.Sequential(*layers), config=config())
    # On no rank: nothing to agree on, and the step's metrics have empty lists.
    net = nn.Sequential(nn.Linear(D, D))
    engine = engine_of(net)
    engine.backward(engine(torch.randn(4, D)).sum())
    engine.step()
    loads = take_layer_loads(net)
    assert loads == []
    part = LocalStep(
        loss_sum_nats=1.0, aux_loss_sum=0.0, num_micro_batches=1, num_tokens=4, loads=loads, stop=dist.get_rank() == 1
    )
    metrics = reduce_step(part, torch.device("cpu"))
    assert (metrics.num_tokens, metrics.stop, metrics.layers) == (8, True, ())
    assert (metrics.load_cv, metrics.dropped_share, metrics.num_dead_experts) == (0.0, 0.0, 0)


class _Stage(nn.Module):
    def __init__(self, with_experts):
        super().__init__()
        self.dense = nn.Linear(D, D)
        self.moe = MoE(D, mlp(), 4, 2, 2, correction_bias=True, **PLAIN) if with_experts else None

    def forward(self, x):
        h = self.dense(x)
        if self.moe is None:
            return x + h
        y, l_aux, _ = self.moe(h)
        return self.moe.carry_loss(x + y, 0.1 * l_aux)


def _a_stage_without_experts(stages):
    init_distributed()
    torch.manual_seed(2)
    layers = [LayerSpec(_Stage, with_experts) for with_experts in stages]
    net = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    xmoe = {"correction_bias_update_rate": 0.5, "aux_loss_scope": "global_batch", "collective_timeout_s": 30.0}
    engine = initialize(model=net, config=config(kind="SGD", accumulation=2, xmoe=xmoe))[0]
    place, biases = engine.mpu.get_data_parallel_rank(), []
    for step in range(2):
        engine.train_batch(iter([batch(10 * step + part, place) for part in range(2)]))
        biases += [layer.gate.correction_bias.tolist() for _, layer in routed_layers(net)]
    assert all(not layer.gate.step_counts.any() for _, layer in routed_layers(net))
    assert [load.name for load in take_layer_loads(net)] == [name for name, _ in routed_layers(net)]
    return biases


@pytest.mark.parametrize("stages", [(True, False), (False, True)], ids=["first", "last"])
def test_a_stage_without_experts_joins_no_collective_of_theirs(stages):
    """ScienceOne-AI/DeepSeek-671B-SFT-Guide#7, pytorch/torchtitan#1689: hang, or an empty list in a reduction."""
    biases = run_ranks(4, _a_stage_without_experts, stages)
    assert [any(map(any, found)) for found in biases] == [stages[0]] * 2 + [stages[1]] * 2
    assert biases[0] == biases[1]
    assert biases[2] == biases[3]


def test_a_rank_without_experts_is_refused_and_a_model_without_any_trains():
    """The same reports, without a pipeline: ranks whose lists differ would wait for each other in the first sum."""
    run_ranks(2, _a_list_without_experts)


def _experts_by_logical_id(net):
    """Weights of every expert of the whole model, by logical id, wherever it lives; replicas must agree."""
    layer = net.moe
    first = groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
    modules = layer.deepspeed_moe.experts.modules_in_order()
    own = {first + number: [p.detach().clone() for p in m.parameters()] for number, m in enumerate(modules)}
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    whole = {}
    for part in everywhere:
        for logical_id, weights in part.items():
            assert all(torch.equal(a, b) for a, b in zip(weights, whole.get(logical_id, weights), strict=True))
            whole[logical_id] = weights
    assert sorted(whole) == list(range(8))
    return whole, layer.deepspeed_moe.gate.wg.weight.detach().clone()


def _run_the_document(folder):
    os.chdir(folder)
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    setup, save, resume, wider = blocks
    assert "engine.save_checkpoint(" in save
    assert "wider.load_checkpoint(" in wider
    scope = {}
    exec(setup, scope)
    kept = []
    originals = scope["initialize"]

    def initialize_and_watch(**given):
        engine, *rest = originals(**given)
        for name in ("save_checkpoint", "load_checkpoint"):
            original = getattr(engine, name)

            def watched(*args, original=original, engine=engine, **kwargs):
                result = original(*args, **kwargs)
                kept.append(_experts_by_logical_id(engine.module))
                dist.barrier()
                return result

            setattr(engine, name, watched)
        return engine, *rest

    scope["initialize"] = initialize_and_watch
    for block in (save, resume, wider):
        exec(block, scope)
    assert scope["wider"].module.moe.num_local_experts == 2
    saved, *loaded = kept
    assert len(loaded) == 2
    for experts, router in loaded:
        assert torch.equal(router, saved[1])
        for logical_id, weights in experts.items():
            assert all(torch.equal(a, b) for a, b in zip(weights, saved[0][logical_id], strict=True)), logical_id
    different = [weights[0] for weights in saved[0].values()]
    assert not any(torch.equal(different[0], other) for other in different[1:]), "experts did not differ"
    with pytest.raises(ValueError, match="load_module_only=True"):
        scope["wider"].load_checkpoint("checkpoints", tag="step3")


def test_the_documented_way_to_save_and_load_with_experts_and_replicas_works(tmp_path):
    """microsoft/Tutel#87, #219: nobody knew how to save with expert and data parallelism. Runs docs/checkpoints.md."""
    run_ranks(4, _run_the_document, str(tmp_path))
    names = {path.name for path in (tmp_path / "checkpoints" / "step3").iterdir()}
    assert {f"layer_0_expert_{expert}_mp_rank_00_model_states.pt" for expert in range(8)} <= names
    assert "mp_rank_00_model_states.pt" in names
    assert sum(name.endswith("optim_states.pt") for name in names) == 4
