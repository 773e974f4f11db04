"""Sequence-sharded layers: ranks that hold the same tokens each route, send and compute a slice of them.

Under tensor parallelism the ranks of a group come to the layer with equal inputs. Sharded, each keeps its slice of the
tokens, so that the router's logits, the rows sent and received and the shared experts' activations are a G-th of what
every rank would hold otherwise; an all-gather after combine gives all of them all results.

What each rank computes of the whole, and what makes it whole:

    input             slice                        backward gathers the slices of its gradient
    router, shared experts                         their gradients are of a slice's tokens: summed over the group
    capacity, drops   the whole batch's            an expert's queue is ranked over the choices of all slices
    auxiliary losses  own scores, all loads        loads are summed before, the losses after
    random draws      those of the whole batch     every rank draws for all tokens and keeps its slice of the numbers
    dropout           slice or rows, other masks   drawn from a stream by rank; the generators move alike on all ranks
    output            slice                        gathered; backward takes the slice of its gradient

So outputs, gradients, losses and the state of the random generator are those of the layer that is not sharded, up to
rounding, and bitwise the same on all ranks of the group. With dropout in the experts or shared experts the masks are
others than the unsharded layer's; outputs and states are still the same on all ranks.

Input that is a slice already (Megatron's sequence parallelism, DeepSpeed's Ulysses) is neither cut nor joined: only
sums remain. Each rank draws for its own tokens, and where an expert's queue goes by position, it goes rank by rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from .ops.collectives import Exchange, gather_over_ranks, sum_over_ranks
from .ops.dropout import own_dropout
from .ops.graph import nodes_between
from .ops.sequence import Slices, cut, gather_slices, join_slices, own_slice, sum_gradients, sum_losses


class TokenSplit:
    """The tokens of one forward, all of which this rank computes. :class:`SequenceShard` makes those it shares.

    *whole* is of all tokens of the batch, *own* of this rank's. Values by token (``_T``) lie part by part: equal
    sequences, or one part of all tokens.
    """

    def own(self, hidden_states: Tensor) -> Tensor:
        """This rank's tokens; differentiable."""
        return hidden_states

    def whole(self, output: Tensor, like: Tensor) -> Tensor:
        """The results of all tokens in the shape of ``like``; differentiable."""
        return output

    def own_mask(self, mask: Tensor | None) -> Tensor | None:
        """This rank's of a mask that came with the hidden states, in their order."""
        return mask

    def own_values(self, whole_T: Tensor) -> Tensor:
        """This rank's of values that are known for all tokens."""
        return whole_T

    def whole_values(self, own_T: Tensor) -> Tensor:
        """All ranks' values, in the order of the tokens."""
        return own_T

    def num_tokens(self, num_own: int) -> int:
        """Tokens of the whole batch, of which this rank has ``num_own``."""
        return num_own

    def own_ids(self, num_own: int, device: torch.device) -> Tensor:
        """Places of this rank's tokens in the whole batch, int64 ``[T]``."""
        return self.own_values(torch.arange(self.num_tokens(num_own), device=device))

    def draw(self, sample: Callable[[Tensor], Tensor], like_T: Tensor) -> Tensor:
        """``sample(like_T)``: random numbers for this rank's tokens; the generator moves as for the whole batch."""
        return sample(like_T)

    def totals(self, *counts: Tensor) -> tuple[Tensor, ...]:
        """Each summed over the ranks that share the batch, in its own dtype; exact for integers below 2**53."""
        return counts

    def total_loss(self, own_loss: Tensor) -> Tensor:
        """The sum of the ranks' parts of a loss; differentiable."""
        return own_loss

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """``module(*args, **kwargs)`` on own tokens, so that its parameters' gradients become the whole batch's.

        Raises ValueError where they could not, as backward would go past the sum over the ranks.
        """
        return module(*args, **kwargs)


class SequenceShard:
    """The ranks of ``exchange``'s group, which share one batch of tokens in slices.

    ``input_is_sharded``  each rank comes with its slice already, and its results stay with it
    ``sums_gradients``    gradients of the modules called on slices are summed over the group here; not where
                          somebody else does it, as DeepSpeed under Ulysses. A parameter marked ``sequence_parallel``
                          is summed by Megatron, and so never here
    """

    def __init__(self, exchange: Exchange, *, input_is_sharded: bool = False, sums_gradients: bool = True) -> None:
        self.exchange = exchange
        self.input_is_sharded = input_is_sharded
        self.sums_gradients = sums_gradients
        self.num_ranks = dist.get_world_size(exchange.group)
        self.rank = dist.get_rank(exchange.group)

    def split(self, hidden_states: Tensor, *, num_parts: int, modules: Iterable[nn.Module]) -> TokenSplit:
        """The split of one forward. ``modules`` are those that will be called on own tokens.

        Every part (equal sequences that lie one after the other, or all tokens as one) is cut alike, so that the
        slices of each belong to it as a whole.
        """
        summed: list[Tensor] = []
        if self.sums_gradients:
            found = {id(p): p for m in modules for p in m.parameters() if p.requires_grad and not _is_summed(p)}
            summed = list(found.values())
        kind = _ShardedTokens if self.input_is_sharded else _SlicedTokens
        return kind(self, hidden_states, num_parts=num_parts, summed=summed)


def _is_summed(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "sequence_parallel", False))


# Nodes of torch's, DeepSpeed's and Megatron's reentrant checkpoints.
_REENTRANT = ("CheckpointFunctionBackward", "CheckpointWithoutOutputFunctionBackward")


def _refuse_bypass(module: nn.Module, result: Any, ends: Sequence[Tensor], *, label: str, has_sums: bool) -> None:
    """Raises ValueError where backward would go past ``ends``, which are the module's inputs and summed parameters.

    A checkpoint whose recompute runs in backward takes the module's parameters as they are then, not as they were
    swapped in. The graph, and so the error, is alike on all ranks, those without tokens too, unless the module itself
    does otherwise with no tokens.
    """
    results = [part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, Tensor)]
    for node in nodes_between(results, ends):
        what = f"layer '{label}': {type(module).__name__} is computed on a slice of the tokens, and "
        if has_sums and node.name() in _REENTRANT:
            raise ValueError(
                f"{what}its checkpoint ({node.name().removesuffix('Backward')}) runs again inside of backward, where "
                "gradients would not be summed over the slices: give that checkpoint use_reentrant=False, or "
                "checkpoint the whole layer in its place"
            )
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and not _is_summed(leaf):
            names = [f"'{name}'" for name, parameter in module.named_parameters() if parameter is leaf]
            raise ValueError(
                f"{what}takes {names[0] if names else 'a parameter of another module'}, of shape "
                f"{tuple(leaf.shape)}, from a reference that was kept, so its gradient would not be summed over the "
                "slices: let forward take every parameter from the module that owns it, and that one be a part of "
                f"{type(module).__name__}"
            )


class _ShardedTokens(TokenSplit):
    """A slice of each of ``num_parts`` parts came to this rank, the other slices to the others."""

    def __init__(
        self, shard: SequenceShard, hidden_states: Tensor, *, num_parts: int, summed: Sequence[Tensor]
    ) -> None:
        self._exchange, self._num_ranks, self._rank = shard.exchange, shard.num_ranks, shard.rank
        self._num_parts, self._device = num_parts, hidden_states.device
        self._sums_gradients = shard.sums_gradients
        self._length = math.prod(hidden_states.shape[:-1]) // max(num_parts, 1)
        seen = sum_gradients(summed, shard.exchange)
        self._seen = {id(parameter): as_seen for parameter, as_seen in zip(summed, seen, strict=True)}

    @cached_property
    def _slices(self) -> Slices:
        """An all-gather and a wait for it: only a layer that drops, or is balanced by force, asks."""
        own = torch.tensor([self._length], device=self._device)
        sizes = gather_over_ranks(own, self._exchange.named("exchange of lengths"))
        return Slices(tuple(sizes.view(-1).tolist()), self._rank)

    def own_values(self, whole_T: Tensor) -> Tensor:
        return cut(self._by_part(whole_T), self._slices).flatten(0, 1)

    def whole_values(self, own_T: Tensor) -> Tensor:
        exchange = self._exchange.named("gather of choices")
        return gather_slices(self._by_part(own_T), self._slices, exchange).flatten(0, 1)

    def num_tokens(self, num_own: int) -> int:
        return self._num_parts * self._slices.length

    def totals(self, *counts: Tensor) -> tuple[Tensor, ...]:
        flat = torch.cat([count.reshape(-1).double() for count in counts])
        sums = sum_over_ranks(flat, self._exchange.named("sum of loads")).split([count.numel() for count in counts])
        return tuple(total.view_as(count).to(count.dtype) for total, count in zip(sums, counts, strict=True))

    def total_loss(self, own_loss: Tensor) -> Tensor:
        return sum_losses(own_loss, self._exchange)

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen = {name: self._seen[id(p)] for name, p in module.named_parameters() if id(p) in self._seen}
        with own_dropout(module, self._rank, self._device):
            result = functional_call(module, seen, args, kwargs)
        if self._sums_gradients and torch.is_grad_enabled():
            ends = [*seen.values(), *(arg for arg in args if isinstance(arg, Tensor))]
            _refuse_bypass(module, result, ends, label=self._exchange.label, has_sums=bool(seen))
        return result

    def _by_part(self, values_T: Tensor) -> Tensor:
        length = values_T.shape[0] // max(self._num_parts, 1)
        return values_T.reshape(self._num_parts, length, *values_T.shape[1:])


class _SlicedTokens(_ShardedTokens):
    """All of each of ``num_parts`` parts came to every rank; each computes a slice of it."""

    @cached_property
    def _slices(self) -> Slices:
        return Slices.even(self._length, num_ranks=self._num_ranks, rank=self._rank)

    def own(self, hidden_states: Tensor) -> Tensor:
        x_PLD = hidden_states.reshape(self._num_parts, self._length, hidden_states.shape[-1])
        return own_slice(x_PLD, self._slices, self._exchange)

    def whole(self, output: Tensor, like: Tensor) -> Tensor:
        return join_slices(output, self._slices, self._exchange).view_as(like)

    def own_mask(self, mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        if mask.numel() != self._num_parts * self._length:
            raise ValueError(f"used_token has {mask.numel()} entries for {self._num_parts * self._length} tokens")
        return self.own_values(mask.reshape(-1))

    def draw(self, sample: Callable[[Tensor], Tensor], like_T: Tensor) -> Tensor:
        whole_T = sample(like_T.new_empty((self.num_tokens(like_T.shape[0]), *like_T.shape[1:])))
        return self.own_values(whole_T)
