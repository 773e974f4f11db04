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
from .sequence_shard import TokenSplit
from .types import Routing


@dataclass(frozen=True, kw_only=True)
class _Selection:
    """The router's decision. ``balance`` is what the load-balancing loss takes as constant.

    ``num_counted``  tokens counted in the losses' means, a scalar; of all ranks that share the batch, as ``balance``
    """

    ids_TK: Tensor
    selected_per_expert_E: Tensor
    selected_by_all_E: Tensor
    tokens_per_expert_E: Tensor
    balance: BalanceLoads
    num_counted: Tensor


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
        split: TokenSplit | None = None,
    ) -> Routing:
        """Routes ``x_TD``. ``used_token_T``: tokens that are zero or False there take no expert.

        ``num_sequences`` equal sequences lie one after the other in ``x_TD``. ``decide`` runs the selection, or
        returns the recorded one (see ``xmoe.replay``). ``split`` says of which batch these are this rank's tokens.
        """
        decide = fresh_decisions() if decide is None else decide
        split = TokenSplit() if split is None else split
        with torch.autocast(x_TD.device.type, enabled=False):
            return self._route(x_TD, self._mask(used_token_T, x_TD.shape[0]), num_sequences, decide, split)

    def num_parts(self, num_sequences: int) -> int:
        """Into how many equal parts the losses divide the tokens of ``num_sequences`` sequences."""
        return num_sequences if self.settings.aux_loss_scope == "sequence" else 1

    def trains(self, decide: Decisions) -> bool:
        """Whether this forward is a training forward, or its first run under activation checkpointing."""
        return self.training and (torch.is_grad_enabled() or decide.recorded)

    def _route(
        self, x_TD: Tensor, used_T: Tensor | None, num_sequences: int, decide: Decisions, split: TokenSplit
    ) -> Routing:
        settings = self.settings
        # Random draws stand outside of the decision, so that a recompute moves the generator as the forward did.
        if self.training and settings.input_jitter:
            x_TD = x_TD.to(accumulator_dtype(x_TD.dtype))
            x_TD = x_TD * split.draw(
                partial(_uniform, low=1 - settings.input_jitter, high=1 + settings.input_jitter), x_TD
            )
        logits_TE = router_logits(x_TD, self.wg.weight)
        noise = self._draw(logits_TE, split)
        counted_T = None if settings.strict_compat else used_T
        num_parts = self.num_parts(num_sequences)
        tokens_B = _tokens(logits_TE, counted_T, num_parts)
        gate = partial(gate_tokens, logits_TE, used_T=counted_T, num_parts=num_parts)

        def gate_anew(rule: GateRule) -> Gating:
            ids_TK = self._ids_chosen_here(logits_TE, noise, used_T, split)
            return gate(rule, bias_E=self.correction_bias, ids_TK=ids_TK)

        # Where nothing will be dropped, one launch decides, weighs and sums.
        gating = None if decide.replaying or settings.drop_tokens else gate_anew(settings.gate_rule)

        @torch.no_grad()
        def select() -> _Selection:
            wanted = gate_anew(settings.scores_rule) if gating is None else gating
            kept_TK = self._keep(wanted, noise, split)
            return self._select(wanted, kept_TK, self._balance_counts(wanted, gate), tokens_B, split)

        selection = decide(select)
        if gating is None:
            gating = gate(settings.gate_rule, ids_TK=selection.ids_TK)
        return Routing(
            topk_ids_TK=selection.ids_TK,
            topk_weights_TK=gating.weights_TK,
            selected_per_expert_E=selection.selected_per_expert_E,
            selected_by_all_E=selection.selected_by_all_E,
            tokens_per_expert_E=selection.tokens_per_expert_E,
            aux_loss=split.total_loss(self._aux_loss(gating, selection)),
        )

    def _mask(self, used_token_T: Tensor | None, num_tokens: int) -> Tensor | None:
        if used_token_T is None or (self.settings.strict_compat and self.settings.top_k > 1):
            return None
        if used_token_T.numel() != num_tokens:
            raise ValueError(f"used_token has {used_token_T.numel()} entries for {num_tokens} tokens")
        return used_token_T.reshape(-1) != 0

    def _draw(self, logits_TE: Tensor, split: TokenSplit) -> _Noise:
        """The random numbers this forward's selection uses, in DeepSpeed's order of drawing."""
        settings, noise = self.settings, _Noise()
        active = self.training or settings.strict_compat
        unbiased = self.correction_bias is None  # noise on logits would undo a bias on scores
        if settings.top_k == 1:
            if settings.noisy_logits and self.training and unbiased:
                noise.gumbel_TE = split.draw(_gumbel, logits_TE)
            if settings.drops_by == "random" and active and (settings.drop_tokens or settings.strict_compat):
                noise.priority_TE = split.draw(_uniform, logits_TE)
            return noise
        if settings.top_k == 2 and settings.sample_second_expert and active and unbiased:
            noise.gumbel_TE = split.draw(_gumbel, logits_TE)
        if settings.drops_by == "random" and settings.drop_tokens and self.training:
            noise.priority_TE = split.draw(_uniform, logits_TE)
        return noise

    def _balance_counts(self, wanted: Gating, gate: Callable[..., Gating]) -> Tensor:
        """``[B, E]``: the selections that the load-balancing loss counts, before any capacity drop."""
        settings = self.settings
        if settings.aux_loss_scope == "sequence":
            if self.correction_bias is not None or settings.num_expert_groups is not None:
                # DeepSeek-V3, eq. 18: what the scores alone would select.
                return gate(replace(settings.scores_rule, num_groups=1, num_limited=1)).counts_BE
        elif self.last_step_counts is None and settings.top_k == 2:
            return kernels_for(wanted.weights_TK).count_ids(wanted.ids_TK[:, :1], self.num_experts)[None]
        return wanted.counts_BE

    def _select(
        self, wanted: Gating, kept_TK: Tensor, counts_BE: Tensor, tokens_B: Tensor, split: TokenSplit
    ) -> _Selection:
        """The decision, with loads over all tokens of the batch, whichever rank's."""
        selected_E = tokens_E = wanted.counts_BE.sum(dim=0)
        if kept_TK is not wanted.ids_TK:
            tokens_E = kernels_for(wanted.weights_TK).count_ids(kept_TK, self.num_experts)
        selected_by_all_E, counts_BE, tokens_B = split.totals(selected_E, counts_BE, tokens_B)
        if self.last_step_counts is not None and self.steps_end:
            loads = loads_of_step(self.last_step_counts, tokens_B, top_k=self.settings.top_k)
        else:
            loads = loads_of_parts(counts_BE, tokens_B)
        return _Selection(
            ids_TK=kept_TK,
            selected_per_expert_E=selected_E,
            selected_by_all_E=selected_by_all_E,
            tokens_per_expert_E=tokens_E,
            balance=loads,
            num_counted=tokens_B.sum(),
        )

    def _keep(self, wanted: Gating, noise: _Noise, split: TokenSplit) -> Tensor:
        """``wanted.ids_TK``, -1 where an assignment finds its expert's capacity used up, by tokens of whatever rank."""
        settings, ids_TK = self.settings, wanted.ids_TK
        num_tokens = split.num_tokens(ids_TK.shape[0]) if settings.drop_tokens else 0
        if not num_tokens:
            return ids_TK
        capacity = settings.capacity(num_tokens, self.num_experts, training=self.training)
        priorities_TK = split.whole_values(self._priorities(wanted, noise))
        places_TK = split.own_values(self._places(split.whole_values(ids_TK), priorities_TK, capacity))
        return ids_TK.masked_fill(places_TK >= capacity, -1)

    @torch.no_grad()
    def _ids_chosen_here(
        self, logits_TE: Tensor, noise: _Noise, used_T: Tensor | None, split: TokenSplit
    ) -> Tensor | None:
        """``[T, K]``, best first, where noise or another rule chooses; None where the gating kernel does."""
        settings, kernels = self.settings, kernels_for(logits_TE)
        if settings.force_balance:
            tokens_T = split.own_ids(logits_TE.shape[0], logits_TE.device)
            slots_TK = tokens_T[:, None] * settings.top_k + torch.arange(settings.top_k, device=logits_TE.device)
            ids_TK = slots_TK % self.num_experts
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

    def _priorities(self, wanted: Gating, noise: _Noise) -> Tensor:
        """``[T, K]``: of assignments over capacity those of highest priority are kept, of equal ones the first."""
        settings, ids_TK = self.settings, wanted.ids_TK
        if settings.drops_by == "probs":
            return wanted.weights_TK  # the scores
        if noise.priority_TE is not None:
            return noise.priority_TE.gather(1, ids_TK.clamp(min=0).long())
        if settings.top_k == 2:
            # GShard fills the buffers with every token's first choice before any second choice.
            return -torch.arange(2, device=ids_TK.device).expand_as(ids_TK)
        return torch.zeros_like(ids_TK)

    def _places(self, ids_TK: Tensor, priorities_TK: Tensor, capacity: int) -> Tensor:
        """Place of each assignment in its expert's queue; those at capacity and beyond are dropped."""
        settings = self.settings
        if settings.drops_by == "position" and settings.top_k == 1 and settings.strict_compat:
            # DeepSpeed's positions are whatever topk makes of equal numbers.
            gather = ids_TK.clamp(min=0).long()
            chosen_TE = torch.zeros((len(ids_TK), self.num_experts), dtype=torch.int64, device=ids_TK.device)
            chosen_TE.scatter_(1, gather, (ids_TK >= 0).long())
            kept = chosen_TE.topk(min(capacity, len(ids_TK)), dim=0).indices
            return capacity * (1 - torch.zeros_like(chosen_TE).scatter_(0, kept, 1).gather(1, gather))
        return kernels_for(priorities_TK).ranks_within_expert(ids_TK, priorities_TK, self.num_experts)

    def _aux_loss(self, gating: Gating, selection: _Selection) -> Tensor:
        """``aux_loss_coefficient * E / K' * balancing_loss + z_loss_coefficient * mean(logsumexp^2)``, a scalar.

        Shares are softmax scores, or sigmoid scores over their sum. K' is K, but 1 for DeepSpeed's loss at k = 2,
        where only first choices count. Without tokens the loss is 0 and stays connected to the graph. Loads and means
        are those of the whole batch, scores those of this rank's tokens: the losses of its ranks add up to the whole.
        """
        settings = self.settings
        choices = 1 if settings.top_k == 2 and settings.aux_loss_scope == "micro_batch" else settings.top_k
        loss = balancing_loss(gating.share_sums_BE, selection.balance)
        loss = loss * (settings.aux_loss_coefficient * self.num_experts / choices)
        if settings.z_loss_coefficient:
            mean_square = gating.z_sums_B.sum() / selection.num_counted.clamp(min=1)
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


def _uniform(like: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return torch.distributions.Uniform(like.new_tensor(low), like.new_tensor(high)).rsample(like.shape)
