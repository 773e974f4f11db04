"""From routing to the padding-free token buffer: kept slots in expert order, as indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .ops._backend import kernels_for
from .ops.gather import select_slots
from .types import Routing, TokenBuffer


def permute(routing: Routing, *, decide: Callable[[Callable[[], Any]], Any], num_chunks: int = 1) -> list[TokenBuffer]:
    """Sorts the slots of each chunk of tokens by expert (stable, dropped ones last): a buffer for each chunk.

    Chunks are of consecutive tokens and differ in length by one at most; with fewer tokens than chunks some have none.
    No row is copied; the weights keep their gradient. ``decide`` runs the sort, or returns the recorded one (see
    ``xmoe.replay``).
    """
    (num_tokens, top_k), num_experts = routing.topk_ids_TK.shape, routing.tokens_per_expert_E.numel()
    sizes = [num_tokens // num_chunks + (chunk < num_tokens % num_chunks) for chunk in range(num_chunks)]
    ids, weights = split_tokens(routing.topk_ids_TK, sizes), split_tokens(routing.topk_weights_TK, sizes)
    kernels = kernels_for(routing.topk_weights_TK)
    # The router has counted the whole, which one chunk is.
    counts = [routing.tokens_per_expert_E] if num_chunks == 1 else [kernels.count_ids(x, num_experts) for x in ids]
    ordered = decide(lambda: [kernels.sort_slots(ids_TK, num_experts) for ids_TK in ids])
    return [
        TokenBuffer(
            slot_ids_S=slot_ids_S,
            places_S=places_S,
            combine_weights_S=select_slots(weights_TK, slot_ids_S, places_S),
            tokens_per_expert_E=counts_E,
            num_tokens=num_tokens,
            top_k=top_k,
        )
        for num_tokens, weights_TK, counts_E, (slot_ids_S, places_S) in zip(
            sizes, weights, counts, ordered, strict=True
        )
    ]


def split_tokens(values: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """``values`` by chunks of tokens; itself where there is one, as backward of a split is a copy."""
    return (values,) if len(sizes) == 1 else values.split(list(sizes))
