"""Exchanges that overlap with computing: the order of the parts, the same results, and nothing paid for it."""

import weakref

import pytest
import torch
import torch.distributed as dist
from hierarchical_layers import HIDDEN, UNEVEN, dispatcher_of, fill, inputs_of, make_layer
from syncs import recorded_syncs
from torch import nn
from torch.utils.checkpoint import checkpoint

from xmoe.experts import Experts
from xmoe.ops.collectives import Exchange, Pending
from xmoe.ops.overlap import Pause, overlapped, to_end, together
from xmoe.permute import permute
from xmoe.replay import fresh_decisions
from xmoe.testing import assert_close, run_ranks
from xmoe.types import Routing

NAMES = ["flat", "gpu", "node", "node+gpu"]


def run_of(name, pauses, seen):
    for part, pause in enumerate(pauses):
        seen.append(f"{name}{part}")
        yield pause
    seen.append(f"{name}{len(pauses)}")
    return name


def test_younger_runs_go_first_and_something_else_in_the_first_pause():
    seen = []
    runs = [run_of(name, [Pause.FAR] * 2, seen) for name in "abc"]
    assert overlapped(runs, lambda: seen.append("-") or 7) == (["a", "b", "c"], 7)
    assert seen == ["a0", "-", "b0", "a1", "c0", "b1", "a2", "c1", "b2", "c2"]
    seen.clear()
    assert overlapped([run_of("a", [], seen)], lambda: seen.append("-")) == (["a"], None)
    assert seen == ["a0", "-"]
    seen.clear()
    both = together(run_of("a", [Pause.FAR, Pause.NEAR], seen), run_of("b", [Pause.FAR], seen))
    assert list(both) == [Pause.FAR, Pause.NEAR]
    assert seen == ["a0", "b0", "a1", "b1", "a2"]
    assert to_end(together(run_of("a", [], seen), run_of("b", [Pause.FAR], seen))) == ("a", "b")


def test_runs_whose_rows_are_near_go_before_those_that_would_wait():
    # Two hops: 0 leaves, 1 passes on, 2 computes, 3 sums by node, 4 sums by token.
    seen = []
    two_hops = [Pause.FAR, Pause.NEAR, Pause.NEAR, Pause.FAR]
    overlapped([run_of(name, two_hops, seen) for name in "abc"], lambda: None)
    # a computes (a2) before b waits for its first hop (b1); b computes beside a's way home, begun by a3.
    assert seen == ["a0", "b0", "a1", "c0", "a2", "b1", "a3", "b2", "c1", "b3", "c2", "a4", "c3", "b4", "c4"]


def test_chunks_are_of_consecutive_tokens_and_of_one_length():
    ids = torch.arange(22, dtype=torch.int32).view(11, 2) % 6
    counts = torch.bincount(ids.flatten(), minlength=6)
    routing = Routing(
        topk_ids_TK=ids,
        topk_weights_TK=torch.arange(22.0).view(11, 2),
        selected_per_expert_E=counts,
        tokens_per_expert_E=counts,
        aux_loss=torch.zeros(()),
    )
    buffers = permute(routing, decide=fresh_decisions(), num_chunks=4)
    assert [buffer.num_tokens for buffer in buffers] == [3, 3, 3, 2]
    assert sum(buffer.tokens_per_expert_E for buffer in buffers).tolist() == counts.tolist()
    for first, buffer in zip((0, 6, 12, 18), buffers, strict=True):
        assert torch.equal(buffer.combine_weights_S, first + buffer.slot_ids_S.float())
    assert [b.num_tokens for b in permute(routing, decide=fresh_decisions(), num_chunks=12)] == [1] * 11 + [0]


# The same results


def layer_of(rank, world, name, num_chunks, *, ranks_per_node, shared=False, **options):
    layer = make_layer(4 * world, 3, rank=rank, world=world, **options)
    if shared:
        torch.manual_seed(5)
        layer.shared_mlp = nn.Linear(HIDDEN, HIDDEN).double()
        layer.shared_gate = nn.Linear(HIDDEN, 1).double()
    layer.set_dispatcher(dispatcher_of(name, ranks_per_node, num_chunks=num_chunks))
    return layer


def results_of(layer, rank, *, tokens, through=lambda layer, x: layer(x)):
    x, upstream = inputs_of(rank, tokens)
    y, aux, counts = through(layer, x)
    ((y * upstream).sum() + aux).backward()
    return [y.detach(), aux.detach(), counts.double(), x.grad, *(parameter.grad for parameter in layer.parameters())]


DROPS = {"drop_tokens": True, "drop_policy": "probs", "capacity_factor": 0.5, "min_capacity": 1}
# More chunks than some ranks have tokens.
MANY_CHUNKS = [(name, 7, {}) for name in NAMES]
KINDS_OF_LAYERS = [
    ("node+gpu", 3, {"shared": True}),
    ("flat", 2, {"expert": "loop"}),
    ("node+gpu", 2, DROPS),
    ("flat", 4, {"shared": True, "expert": "loop"}),
]


def same_results(ranks_per_node, cases):
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, num_chunks, options in cases:
        made = {"ranks_per_node": ranks_per_node} | options
        expected, found, again = (
            results_of(layer_of(rank, world, name, chunks, **made), rank, tokens=UNEVEN[rank])
            for chunks in (1, num_chunks, num_chunks)
        )
        for index, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_close(actual, wanted, what=f"{name}, {num_chunks} chunks, {options}, result {index}")
            assert torch.equal(actual, again[index]), f"two runs differ: {name}, {num_chunks} chunks, {options}"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "ranks_per_node", "cases"),
    [(1, 1, [MANY_CHUNKS[0], MANY_CHUNKS[-1]]), (4, 2, MANY_CHUNKS + KINDS_OF_LAYERS)],
    ids=["1 rank", "4 ranks"],
)
def test_results_do_not_depend_on_the_number_of_chunks(world, ranks_per_node, cases):
    run_ranks(world, same_results, ranks_per_node, cases)


def same_when_recomputed():
    rank, world = dist.get_rank(), dist.get_world_size()
    made = {"ranks_per_node": 2, "shared": True}
    for name in ("flat", "node+gpu"):
        expected = results_of(layer_of(rank, world, name, 3, **made), rank, tokens=UNEVEN[rank])
        for reentrant in (False, True):
            layer = layer_of(rank, world, name, 3, **made)
            plans = []
            plan = layer.dispatcher.plan
            layer.dispatcher.plan = lambda buffers, plan=plan, plans=plans: plans.append(1) or plan(buffers)
            found = results_of(
                layer,
                rank,
                tokens=UNEVEN[rank],
                through=lambda layer, x, reentrant=reentrant: checkpoint(layer, x, use_reentrant=reentrant),
            )
            for actual, wanted in zip(found, expected, strict=True):
                assert torch.equal(actual, wanted), f"{name}, {reentrant=}"
            assert len(plans) == 1


@pytest.mark.dist
def test_checkpointing_replays_all_chunks():
    run_ranks(4, same_when_recomputed)


def rounded_gradients(num_chunks):
    """Gradients of the experts in bfloat16, and in float64 from the same numbers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        layer = layer_of(rank, world, "flat", num_chunks if dtype == torch.bfloat16 else 1, ranks_per_node=1)
        layer.to(torch.bfloat16).to(dtype)
        layer.gate.to(torch.float32 if dtype == torch.bfloat16 else dtype)
        x, upstream = inputs_of(rank, 256)
        x, upstream = (value.detach().to(torch.bfloat16).to(dtype) for value in (x, upstream))
        (layer(x)[0] * upstream).sum().backward()
        found.append([parameter.grad.double() for parameter in layer.experts.parameters()])
    return found


@pytest.mark.dist
def test_gradients_of_many_chunks_are_rounded_once():
    for found, expected in run_ranks(2, rounded_gradients, 64):
        for actual, wanted in zip(found, expected, strict=True):
            assert_close(actual, wanted, dtype=torch.bfloat16)


# What runs while rows are under way


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, what, note):
        ctx.what, ctx.note = what, note
        note(what)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.note(f"{ctx.what}, backward")
        return grad, None, None


class NotedMLP(nn.Module):
    def __init__(self, what, note):
        super().__init__()
        self.fc, self.what, self.note = nn.Linear(HIDDEN, HIDDEN).double(), what, note

    def forward(self, x):
        return Noted.apply(self.fc(x), self.what, self.note)


def under_way(name, num_chunks):
    """For each part of the experts: how many exchanges of rows of the whole group were under way as it was computed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = layer_of(rank, world, name, num_chunks, ranks_per_node=2)
    pending, seen = [], {}
    begin, finish = Pending.__init__, Pending.finish

    def counted_begin(self, rows, *args, **options):
        begin(self, rows, *args, **options)
        if rows.dim() == 2 and options["exchange"].group is dist.group.WORLD:
            pending.append(self)

    def counted_finish(self):
        if self in pending:
            pending.remove(self)
        return finish(self)

    def note(what):
        seen.setdefault(what, []).append(len(pending))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "__init__", counted_begin)
        patch.setattr(Pending, "finish", counted_finish)
        experts = layer.experts
        layer.experts.forward = lambda rows, plan, prepared: Noted.apply(
            type(experts).forward(experts, rows, plan, prepared), "experts", note
        )
        layer.shared_mlp = NotedMLP("shared", note)
        results_of(layer, rank, tokens=12)
    assert not pending
    return seen


def check_what_is_under_way():
    for name in NAMES:
        seen = under_way(name, 1)
        assert seen == {"experts": [0], "experts, backward": [0], "shared": [1], "shared, backward": [1]}, name
        for num_chunks in (2, 3):
            seen = under_way(name, num_chunks)
            what = f"{name}, {num_chunks} chunks: {seen}"
            # The next chunk's rows and, from the second chunk on, the results of the one before. Backward mirrors it.
            assert all(count >= 1 for count in seen["experts"]), what
            assert all(count >= 1 for count in seen["experts, backward"]), what
            assert len(seen["experts"]) == len(seen["experts, backward"]) == num_chunks, what
            assert seen["shared"] == seen["shared, backward"] == [1], what


@pytest.mark.dist
def test_an_exchange_is_under_way_while_experts_compute():
    run_ranks(4, check_what_is_under_way)


class Idle(nn.Module):
    """An expert that makes nothing of no rows, as a user's may."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.fc(x) if x.shape[1] else torch.zeros_like(x)


def order_of_exchanges(name, num_chunks):
    """Labels in the order in which this rank began them, in forward and in backward, and the layer's counters."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = layer_of(rank, world, name, num_chunks, ranks_per_node=2, shared=True)
    layer.experts = Experts(Idle(), 4, first_id=4 * rank, initialize=fill).double()
    labels, alive = [], []
    begin = Pending.__init__

    def noted(self, *args, exchange, **options):
        begin(self, *args, exchange=exchange, **options)
        labels.append(exchange.label)
        alive.append(weakref.ref(self))

    Pending.__init__ = noted
    x, upstream = inputs_of(rank, UNEVEN[rank])
    y, aux, _ = layer(x)
    loss = (y * upstream).sum() + aux
    forward = len(labels)
    loss.backward()
    assert not any(reference() is not None for reference in alive), "kept while the loss is"
    return labels[:forward], labels[forward:], layer.counters


@pytest.mark.dist
@pytest.mark.parametrize("name", ["flat", "node+gpu"])
def test_all_ranks_begin_their_exchanges_in_one_order(name):
    answers = run_ranks(4, order_of_exchanges, name, 5)
    forward, backward, _ = answers[0]
    assert all(answer[:2] == (forward, backward) for answer in answers)
    # Backward has each exchange of rows and weights once more, by its name.
    moved = [label for label in forward if "references" not in label]
    assert sorted(backward) == sorted(f"{label}: backward" for label in moved)
    assert len(moved) == 5 * (5 if name == "node+gpu" else 3)
    rows = sum(answer[2].computed_rows for answer in answers)
    assert rows == sum(int(answer[2].routed_E.sum()) for answer in answers)


def begin_before_the_other():
    rank = dist.get_rank()
    exchange = Exchange(group=dist.group.WORLD, label="rows", timeout_s=20.0)
    token = torch.zeros(1)
    if rank == 1:
        dist.recv(token, src=0)  # comes only when rank 0 has begun its exchange
    pending = Pending(torch.full((2, 3), float(rank)), [1, 1], [1, 1], exchange=exchange)
    if rank == 0:
        dist.send(token, dst=1)
    assert pending.finish()[:, 0].tolist() == [0.0, 1.0]


@pytest.mark.dist
def test_to_begin_an_exchange_waits_for_nobody():
    run_ranks(2, begin_before_the_other)


# What it costs


def autocast_bytes(num_chunks):
    layer = layer_of(dist.get_rank(), dist.get_world_size(), "flat", num_chunks, ranks_per_node=1).float()
    x = inputs_of(dist.get_rank(), 16)[0].detach().float().requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        layer(x)
    return sum(kept.values()), 2 * sum(parameter.numel() for parameter in layer.experts.parameters())


def whole_and_cut_bytes():
    return autocast_bytes(1), autocast_bytes(4)


@pytest.mark.dist
def test_chunks_share_the_weights_that_autocast_casts():
    for (whole, weights), (cut, _) in run_ranks(2, whole_and_cut_bytes):
        assert cut - whole < weights / 4


def costs(name, num_chunks):
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = layer_of(rank, world, name, num_chunks, ranks_per_node=2)
    kinds, kept = [], {}
    all_to_all = dist.all_to_all_single

    def recorded(output, input, *splits, **options):
        kinds.append("rows" if input.dim() == 2 else str(input.dtype))
        return all_to_all(output, input, *splits, **options)

    x, upstream = inputs_of(rank, 12)
    own = {parameter.data_ptr() for parameter in layer.parameters()}

    def pack(tensor):
        if tensor.dim() == 2 and tensor.shape[1] == HIDDEN and tensor.is_floating_point():
            kept[tensor.data_ptr()] = len(tensor)
        return tensor

    with recorded_syncs() as syncs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", recorded)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y, aux, _ = layer(x)
        forward = list(kinds)
        ((y * upstream).sum() + aux).backward()
    rows = sum(count for address, count in kept.items() if address not in own)
    return forward, syncs, rows, layer.counters.traffic


def whole_and_cut_costs(name):
    return costs(name, 1), costs(name, 3)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["flat", "node+gpu"])
def test_chunks_cost_no_sync_no_metadata_exchange_and_no_memory(name):
    for whole, (kinds, syncs, chunked_rows, chunked_traffic) in run_ranks(4, whole_and_cut_costs, name):
        _, _, rows, traffic = whole
        assert syncs == ["tolist"]
        before = kinds[: kinds.index("rows")]
        assert before == ["torch.int64", "torch.int32"][: 2 if "node" in name else 1]
        assert kinds.count("torch.int64") + kinds.count("torch.int32") == len(before)
        assert chunked_traffic.between_nodes == traffic.between_nodes
        assert chunked_rows == rows
