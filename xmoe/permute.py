"""From routing to the padding-free token buffer: kept slots in expert order, as indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .ops._backend import kernels_for
from .ops.gather import select_slots
from .types import Routing, TokenBuffer


def permute(routing: Routing, *, decide: Callable[[Callable[[], Any]], Any]) -> TokenBuffer:
    """Sorts the slots by expert (stable, dropped ones last). No row is copied; the weights keep their gradient.

    ``decide`` runs the sort, or returns the recorded one (see ``xmoe.replay``).
    """
    num_tokens, top_k = routing.topk_ids_TK.shape
    num_experts = routing.tokens_per_expert_E.numel()
    kernels = kernels_for(routing.topk_weights_TK)
    slot_ids_S, places_S = decide(lambda: kernels.sort_slots(routing.topk_ids_TK, num_experts))
    return TokenBuffer(
        slot_ids_S=slot_ids_S,
        places_S=places_S,
        combine_weights_S=select_slots(routing.topk_weights_TK, slot_ids_S, places_S),
        tokens_per_expert_E=routing.tokens_per_expert_E,
        num_tokens=num_tokens,
        top_k=top_k,
    )
