"""Ranks that share one batch in slices, against the layer that has it all: everything it gives, and what it keeps."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from xmoe.dispatch.flat import FlatDispatcher
from xmoe.dispatch.local import LocalDispatcher
from xmoe.dispatch.tensor_parallel import SharedTokens
from xmoe.experts import Experts
from xmoe.layer import RoutedMLP
from xmoe.metrics import take_layer_loads
from xmoe.ops.collectives import Exchange
from xmoe.ops.sequence import Slices
from xmoe.router import RouterSettings, TopKRouter
from xmoe.sequence_shard import SequenceShard
from xmoe.testing import assert_close, run_ranks

pytestmark = pytest.mark.dist

D, E = 8, 8
WORLD = 4

# What the router can be told, each against the unsharded layer.
SETTINGS = {
    "plain": {"top_k": 2},
    "normalised sigmoid": {"top_k": 3, "score_function": "sigmoid", "normalize_weights": True},
    "z loss": {"top_k": 3, "z_loss_coefficient": 0.1},
    "loss by sequence": {"top_k": 3, "aux_loss_scope": "sequence"},
    "loss by sequence, biased": {"top_k": 3, "aux_loss_scope": "sequence", "bias": True},
    "loss over the global batch": {"top_k": 2, "aux_loss_scope": "global_batch"},
    "drops by score": {"top_k": 3, "capacity_factor": 0.5, "min_capacity": 1},
    "drops by position": {"top_k": 2, "capacity_factor": 0.5, "min_capacity": 1, "sample_second_expert": False},
    "drops at random": {"top_k": 1, "capacity_factor": 0.5, "min_capacity": 1},
    "sampled second expert": {"top_k": 2, "capacity_factor": 0.75, "min_capacity": 1, "sample_second_expert": True},
    "noise and jitter": {"top_k": 1, "noisy_logits": True, "input_jitter": 0.2, "capacity_factor": 1.0},
    "forced balance": {"top_k": 3, "force_balance": True},
    "DeepSpeed's own drops": {
        "top_k": 1,
        "strict_compat": True,
        "capacity_factor": 0.5,
        "random_token_selection": False,
    },
}


def exchange(group=None):
    return Exchange(group=group or dist.group.WORLD, label="test", timeout_s=20.0)


def groups_of(size):
    """This rank's group of ``size`` consecutive ranks."""
    made = [dist.new_group(list(range(first, first + size))) for first in range(0, WORLD, size)]
    return made[dist.get_rank() // size]


def mlp(width=6):
    return nn.Sequential(nn.Linear(D, width), nn.GELU(), nn.Linear(width, D))


@functools.cache
def all_experts():
    """The experts of every layer here, made once: copying them would take longer than all that the tests do."""
    torch.manual_seed(3)
    experts = nn.ModuleList([mlp() for _ in range(E)]).double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    return experts


def make_layer(local=(0, E), *, bias=False, shared=True, **settings):
    """A layer of ``local``'s experts: ``(first, number)``."""
    experts = Experts(mlp(), 1)
    experts.mlps = all_experts()[local[0] : sum(local)]
    torch.manual_seed(3)
    settings = {"drop_tokens": "capacity_factor" in settings, "sample_second_expert": False} | settings
    gate = TopKRouter(D, E, settings=RouterSettings(**settings), correction_bias=bias)
    nn.init.normal_(gate.wg.weight)
    layer = RoutedMLP(
        gate,
        experts,
        shared_mlp=mlp(5) if shared else None,
        shared_gate=nn.Linear(D, 1, bias=False) if shared else None,
    ).double()
    if bias:
        gate.correction_bias = torch.linspace(-0.1, 0.1, E)
    if gate.last_step_counts is not None:
        gate.steps_end, gate.last_step_counts = True, torch.arange(E)
    return layer


def batch_of(place, shape, *, masked):
    generator = torch.Generator().manual_seed(100 + place)
    x = torch.randn(*shape, D, generator=generator, dtype=torch.float64).requires_grad_()
    used = torch.rand(shape, generator=generator) < 0.7 if masked else None
    return x, used


def results(layer, x, used, *, seed, recompute=False):
    """Outputs, loss, counts, gradients by name and the generator's state of one forward and backward."""
    torch.manual_seed(seed)
    out, aux, counts = checkpoint(layer, x, used, use_reentrant=False) if recompute else layer(x, used)
    state = torch.get_rng_state()
    loss = (out * torch.linspace(0.5, 1.5, D)).square().sum() + 0.7 * aux
    parameters = dict(layer.named_parameters())
    gradients = torch.autograd.grad(loss, [x, *parameters.values()], allow_unused=True)
    named = dict(zip(["x", *parameters], gradients, strict=True))
    return {"out": out.detach(), "aux": aux.detach(), "counts": counts, "state": state}, named


def by_global_id(gradients, first):
    """Gradients of experts under their logical ids."""
    found = {}
    for name, gradient in gradients.items():
        if name.startswith("experts.mlps."):
            local, rest = name.removeprefix("experts.mlps.").split(".", 1)
            name = f"experts.mlps.{first + int(local)}.{rest}"
        found[name] = gradient
    return found


def compare(size, group, dispatch, shape, settings, *, masked=False, recompute=False):
    """One sharded layer against the whole one, in each of the world's groups of ``size`` ranks."""
    rank = dist.get_rank()
    what = f"{size} ranks, {dispatch}, {shape}, {settings}"
    place = rank // size
    x, used = batch_of(place, shape, masked=masked)
    whole, whole_gradients = results(make_layer(**settings), x, used, seed=place)
    first, number = (rank * E // WORLD, E // WORLD) if dispatch == "flat" else (0, E)
    sharded = make_layer((first, number), **settings)
    sharded.set_dispatcher(FlatDispatcher(exchange()) if dispatch == "flat" else LocalDispatcher())
    sharded.set_sequence_shard(SequenceShard(exchange(group)))
    x, used = batch_of(place, shape, masked=masked)
    found, gradients = results(sharded, x, used, seed=place, recompute=recompute)

    for key in ("out", "aux"):
        assert_close(found[key], whole[key], what=f"{what} {key}")
    assert torch.equal(found["counts"], whole["counts"]), what
    assert torch.equal(found["state"], whole["state"]), f"{what}: another state of the generator"
    for name, gradient in gradients.items():
        if "experts" not in name:
            assert_close(gradient, whole_gradients[name], what=f"{what} {name}")
    same = [found["out"], found["aux"], *(g for name, g in gradients.items() if "experts" not in name)]
    assert_same_bits(same, group, what)
    check_expert_gradients(by_global_id(gradients, first), whole_gradients, size, what)
    (load,) = take_layer_loads(sharded)
    dist.all_reduce(load.selected_E, group=group)
    assert torch.equal(load.selected_E, found["counts"]), f"{what}: loads are not of slices"


def check_expert_gradients(own, whole, size, what):
    """Experts' gradients summed over the ranks that hold them are the sum over the batches, each of ``size`` ranks."""
    names = [name for name in whole if "experts" in name]
    zero = torch.zeros_like
    found = torch.cat([own.get(name, zero(whole[name])).reshape(-1) for name in names])
    sums = torch.stack([found, torch.cat([whole[name].reshape(-1) for name in names]) / size])
    dist.all_reduce(sums)
    parts = sums.split([whole[name].numel() for name in names], dim=1)
    for name, (total, expected) in zip(names, parts, strict=True):
        assert_close(total, expected, what=f"{what} {name}")


def assert_same_bits(tensors, group, what):
    flat = torch.cat([t.reshape(-1) for t in tensors])
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, flat, group=group)
    assert all(torch.equal(other, flat) for other in found), f"{what}: ranks of a group differ"


def _any_number_of_tokens(size):
    group = groups_of(size)
    for tokens in (*range(10), 37):
        compare(size, group, "flat", (tokens,), SETTINGS["plain"])
    for tokens in (0, 1, 3, 4, 37):
        compare(size, group, "local", (tokens,), SETTINGS["plain"])
        compare(size, group, "flat", (tokens,), SETTINGS["drops by score"])
    for shape in ((3, 1), (1, 3), (5, 2), (0, 4), (4, 0)):
        compare(size, group, "flat", shape, SETTINGS["loss by sequence"])
    for shape in ((5, 2), (4, 0)):
        compare(size, group, "flat", shape, SETTINGS["plain"])


def _any_settings():
    pair, everyone = groups_of(2), dist.group.WORLD
    for settings in SETTINGS.values():
        compare(2, pair, "flat", (3, 5), settings)
        compare(4, everyone, "flat", (2, 1), settings)  # two of the ranks have no token
    for name in ("z loss", "loss by sequence", "drops by score", "loss over the global batch"):
        compare(2, pair, "flat", (3, 5), SETTINGS[name], masked=True)
    for name in ("plain", "drops at random", "noise and jitter"):
        compare(4, everyone, "flat", (3, 5), SETTINGS[name], recompute=True)
    compare(2, pair, "local", (11,), SETTINGS["plain"] | {"shared": False})


@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_tokens_equals_the_whole_layer(size):
    """None, fewer than ranks, as many, more; sequences shorter than the group; experts here and spread."""
    run_ranks(WORLD, _any_number_of_tokens, size, timeout_s=120)


def test_any_settings_equal_the_whole_layer():
    """Losses of every scope, drops of every policy, random draws, masks, recomputed forwards."""
    run_ranks(WORLD, _any_settings, timeout_s=120)


def _sharded_already(size):
    group, rank = groups_of(size), dist.get_rank()
    place, index = rank // size, rank % size
    cases = [("plain", (8,)), ("drops by score", (3, 8)), ("loss by sequence", (3, 8)), ("forced balance", (8,))]
    cases += [("drops by position", (7,)), ("z loss", (1,)), ("drops by score", (0,))]  # slices of unequal lengths
    ways = [(*case, "the layer") for case in cases]
    ways += [(*case, other) for case in cases[-3:] for other in ("Megatron", "DeepSpeed")]
    for name, shape, summed_by in ways:
        settings, what = SETTINGS[name], f"{size} ranks, {name}, {shape}, summed by {summed_by}"
        x, _ = batch_of(place, shape, masked=False)
        whole, whole_gradients = results(make_layer(**settings), x, None, seed=0)
        layer = make_layer((rank * 2, 2), **settings)
        layer.set_dispatcher(FlatDispatcher(exchange()))
        if summed_by == "Megatron":
            for parameter in [
                *layer.gate.parameters(),
                *layer.shared_mlp.parameters(),
                *layer.shared_gate.parameters(),
            ]:
                parameter.sequence_parallel = True
        sums_gradients = summed_by != "DeepSpeed"
        layer.set_sequence_shard(SequenceShard(exchange(group), input_is_sharded=True, sums_gradients=sums_gradients))
        slices = Slices.even(shape[-1], num_ranks=size, rank=index)
        cut = (..., slice(slices.start, slices.start + slices.size), slice(None))
        found, gradients = results(layer, x.detach()[cut].clone().requires_grad_(), None, seed=0)
        assert_close(found["out"], whole["out"][cut], what=f"{what} out")
        assert_close(found["aux"], whole["aux"], what=f"{what} aux")
        assert torch.equal(found["counts"], whole["counts"]), what
        assert_close(gradients["x"], whole_gradients["x"][cut], what=f"{what} x")
        for key, gradient in gradients.items():
            if "experts" not in key and key != "x":
                if summed_by != "the layer":
                    dist.all_reduce(gradient, group=group)
                assert_close(gradient, whole_gradients[key], what=f"{what} {key}")


@pytest.mark.parametrize("size", [2, 4])
def test_input_that_is_a_slice_already_is_neither_cut_nor_joined(size):
    run_ranks(WORLD, _sharded_already, size, timeout_s=120)


def _two_calls_and_frozen_parameters():
    """One layer twice in a graph, a frozen router, a tied shared expert: sums meet in the order of the graph."""
    group = dist.group.WORLD
    for frozen in (False, True):
        gradients = []
        for shard in (None, SequenceShard(exchange(group))):
            layer = make_layer(top_k=2)
            layer.shared_mlp = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)).double()
            for index, parameter in enumerate(layer.shared_mlp.parameters()):
                nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(index))
            layer.shared_mlp[2].weight = layer.shared_mlp[0].weight
            layer.gate.wg.weight.requires_grad_(not frozen)
            layer.set_sequence_shard(shard)
            x, _ = batch_of(0, (7,), masked=False)
            middle, first_aux, _ = layer(x)
            out, second_aux, _ = layer(torch.tanh(middle))
            trained = {name: p for name, p in layer.named_parameters() if p.requires_grad and "experts" not in name}
            loss = out.square().sum() + first_aux + second_aux
            found = torch.autograd.grad(loss, [x, *trained.values()])
            gradients.append(dict(zip(["x", *trained], found, strict=True)))
        assert ("gate.wg.weight" in gradients[0]) is not frozen
        for name, gradient in gradients[1].items():
            assert_close(gradient, gradients[0][name], what=name)


def test_a_layer_called_twice_with_tied_and_frozen_parameters():
    run_ranks(2, _two_calls_and_frozen_parameters)


def _kept_for_backward(layer, x):
    """Bytes of the storages autograd keeps, each once, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = layer(x)
    is_input_kept = x.untyped_storage().data_ptr() in storages
    del outputs
    return sum(storages.values()), is_input_kept


def _saved_bytes(tokens, hidden, width, experts, k):
    """Bytes kept on this rank: where each rank sends all tokens, every n-th, or those of its slice."""
    size, found = dist.get_world_size(), {}
    for way in ("all", "every n-th", "slice"):
        torch.manual_seed(0)
        settings = RouterSettings(top_k=k, drop_tokens=False, force_balance=True)
        gate = TopKRouter(hidden, experts, settings=settings)
        expert = nn.Sequential(nn.Linear(hidden, width), nn.GELU(), nn.Linear(width, hidden))
        layer = RoutedMLP(gate, Experts(expert, experts // size))
        flat = FlatDispatcher(exchange())
        layer.set_dispatcher(SharedTokens(flat, exchange()) if way == "every n-th" else flat)
        layer.set_sequence_shard(SequenceShard(exchange()) if way == "slice" else None)
        found[way], is_input_kept = _kept_for_backward(layer, torch.randn(tokens, hidden, requires_grad=True))
        assert is_input_kept is not (way == "slice")
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_saved_bytes_fall_by_the_share_of_the_other_ranks(size):
    """X-MoE's formula: of rows sent and received, (G - 1) / G is gone; here of the input and the scores as well."""
    tokens, hidden, width, experts, k = 512, 256, 128, 16, 4
    for rank, found in enumerate(run_ranks(size, _saved_bytes, tokens, hidden, width, experts, k)):
        saved = 1 - found["slice"] / found["all"]
        print(f"rank {rank} of {size}: {found} bytes kept for backward, {saved:.2%} less than of all tokens")
        assert saved == pytest.approx((size - 1) / size, abs=0.005)
        # Against ranks that share the sending only, it is the input and the router's logits (and weights and ids).
        assert found["every n-th"] - found["slice"] >= (hidden + experts) * tokens * 4 * (size - 1) / size


def _wrong_mask():
    layer = make_layer(top_k=2)
    layer.set_sequence_shard(SequenceShard(exchange()))
    with pytest.raises(ValueError, match="used_token has 5 entries for 6 tokens"):
        layer(torch.zeros(2, 3, D, dtype=torch.float64), torch.ones(5))


def test_a_mask_of_another_length_is_refused_before_any_collective():
    run_ranks(1, _wrong_mask)


def _layer_skipped_on_one_rank():
    layer = make_layer(top_k=2)
    layer.set_sequence_shard(SequenceShard(Exchange(group=dist.group.WORLD, label="blocks.3.moe", timeout_s=2.0)))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"rank 0 has waited 2 s in 'blocks.3.moe: sum of loads'"):
            layer(torch.zeros(3, D, dtype=torch.float64))


def test_a_rank_that_skips_the_layer_is_reported_with_the_collective():
    run_ranks(2, _layer_skipped_on_one_rank)


def test_slices():
    assert Slices.even(5, num_ranks=3, rank=1) == Slices((2, 2, 1), 1)
    assert Slices.even(1, num_ranks=4, rank=3) == Slices((1, 0, 0, 0), 3)
    for length, num_ranks in itertools.product(range(9), range(1, 5)):
        slices = [Slices.even(length, num_ranks=num_ranks, rank=rank) for rank in range(num_ranks)]
        assert [place for s in slices for place in range(s.start, s.start + s.size)] == list(range(length))
