"""Modules of every kind on slices of tokens: those that checkpoint themselves, keep references, or drop out."""

from contextlib import nullcontext

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from xmoe.dispatch.flat import FlatDispatcher
from xmoe.dispatch.tensor_parallel import SharedTokens
from xmoe.experts import Experts
from xmoe.integrations.deepspeed import init_distributed
from xmoe.layer import RoutedMLP
from xmoe.ops.collectives import Exchange
from xmoe.ops.dropout import own_dropout
from xmoe.router import RouterSettings, TopKRouter
from xmoe.sequence_shard import SequenceShard
from xmoe.testing import assert_close, run_ranks

D, E, WORLD = 8, 4, 2


def exchange():
    return Exchange(group=dist.group.WORLD, label="blocks.3.moe", timeout_s=20.0)


def make_layer(mode, *, shared=None, expert=None, k=2):
    """A layer of all experts (``mode`` "whole"), of this rank's, in slices ("shard") or shares of tokens ("share")."""
    torch.manual_seed(3)
    gate = TopKRouter(D, E, settings=RouterSettings(top_k=k, drop_tokens=False, sample_second_expert=False))
    nn.init.normal_(gate.wg.weight)
    expert = expert or nn.Sequential(nn.Linear(D, 6), nn.GELU(), nn.Linear(6, D))
    layer = RoutedMLP(gate, Experts(expert, E if mode == "whole" else E // WORLD), shared_mlp=shared).double()
    if mode != "whole":
        flat = FlatDispatcher(exchange())
        layer.set_dispatcher(SharedTokens(flat, exchange()) if mode == "share" else flat)
        layer.set_sequence_shard(SequenceShard(exchange()) if mode == "shard" else None)
    return layer


def tokens(number, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, D, generator=generator, dtype=torch.float64).requires_grad_()


def by_reentrant(function, *inputs):
    return checkpoint(function, *inputs, use_reentrant=True)


def by_non_reentrant(function, *inputs):
    return checkpoint(function, *inputs, use_reentrant=False)


def by_deepspeed(function, *inputs):
    init_distributed()
    deepspeed.checkpointing.configure(None, num_checkpoints=1)
    return deepspeed.checkpointing.checkpoint(function, *inputs)


def directly(function, *inputs):
    return function(*inputs)


class Recomputed(nn.Module):
    """Shared experts that go through ``by`` themselves."""

    def __init__(self, by):
        super().__init__()
        torch.manual_seed(11)
        self.up, self.down, self.by = nn.Linear(D, 6), nn.Linear(6, D), by

    def forward(self, x):
        return self.by(self.compute, x)

    def compute(self, x):
        return self.down(torch.tanh(self.up(x)))


class KeepsReferences(Recomputed):
    """Takes its weights from a list, and not from the modules that own them."""

    def __init__(self):
        super().__init__(directly)
        self.weights = [self.up.weight, self.down.weight]

    def compute(self, x):
        up, down = self.weights
        return torch.tanh(x @ up.T) @ down.T


class _CheckpointedTanh(torch.autograd.Function):
    """A checkpoint by name only: it computes again, and asks for no gradient by itself."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 - torch.tanh(x).square())


class NamedAlike(Recomputed):
    def __init__(self):
        super().__init__(directly)

    def compute(self, x):
        return self.down(_CheckpointedTanh.apply(self.up(x)))


class TiedOutside(Recomputed):
    """Uses a parameter of a module that is no part of it."""

    def __init__(self):
        super().__init__(directly)
        self.others = [nn.Linear(D, D).double()]

    def compute(self, x):
        return super().compute(x) + self.others[0](x)


def gradients(layer, x, *, around):
    """Of the tokens and the shared experts; after backward, as a reentrant checkpoint knows no torch.autograd.grad."""
    out, aux, _ = around(layer, x)
    (out.square().sum() + aux).backward()
    return [x.grad, *(parameter.grad for parameter in layer.shared_mlp.parameters())]


def _checkpoints_that_work(num_tokens):
    for around, inside in [
        (directly, by_non_reentrant),
        (by_non_reentrant, by_non_reentrant),
        (by_reentrant, directly),
        (by_reentrant, by_non_reentrant),
        (by_deepspeed, directly),
    ]:
        expected = gradients(make_layer("whole", shared=Recomputed(directly)), tokens(num_tokens), around=directly)
        found = gradients(make_layer("shard", shared=Recomputed(inside)), tokens(num_tokens), around=around)
        for index, (gradient, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(gradient, other, what=f"{around.__name__}, {inside.__name__}, {index}")


@pytest.mark.dist
def test_checkpoints_of_the_layer_and_non_reentrant_ones_inside_give_the_whole_layers_gradients():
    run_ranks(WORLD, _checkpoints_that_work, 5)


def _named_alike():
    expected = gradients(make_layer("whole", shared=NamedAlike()), tokens(5), around=directly)
    found = gradients(make_layer("shard", shared=NamedAlike()), tokens(5), around=directly)
    for gradient, other in zip(found, expected, strict=True):
        assert_close(gradient, other)


@pytest.mark.dist
def test_a_function_that_only_sounds_like_a_checkpoint_is_taken():
    run_ranks(WORLD, _named_alike)


def _refused(make_shared, message):
    """On both ranks, the second of which has no token, and before backward: the ranks part in no collective."""
    layer = make_layer("shard", shared=make_shared())
    for number in (1, 5):
        with pytest.raises(ValueError, match=message):
            layer(tokens(number))
    with torch.no_grad():
        layer(tokens(5))  # no gradient, no fault
    layer.requires_grad_(False)
    if message.startswith("layer 'blocks.3.moe': Recomputed"):
        layer(tokens(5))  # nothing to sum


def _all_refused():
    computed = "is computed on a slice of the tokens, and"
    for by in (by_reentrant, by_deepspeed):
        _refused(
            lambda by=by: Recomputed(by),
            rf"layer 'blocks.3.moe': Recomputed {computed} its checkpoint \(CheckpointFunction\) .*use_reentrant=False",
        )
    _refused(KeepsReferences, rf"KeepsReferences {computed} takes '(up|down).weight', of shape \((6, 8|8, 6)\)")
    _refused(TiedOutside, rf"TiedOutside {computed} takes a parameter of another module, of shape \(8,( 8)?\)")


@pytest.mark.dist
def test_gradients_that_would_go_past_the_sum_are_refused():
    run_ranks(WORLD, _all_refused)


def _marked_parameters():
    """What Megatron sums needs no sum here, wherever the module takes it from."""
    shared = KeepsReferences()
    for parameter in shared.parameters():
        parameter.sequence_parallel = True
    expected = gradients(make_layer("whole", shared=KeepsReferences()), tokens(5), around=directly)
    found = gradients(make_layer("shard", shared=shared), tokens(5), around=directly)
    for gradient, other in zip(found[1::2], expected[1::2], strict=True):  # of weights; biases have no part in it
        dist.all_reduce(gradient)
        assert_close(gradient, other)


@pytest.mark.dist
def test_parameters_that_megatron_sums_may_be_taken_from_anywhere():
    run_ranks(WORLD, _marked_parameters)


# --- dropout ---


def same_on_ranks(tensor):
    found = [torch.empty_like(tensor) for _ in range(WORLD)]
    dist.all_gather(found, tensor)
    return torch.equal(*found)


def dropping(*, p=0.5):
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(D, 6), nn.Dropout(p), nn.Linear(6, D))


def _states_after_dropout(num_tokens):
    for mode, places in [
        ("shard", ("shared", "expert")),
        ("shard", ("shared",)),
        ("shard", ("expert",)),
        ("share", ("shared", "expert")),
        ("share", ("expert",)),
    ]:
        layer = make_layer(mode, **{place: dropping() for place in places})
        torch.manual_seed(7)
        before = torch.get_rng_state()
        outs = [layer(tokens(num_tokens))[0].detach() for _ in range(2)]
        what = f"{mode} {places} {num_tokens}"
        assert same_on_ranks(torch.get_rng_state()), f"{what}: the generators parted"
        assert same_on_ranks(torch.stack(outs)), f"{what}: outputs differ"
        assert not torch.equal(torch.get_rng_state(), before), f"{what}: every call would draw the same masks"
        assert not torch.equal(*outs), f"{what}: two calls drew the same masks"


@pytest.mark.dist
def test_generators_of_the_ranks_stay_alike_under_dropout():
    """An odd number of tokens, and one token: slices and rows of unequal sizes, none on a rank."""
    run_ranks(WORLD, _all_states_after_dropout)


def _all_states_after_dropout():
    for number in (5, 1):
        _states_after_dropout(number)


def _masks_of_slices():
    layer = make_layer("shard", shared=nn.Dropout(0.5))
    layer.zero_routed_output = True
    torch.manual_seed(7)
    mask_TD = layer(torch.ones(8, D, dtype=torch.float64))[0] != 0
    assert not torch.equal(mask_TD[:4], mask_TD[4:]), "both slices drew the same mask"


@pytest.mark.dist
def test_slices_draw_masks_of_their_own():
    run_ranks(WORLD, _masks_of_slices)


def _same_masks_in_the_recompute():
    for mode in ("shard", "share"):
        for around in (by_non_reentrant, by_reentrant, by_deepspeed):
            found = []
            for way in (directly, around):
                layer = make_layer(mode, shared=dropping(), expert=dropping())
                torch.manual_seed(7)
                found.append(gradients(layer, tokens(5), around=way))
                found[-1] += [parameter.grad for parameter in layer.experts.parameters()]
                found[-1].append(torch.rand(1, dtype=torch.float64))
            for index, (gradient, expected) in enumerate(zip(found[1], found[0], strict=True)):
                assert_close(gradient, expected, what=f"{mode} {around.__name__} {index}")


@pytest.mark.dist
def test_a_recompute_draws_the_masks_of_the_forward():
    run_ranks(WORLD, _same_masks_in_the_recompute)


@pytest.mark.parametrize(
    ("module", "place", "draws"),
    [
        (nn.Dropout(0.5), 0, True),
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.AlphaDropout(0.1))), 1, True),
        (nn.Dropout(0.5), None, False),
        (nn.Dropout(0.0), 0, False),
        (nn.Dropout(0.5).eval(), 0, False),
        (nn.Linear(2, 2), 0, False),
    ],
)
def test_own_dropout_moves_the_generator_by_one_draw_where_there_is_dropout(module, place, draws):
    torch.manual_seed(7)
    if draws:
        torch.randint(2**62, ())
    expected = torch.rand(1)
    torch.manual_seed(7)
    with own_dropout(module, place, torch.device("cpu")):
        if draws:
            torch.rand(17)
    assert torch.equal(torch.rand(1), expected)


def test_own_dropout_of_a_device_gives_its_generator_back_as_it_was(monkeypatch):
    on_device = torch.Generator().manual_seed(9)  # stands for the device's
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: on_device.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: on_device.set_state(state))
    monkeypatch.setattr(torch.cuda, "manual_seed", on_device.manual_seed)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    before, masks = on_device.get_state(), []
    for place in (0, 1):
        torch.manual_seed(7)
        for _ in range(2):
            with own_dropout(nn.Dropout(0.5), place, torch.device("cuda", 0)):
                masks.append(tuple(torch.rand(4, generator=on_device).tolist()))
            assert torch.equal(on_device.get_state(), before)
    assert len(set(masks)) == 4


def test_own_dropout_gives_the_generator_back_after_an_error():
    torch.manual_seed(7)
    with own_dropout(nn.Dropout(0.5), 0, torch.device("cpu")):
        pass
    expected = torch.rand(1)
    torch.manual_seed(7)
    with pytest.raises(KeyError), own_dropout(nn.Dropout(0.5), 1, torch.device("cpu")):
        raise KeyError
    assert torch.equal(torch.rand(1), expected)
