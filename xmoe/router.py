"""Top-k routing: logits, scores, selection, capacity, combine weights and auxiliary losses.

Everything runs in at least float32 whatever the model's dtype. Selection is a decision (integers, made once and
replayed under activation checkpointing); scores, weights and losses are differentiable and follow from it.

Sources: top-1 and top-2 gating with capacity, Switch Transformer (arXiv 2101.03961, sections 2.1-2.2) and GShard
(arXiv 2006.16668, algorithm 1); z-loss, ST-MoE (arXiv 2202.08906, eq. 5); sigmoid scores and auxiliary-loss-free
balancing, DeepSeek-V3 (arXiv 2412.19437, eqs. 12-16) and arXiv 2408.15664, algorithm 1; groups of experts,
DeepSeek-V2 (arXiv 2405.04434, section 2.2.2) and DeepSeek-V3 (section 2.1.2). The load-balancing loss is that of
DeepSpeed's ``top1gating``, ``top2gating`` and ``topkgating``, or of another scope (``xmoe.balance``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .balance import BalanceLoads, balancing_loss, loads_of_parts, loads_of_step
from .kernels.reference import GateRule, Gating, accumulator_dtype
from .ops._backend import kernels_for
from .ops.routing import gate_tokens, router_logits
from .replay import Decisions, fresh_decisions
from .router_settings import RouterSettings, check_settings
from .types import Routing


@dataclass(frozen=True, kw_only=True)
class _Selection:
    """The router's decision. ``balance`` is what the load-balancing loss takes as constant."""

    ids_TK: Tensor
    selected_per_expert_E: Tensor
    tokens_per_expert_E: Tensor
    balance: BalanceLoads


class TopKRouter(nn.Module):
    """Routes each token to K of E experts.

    Parameters and buffers: ``wg.weight`` ``[E, D]``; with ``correction_bias=True`` a saved float32 buffer
    ``correction_bias`` ``[E]``, which stays float32 when the model is converted, and ``step_counts`` ``[E]`` (not
    saved), the selections since the last optimizer step. With the loss over the global batch there is a saved buffer
    ``last_step_counts`` ``[E]``, the selections of the last optimizer step by all ranks.

    ``steps_end``  somebody calls :meth:`end_step` after each optimizer step; else every forward stands alone

    Raises ValueError when ``top_k`` is not in 1..num_experts, or when the groups do not fit it.
    """

    wg: nn.Linear
    correction_bias: Tensor | None
    step_counts: Tensor
    last_step_counts: Tensor | None

    def __init__(
        self, hidden_size: int, num_experts: int, *, settings: RouterSettings, correction_bias: bool = False
    ) -> None:
        nn.Module.__init__(self)
        check_settings(settings, num_experts)
        self.num_experts = num_experts
        self.wg = nn.Linear(hidden_size, num_experts, bias=False)
        self.register_buffer("correction_bias", torch.zeros(num_experts) if correction_bias else None)
        self.register_buffer("step_counts", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("last_step_counts", None)
        self.steps_end = False
        self.configure(settings)

    def configure(self, settings: RouterSettings) -> None:
        """Replaces the settings. Raises ValueError when they do not fit the router."""
        check_settings(settings, self.num_experts)
        self.settings = settings
        if settings.aux_loss_scope != "global_batch":
            self.last_step_counts = None
        elif self.last_step_counts is None:
            self.last_step_counts = torch.zeros_like(self.step_counts)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # A checkpoint of DeepSpeed's layer, or of another scope of the loss, has no counts or needless ones.
        key = f"{prefix}last_step_counts"
        if self.last_step_counts is None:
            state_dict.pop(key, None)
        elif key not in state_dict:
            state_dict[key] = torch.zeros_like(self.last_step_counts)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        # A bias step of 1e-3 is lost in bfloat16: the buffer follows moves between devices, never casts.
        bias = self.correction_bias
        super()._apply(fn, recurse)
        moved = self.correction_bias
        if bias is not None and moved is not None and moved.dtype != torch.float32:
            self.correction_bias = moved.float() if bias.is_meta else bias.to(moved.device)
        return self

    def forward(
        self,
        x_TD: Tensor,
        used_token_T: Tensor | None = None,
        *,
        num_sequences: int = 1,
        decide: Decisions | None = None,
    ) -> Routing:
        """Routes ``x_TD``. ``used_token_T``: tokens that are zero or False there take no expert.

        ``num_sequences`` equal sequences lie one after the other in ``x_TD``. ``decide`` runs the selection, or
        returns the recorded one (see ``xmoe.replay``).
        """
        decide = fresh_decisions() if decide is None else decide
        with torch.autocast(x_TD.device.type, enabled=False):
            return self._route(x_TD, self._mask(used_token_T, x_TD.shape[0]), num_sequences, decide)

    def trains(self, decide: Decisions) -> bool:
        """Whether this forward is a training forward, or its first run under activation checkpointing."""
        return self.training and (torch.is_grad_enabled() or decide.recorded)

    def _route(self, x_TD: Tensor, used_T: Tensor | None, num_sequences: int, decide: Decisions) -> Routing:
        settings = self.settings
        # Random draws stand outside of the decision, so that a recompute moves the generator as the forward did.
        if self.training and settings.input_jitter:
            x_TD = x_TD.to(accumulator_dtype(x_TD.dtype))
            x_TD = x_TD * _uniform(x_TD, 1 - settings.input_jitter, 1 + settings.input_jitter)
        logits_TE = router_logits(x_TD, self.wg.weight)
        noise = self._draw(logits_TE)
        counted_T = None if settings.strict_compat else used_T
        num_parts = num_sequences if settings.aux_loss_scope == "sequence" else 1
        tokens_B = _tokens(logits_TE, counted_T, num_parts)
        gate = partial(gate_tokens, logits_TE, used_T=counted_T, num_parts=num_parts)

        def gate_anew(rule: GateRule) -> Gating:
            return gate(rule, bias_E=self.correction_bias, ids_TK=self._ids_chosen_here(logits_TE, noise, used_T))

        # Where nothing will be dropped, one launch decides, weighs and sums.
        gating = None if decide.replaying or settings.drop_tokens else gate_anew(settings.gate_rule)

        @torch.no_grad()
        def select() -> _Selection:
            wanted = gate_anew(settings.scores_rule) if gating is None else gating
            return self._select(wanted, logits_TE, noise, self._loads(wanted, gate, tokens_B))

        selection = decide(select)
        if gating is None:
            gating = gate(settings.gate_rule, ids_TK=selection.ids_TK)
        return Routing(
            topk_ids_TK=selection.ids_TK,
            topk_weights_TK=gating.weights_TK,
            selected_per_expert_E=selection.selected_per_expert_E,
            tokens_per_expert_E=selection.tokens_per_expert_E,
            aux_loss=self._aux_loss(gating, tokens_B, selection.balance),
        )

    def _mask(self, used_token_T: Tensor | None, num_tokens: int) -> Tensor | None:
        if used_token_T is None or (self.settings.strict_compat and self.settings.top_k > 1):
            return None
        if used_token_T.numel() != num_tokens:
            raise ValueError(f"used_token has {used_token_T.numel()} entries for {num_tokens} tokens")
        return used_token_T.reshape(-1) != 0

    def _draw(self, logits_TE: Tensor) -> _Noise:
        """The random numbers this forward's selection uses, in DeepSpeed's order of drawing."""
        settings, noise = self.settings, _Noise()
        active = self.training or settings.strict_compat
        unbiased = self.correction_bias is None  # noise on logits would undo a bias on scores
        if settings.top_k == 1:
            if settings.noisy_logits and self.training and unbiased:
                noise.gumbel_TE = _gumbel(logits_TE)
            if settings.drops_by == "random" and active and (settings.drop_tokens or settings.strict_compat):
                noise.priority_TE = _uniform(logits_TE, 0.0, 1.0)
            return noise
        if settings.top_k == 2 and settings.sample_second_expert and active and unbiased:
            noise.gumbel_TE = _gumbel(logits_TE)
        if settings.drops_by == "random" and settings.drop_tokens and self.training:
            noise.priority_TE = _uniform(logits_TE, 0.0, 1.0)
        return noise

    def _loads(self, wanted: Gating, gate: Callable[..., Gating], tokens_B: Tensor) -> BalanceLoads:
        """What the load-balancing loss takes as constant, from the selections before any capacity drop."""
        settings, counts_BE = self.settings, wanted.counts_BE
        if settings.aux_loss_scope == "sequence":
            if self.correction_bias is not None or settings.num_expert_groups is not None:
                # DeepSeek-V3, eq. 18: what the scores alone would select.
                counts_BE = gate(replace(settings.scores_rule, num_groups=1, num_limited=1)).counts_BE
        elif self.last_step_counts is not None:
            if self.steps_end:
                return loads_of_step(self.last_step_counts, tokens_B, top_k=settings.top_k)
        elif settings.top_k == 2:
            counts_BE = kernels_for(wanted.weights_TK).count_ids(wanted.ids_TK[:, :1], self.num_experts)[None]
        return loads_of_parts(counts_BE, tokens_B)

    def _select(self, wanted: Gating, logits_TE: Tensor, noise: _Noise, loads: BalanceLoads) -> _Selection:
        """The decision ``wanted``, less the assignments that find their expert's capacity used up."""
        settings, ids_TK = self.settings, wanted.ids_TK
        selected_E = tokens_E = wanted.counts_BE.sum(dim=0)
        if settings.drop_tokens and ids_TK.numel():
            capacity = settings.capacity(ids_TK.shape[0], self.num_experts, training=self.training)
            ids_TK = ids_TK.masked_fill(self._places(wanted, logits_TE, noise, capacity) >= capacity, -1)
            tokens_E = selected_E.clamp(max=capacity)
        return _Selection(ids_TK=ids_TK, selected_per_expert_E=selected_E, tokens_per_expert_E=tokens_E, balance=loads)

    @torch.no_grad()
    def _ids_chosen_here(self, logits_TE: Tensor, noise: _Noise, used_T: Tensor | None) -> Tensor | None:
        """``[T, K]``, best first, where noise or another rule chooses; None where the gating kernel does."""
        settings, kernels = self.settings, kernels_for(logits_TE)
        if settings.force_balance:
            slots = torch.arange(logits_TE.shape[0] * settings.top_k, device=logits_TE.device)
            ids_TK = (slots % self.num_experts).view(-1, settings.top_k)
        elif noise.gumbel_TE is not None:
            ids_TK = self._choose_with_noise(logits_TE, noise.gumbel_TE)
        elif settings.strict_compat:
            bias_E = 0.0 if self.correction_bias is None else self.correction_bias
            ids_TK = kernels.top_k_ids(self._scores(logits_TE) + bias_E, settings.top_k)
        else:
            return None
        return ids_TK if used_T is None else ids_TK.masked_fill(~used_T[:, None], -1)

    def _choose_with_noise(self, logits_TE: Tensor, gumbel_TE: Tensor) -> Tensor:
        """The first of two experts by its logit, the second (or the only one) by its logit and noise."""
        settings, kernels = self.settings, kernels_for(logits_TE)
        # Logits order experts as scores do, and still where scores round to equal numbers, as 1 or 0.
        ranking_TE = self._scores(logits_TE) if settings.strict_compat else logits_TE
        if settings.num_expert_groups is not None:
            allowed_TE = self._in_best_groups(logits_TE)
            ranking_TE, logits_TE = (x_TE.masked_fill(~allowed_TE, float("-inf")) for x_TE in (ranking_TE, logits_TE))
        noisy_TE = logits_TE + gumbel_TE
        if settings.top_k == 1:
            return kernels.top_k_ids(noisy_TE, 1)
        first_T1 = kernels.top_k_ids(ranking_TE, 1)
        second_T1 = kernels.top_k_ids(noisy_TE.scatter(1, first_T1, float("-inf")), 1)
        return torch.cat([first_T1, second_T1], dim=1)

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.softmax(dim=1) if self.settings.score_function == "softmax" else logits_TE.sigmoid()

    def _in_best_groups(self, logits_TE: Tensor) -> Tensor:
        rule = self.settings.gate_rule
        return kernels_for(logits_TE).experts_of_best_groups(
            logits_TE if rule.group_score == "max" else self._scores(logits_TE),
            num_groups=rule.num_groups,
            num_limited=rule.num_limited,
            num_counted=rule.num_counted,
        )

    def _places(self, wanted: Gating, logits_TE: Tensor, noise: _Noise, capacity: int) -> Tensor:
        """Place of each assignment in its expert's queue; those at capacity and beyond are dropped."""
        settings, ids_TK = self.settings, wanted.ids_TK
        if settings.drops_by == "probs":
            priorities = wanted.weights_TK  # the scores
        elif noise.priority_TE is not None:
            priorities = noise.priority_TE.gather(1, ids_TK.clamp(min=0).long())
        elif settings.top_k == 1 and settings.strict_compat:
            # DeepSpeed's positions are whatever topk makes of equal numbers.
            gather = ids_TK.clamp(min=0).long()
            chosen_TE = torch.zeros_like(logits_TE, dtype=torch.int64).scatter_(1, gather, (ids_TK >= 0).long())
            kept = chosen_TE.topk(min(capacity, len(ids_TK)), dim=0).indices
            return capacity * (1 - torch.zeros_like(chosen_TE).scatter_(0, kept, 1).gather(1, gather))
        elif settings.top_k == 2:
            # GShard fills the buffers with every token's first choice before any second choice.
            priorities = -torch.arange(2, device=ids_TK.device).expand_as(ids_TK)
        else:
            priorities = torch.zeros_like(ids_TK)
        return kernels_for(logits_TE).ranks_within_expert(ids_TK, priorities, self.num_experts)

    def _aux_loss(self, gating: Gating, tokens_B: Tensor, loads: BalanceLoads) -> Tensor:
        """``aux_loss_coefficient * E / K' * balancing_loss + z_loss_coefficient * mean(logsumexp^2)``, a scalar.

        Shares are softmax scores, or sigmoid scores over their sum. K' is K, but 1 for DeepSpeed's loss at k = 2,
        where only first choices count. Without tokens the loss is 0 and stays connected to the graph.
        """
        settings = self.settings
        choices = 1 if settings.top_k == 2 and settings.aux_loss_scope == "micro_batch" else settings.top_k
        loss = balancing_loss(gating.share_sums_BE, loads)
        loss = loss * (settings.aux_loss_coefficient * self.num_experts / choices)
        if settings.z_loss_coefficient:
            mean_square = gating.z_sums_B.sum() / tokens_B.sum().clamp(min=1)
            loss = loss + settings.z_loss_coefficient * mean_square
        return loss

    def count_step(self, selected_per_expert_E: Tensor) -> None:
        """Adds one forward's selections to the counts of the optimizer step in progress."""
        self.step_counts += selected_per_expert_E

    @property
    def balances_steps(self) -> bool:
        """Whether something of this router follows the loads of whole optimizer steps."""
        return self.correction_bias is not None or self.last_step_counts is not None

    def end_step(self, step_counts_E: Tensor) -> None:
        """Balances by an applied optimizer step, whose selections by all ranks are ``step_counts_E``."""
        self.update_correction_bias(step_counts_E)
        if self.last_step_counts is not None:
            self.last_step_counts.copy_(step_counts_E)

    @torch.no_grad()
    def update_correction_bias(self, step_counts_E: Tensor) -> None:
        """One step of the auxiliary-loss-free balancing: up for experts below the mean load, down above it.

        ``step_counts_E`` are the selections of the whole optimizer step, summed over all ranks. The bias is centred
        again, so that it cannot drift; without any token it does not move.
        """
        if self.correction_bias is None:
            return
        load_E = step_counts_E.to(torch.float32)
        self.correction_bias += self.settings.correction_bias_update_rate * torch.sign(load_E.mean() - load_E)
        self.correction_bias -= self.correction_bias.mean()


@dataclass
class _Noise:
    gumbel_TE: Tensor | None = None
    priority_TE: Tensor | None = None


def _tokens(logits_TE: Tensor, counted_T: Tensor | None, num_parts: int) -> Tensor:
    """``[B]``: how many tokens of each part count in the losses' means; in the logits' dtype."""
    part = logits_TE.shape[0] // max(num_parts, 1)
    if counted_T is None:
        return logits_TE.new_full((num_parts,), part)
    return counted_T.view(num_parts, part).sum(dim=1).to(logits_TE.dtype)


def _gumbel(like: Tensor) -> Tensor:
    zero, one = like.new_zeros(()), like.new_ones(())
    return torch.distributions.Gumbel(zero, one).rsample(like.shape)


def _uniform(like: Tensor, low: float, high: float) -> Tensor:
    return torch.distributions.Uniform(like.new_tensor(low), like.new_tensor(high)).rsample(like.shape)
