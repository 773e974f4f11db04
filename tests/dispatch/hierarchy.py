"""Hierarchical dispatch without processes: all ranks of a group at once, their exchanges done by slicing."""

import torch

from xmoe.dispatch.hierarchical_plan import (
    Arrivals,
    Where,
    arrive,
    depart,
    read_sizes,
    references_by_chunk,
    references_of,
)
from xmoe.kernels import reference
from xmoe.permute import permute
from xmoe.replay import fresh_decisions
from xmoe.types import Routing

LEVELS = ["gpu", "node", "node+gpu"]


def routing_of(tokens, num_experts, k, kind, seed):
    """A routing of one rank's tokens; weights tell slots apart.

    ``kind`` is "random", "rank 0" (all choose the first experts), "skewed" (low ids far more often) or "dropped".
    """
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, num_experts, generator=generator)
    if kind == "rank 0":
        scores[:, :k] += 1
    if kind == "skewed":
        scores -= torch.linspace(0, 1, num_experts)
    ids = scores.argsort(dim=1, descending=True)[:, :k].int()
    if kind == "dropped":
        ids = ids.masked_fill(torch.rand(tokens, k, generator=generator) < 0.4, -1)
    counts = torch.stack([(ids == e).sum() for e in range(num_experts)])
    weights = torch.rand(tokens, k, generator=generator).masked_fill(ids < 0, 0.0).requires_grad_()
    return Routing(
        topk_ids_TK=ids,
        topk_weights_TK=weights,
        selected_per_expert_E=counts,
        tokens_per_expert_E=counts,
        aux_loss=torch.zeros(()),
    )


def buffers_of(routings):
    return [permute(routing, decide=fresh_decisions())[0] for routing in routings]


def plans_of(buffers, layout, levels, kernels=reference):
    """The plan of every rank."""
    (plans,) = plans_of_chunks([buffers], layout, levels, kernels)
    return plans


def plans_of_chunks(chunks, layout, levels, kernels=reference):
    """The plans of every rank, by chunk; ``chunks`` has the buffers of every rank."""
    ranks = range(layout.num_ranks)
    wheres = [
        Where.of(layout, rank, per_gpu="gpu" in levels, per_node="node" in levels, device=torch.device("cpu"))
        for rank in ranks
    ]
    departures = [[depart(buffers[rank], wheres[rank], kernels) for buffers in chunks] for rank in ranks]
    messages = torch.stack([torch.cat([one.message_WC for one in departures[rank]], dim=1) for rank in ranks])
    arrivals = [
        [Arrivals.of(part, wheres[rank]) for part in messages[:, rank].chunk(len(chunks), dim=1)] for rank in ranks
    ]
    sizes = [read_sizes(departures[rank], arrivals[rank]) for rank in ranks]
    sent = [references_of(departures[rank], sizes[rank]) for rank in ranks]
    received = exchange(
        sent,
        [_summed([size.references_sent for size in sizes[rank]]) for rank in ranks],
        [_summed([size.references_received for size in sizes[rank]]) for rank in ranks],
    )
    references = [references_by_chunk(received[rank], arrivals[rank], sizes[rank]) for rank in ranks]
    return [
        [
            arrive(
                departures[rank][chunk],
                arrivals[rank][chunk],
                references[rank][chunk],
                sizes[rank][chunk],
                where=wheres[rank],
                top_k=buffers[rank].top_k,
            )
            for rank in ranks
        ]
        for chunk, buffers in enumerate(chunks)
    ]


def _summed(lists):
    return [sum(numbers) for numbers in zip(*lists, strict=True)]


def exchange(rows, send, recv):
    """An uneven all-to-all of all ranks' rows; what is sent must be what is expected."""
    parts = [list(part.split(splits)) for part, splits in zip(rows, send, strict=True)]
    ranks = range(len(rows))
    for rank in ranks:
        assert recv[rank] == [send[source][rank] for source in ranks]
    return [torch.cat([parts[source][rank] for source in ranks]) for rank in ranks]


def _exchange_in_nodes(rows, send, recv, layout):
    found = [None] * layout.num_ranks
    for members in layout.members:
        chosen = exchange([rows[r] for r in members], [send[r] for r in members], [recv[r] for r in members])
        for rank, part in zip(members, chosen, strict=True):
            found[rank] = part
    return found


def send_outward(xs, plans, layout):
    """The rows that reach every rank."""
    firsts = [plan.first for plan in plans]
    copies = [x[hop.slot_ids_N.long() // hop.places_TK.shape[1]] for x, hop in zip(xs, firsts, strict=True)]
    arrived = exchange(copies, [hop.send_splits for hop in firsts], [hop.recv_splits for hop in firsts])
    seconds = [plan.second for plan in plans]
    if seconds[0] is None:
        return arrived
    copies = [x[hop.slot_ids_N.long() // hop.places_TK.shape[1]] for x, hop in zip(arrived, seconds, strict=True)]
    more = _exchange_in_nodes(
        copies, [hop.send_splits for hop in seconds], [hop.recv_splits for hop in seconds], layout
    )
    return [torch.cat(pair) for pair in zip(arrived, more, strict=True)]


def bring_home(ys, plans, layout):
    """The sums of every rank's tokens."""
    firsts, seconds = [plan.first for plan in plans], [plan.second for plan in plans]
    if seconds[0] is not None:
        num_first = [sum(hop.recv_splits) for hop in firsts]
        back = _exchange_in_nodes(
            [y[n:] for y, n in zip(ys, num_first, strict=True)],
            [hop.recv_splits for hop in seconds],
            [hop.send_splits for hop in seconds],
            layout,
        )
        ys = [
            reference.combine_rows(torch.cat([y[:n], passed]), hop.places_TK)
            for y, n, passed, hop in zip(ys, num_first, back, seconds, strict=True)
        ]
    back = exchange(ys, [hop.recv_splits for hop in firsts], [hop.send_splits for hop in firsts])
    return [reference.combine_rows(rows, hop.places_TK) for rows, hop in zip(back, firsts, strict=True)]


def wanted_assignments(routings, rank, num_local):
    """``(source, slot, local expert)`` of the assignments of a rank, in the order every dispatcher gives them."""
    return [
        (source, slot, expert)
        for expert in range(num_local)
        for source, routing in enumerate(routings)
        for slot, found in enumerate(routing.topk_ids_TK.flatten().tolist())
        if found == rank * num_local + expert
    ]


def wanted_rows(routing, source, layout, levels, num_local):
    """Counted by a loop over a token's experts: ``(rows in its node, rows between nodes, targets by (token, node))``.

    Rows are told apart by (token, target); a target is a GPU, or an expert where GPUs are no level, or a node.
    """
    own = layout.nodes[source]
    own_rows, between, targets = set(), set(), {}
    for slot, expert in enumerate(routing.topk_ids_TK.flatten().tolist()):
        if expert < 0:
            continue
        token, rank = slot // routing.topk_ids_TK.shape[1], expert // num_local
        node = layout.nodes[rank]
        last = (token, rank) if "gpu" in levels else (token, rank, expert)
        if node == own:
            own_rows.add(last)
        elif "node" in levels:
            between.add((token, node))
            targets.setdefault((token, node), set()).add(last)
        else:
            between.add(last)
    return own_rows, between, targets
