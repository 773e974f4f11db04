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

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .balance import AuxLossScope, BalanceLoads, balancing_loss, loads_of_parts, loads_of_step
from .config import ConfigError
from .kernels import reference
from .ops.routing import router_logits, top_k_weights
from .replay import Decisions, fresh_decisions
from .types import Routing


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """How one router routes. ``normalize_weights`` and ``drop_policy`` None mean DeepSpeed's rule for this k.

    ``strict_compat`` reproduces DeepSpeed's random draws and faults: second-expert sampling and random token
    selection in evaluation too, and a padding mask only at k = 1.
    """

    top_k: int
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.0
    min_capacity: int = 4
    drop_tokens: bool = True
    drop_policy: Literal["probs", "position", "random"] | None = None
    random_token_selection: bool = True
    sample_second_expert: bool = True
    noisy_logits: bool = False
    input_jitter: float = 0.0
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    normalize_weights: bool | None = None
    num_expert_groups: int | None = None
    num_limited_groups: int | None = None
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    routed_scaling_factor: float = 1.0
    aux_loss_coefficient: float = 1.0
    aux_loss_scope: AuxLossScope = "micro_batch"
    z_loss_coefficient: float = 0.0
    correction_bias_update_rate: float = 1e-3
    force_balance: bool = False
    strict_compat: bool = False

    @property
    def normalizes(self) -> bool:
        return self.top_k > 1 if self.normalize_weights is None else self.normalize_weights

    @property
    def drops_by(self) -> Literal["probs", "position", "random"]:
        if self.drop_policy is not None:
            return self.drop_policy
        if self.top_k == 1:
            return "random" if self.random_token_selection else "position"
        return "position" if self.top_k == 2 else "probs"

    def capacity(self, num_tokens: int, num_experts: int, *, training: bool) -> int:
        """Assignments an expert accepts from this rank: ``max(min_capacity, ceil(T / E * factor * k))``.

        In float32, as DeepSpeed computes it: at exact multiples the rounding decides.
        """
        factor = self.capacity_factor if training else self.eval_capacity_factor
        scaled = (num_tokens / num_experts) * torch.tensor(factor * self.top_k, dtype=torch.float32)
        return max(math.ceil(scaled.item()), self.min_capacity)


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
        _check(settings, num_experts)
        self.num_experts = num_experts
        self.wg = nn.Linear(hidden_size, num_experts, bias=False)
        self.register_buffer("correction_bias", torch.zeros(num_experts) if correction_bias else None)
        self.register_buffer("step_counts", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("last_step_counts", None)
        self.steps_end = False
        self.configure(settings)

    def configure(self, settings: RouterSettings) -> None:
        """Replaces the settings. Raises ValueError when they do not fit the router."""
        _check(settings, self.num_experts)
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
            x_TD = x_TD.to(reference.accumulator_dtype(x_TD.dtype))
            x_TD = x_TD * _uniform(x_TD, 1 - settings.input_jitter, 1 + settings.input_jitter)
        logits_TE = router_logits(x_TD, self.wg.weight)
        scores_TE = torch.softmax(logits_TE, dim=1) if settings.score_function == "softmax" else logits_TE.sigmoid()
        noise, counted_T = self._draw(logits_TE), self._counted(scores_TE, used_T)

        @torch.no_grad()
        def select() -> _Selection:
            ids_TK = self._choose(scores_TE, logits_TE, noise)
            if used_T is not None:
                ids_TK = ids_TK.masked_fill(~used_T[:, None], -1)
            loads = self._loads(ids_TK, logits_TE, counted_T, num_sequences=num_sequences)
            return self._select(ids_TK, scores_TE, noise, loads)

        selection = decide(select)
        weights_TK = top_k_weights(
            scores_TE, selection.ids_TK, normalize=settings.normalizes, scale=settings.routed_scaling_factor
        )
        return Routing(
            topk_ids_TK=selection.ids_TK,
            topk_weights_TK=weights_TK,
            selected_per_expert_E=selection.selected_per_expert_E,
            tokens_per_expert_E=selection.tokens_per_expert_E,
            aux_loss=self._aux_loss(logits_TE, scores_TE, counted_T, selection.balance),
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

    def _counted(self, scores_TE: Tensor, used_T: Tensor | None) -> Tensor:
        """1 for each token that counts in the losses' means, 0 for the others; in the scores' dtype."""
        if used_T is None or self.settings.strict_compat:
            return scores_TE.new_ones(()).expand(scores_TE.shape[0])
        return used_T.to(scores_TE.dtype)

    def _loads(self, ids_TK: Tensor, logits_TE: Tensor, counted_T: Tensor, *, num_sequences: int) -> BalanceLoads:
        """What the load-balancing loss takes as constant. ``ids_TK`` are the selections before any capacity drop."""
        settings, num_experts = self.settings, self.num_experts
        if settings.aux_loss_scope == "sequence":
            if self.correction_bias is not None or settings.num_expert_groups is not None:
                # DeepSeek-V3, eq. 18: what the scores alone would select.
                ids_TK = reference.top_k_ids(logits_TE, settings.top_k).masked_fill(ids_TK < 0, -1)
            return loads_of_parts(ids_TK, counted_T, num_parts=num_sequences, num_experts=num_experts)
        if self.last_step_counts is not None:
            if self.steps_end:
                return loads_of_step(self.last_step_counts, counted_T, top_k=settings.top_k)
        elif settings.top_k == 2:
            ids_TK = ids_TK[:, :1]
        return loads_of_parts(ids_TK, counted_T, num_parts=1, num_experts=num_experts)

    def _select(self, ids_TK: Tensor, scores_TE: Tensor, noise: _Noise, loads: BalanceLoads) -> _Selection:
        settings, num_experts = self.settings, self.num_experts
        selected_E = tokens_E = reference.count_ids(ids_TK, num_experts)
        if settings.drop_tokens and ids_TK.numel():
            capacity = settings.capacity(ids_TK.shape[0], num_experts, training=self.training)
            ids_TK = ids_TK.masked_fill(self._places(ids_TK, scores_TE, noise, capacity) >= capacity, -1)
            tokens_E = selected_E.clamp(max=capacity)
        return _Selection(
            ids_TK=ids_TK.to(torch.int32),
            selected_per_expert_E=selected_E,
            tokens_per_expert_E=tokens_E,
            balance=loads,
        )

    def _choose(self, scores_TE: Tensor, logits_TE: Tensor, noise: _Noise) -> Tensor:
        """int64 ``[T, K]``: experts of each token, best first."""
        settings = self.settings
        if settings.force_balance:
            slots = torch.arange(scores_TE.shape[0] * settings.top_k, device=scores_TE.device)
            return (slots % self.num_experts).view(-1, settings.top_k)
        if self.correction_bias is not None:
            scores_TE = ranking_TE = scores_TE + self.correction_bias
        else:
            # Logits order experts as scores do, and still where scores round to equal numbers, as 1 or 0.
            ranking_TE = scores_TE if settings.strict_compat else logits_TE
        if settings.num_expert_groups is not None:
            allowed_TE = self._in_best_groups(scores_TE if settings.group_score == "top2_sum" else ranking_TE)
            ranking_TE, logits_TE = (x_TE.masked_fill(~allowed_TE, float("-inf")) for x_TE in (ranking_TE, logits_TE))
        if noise.gumbel_TE is None:
            return reference.top_k_ids(ranking_TE, settings.top_k)
        noisy_TE = logits_TE + noise.gumbel_TE
        if settings.top_k == 1:
            return reference.top_k_ids(noisy_TE, 1)
        first_T1 = reference.top_k_ids(ranking_TE, 1)
        second_T1 = reference.top_k_ids(noisy_TE.scatter(1, first_T1, float("-inf")), 1)
        return torch.cat([first_T1, second_T1], dim=1)

    def _in_best_groups(self, scores_TE: Tensor) -> Tensor:
        settings = self.settings
        assert settings.num_expert_groups is not None
        assert settings.num_limited_groups is not None
        return reference.experts_of_best_groups(
            scores_TE,
            num_groups=settings.num_expert_groups,
            num_limited=settings.num_limited_groups,
            num_counted=2 if settings.group_score == "top2_sum" else 1,
        )

    def _places(self, ids_TK: Tensor, scores_TE: Tensor, noise: _Noise, capacity: int) -> Tensor:
        """Place of each assignment in its expert's queue; those at capacity and beyond are dropped."""
        settings, gather = self.settings, ids_TK.clamp(min=0)
        if settings.drops_by == "probs":
            priorities = scores_TE.gather(1, gather)
        elif noise.priority_TE is not None:
            priorities = noise.priority_TE.gather(1, gather)
        elif settings.top_k == 1 and settings.strict_compat:
            # DeepSpeed's positions are whatever topk makes of equal numbers.
            chosen_TE = torch.zeros_like(scores_TE, dtype=torch.int64).scatter_(1, gather, (ids_TK >= 0).long())
            kept = chosen_TE.topk(min(capacity, len(ids_TK)), dim=0).indices
            return capacity * (1 - torch.zeros_like(chosen_TE).scatter_(0, kept, 1).gather(1, gather))
        elif settings.top_k == 2:
            # GShard fills the buffers with every token's first choice before any second choice.
            priorities = -torch.arange(2, device=ids_TK.device).expand_as(ids_TK)
        else:
            priorities = torch.zeros_like(ids_TK)
        return reference.ranks_within_expert(ids_TK, priorities, self.num_experts)

    def _aux_loss(self, logits_TE: Tensor, scores_TE: Tensor, counted_T: Tensor, loads: BalanceLoads) -> Tensor:
        """``aux_loss_coefficient * E / K' * balancing_loss + z_loss_coefficient * mean(logsumexp^2)``, a scalar.

        Shares are softmax scores, or sigmoid scores over their sum. K' is K, but 1 for DeepSpeed's loss at k = 2,
        where only first choices count. Without tokens the loss is 0 and stays connected to the graph.
        """
        settings = self.settings
        shares_TE = scores_TE
        if settings.score_function == "sigmoid":
            shares_TE = scores_TE / scores_TE.sum(dim=1, keepdim=True).clamp(min=torch.finfo(scores_TE.dtype).eps)
        choices = 1 if settings.top_k == 2 and settings.aux_loss_scope == "micro_batch" else settings.top_k
        loss = balancing_loss(shares_TE, counted_T, loads)
        loss = loss * (settings.aux_loss_coefficient * self.num_experts / choices)
        if settings.z_loss_coefficient:
            mean_square = counted_T @ logits_TE.logsumexp(dim=1).square() / counted_T.sum().clamp(min=1)
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


def _check(settings: RouterSettings, num_experts: int) -> None:
    if not 1 <= settings.top_k <= num_experts:
        raise ValueError(f"k ({settings.top_k}) must be in 1..num_experts ({num_experts})")
    _check_groups(settings, num_experts)
    if settings.drop_tokens:
        for name in ("capacity_factor", "eval_capacity_factor"):
            if not getattr(settings, name) > 0:
                raise ValueError(f"{name} ({getattr(settings, name)}) must be positive when tokens are dropped")
    if settings.min_capacity < 0:
        raise ValueError(f"min_capacity ({settings.min_capacity}) must not be negative")


def _check_groups(settings: RouterSettings, num_experts: int) -> None:
    groups, limited = settings.num_expert_groups, settings.num_limited_groups
    if settings.strict_compat and settings.aux_loss_scope != "micro_batch":
        raise ConfigError("xmoe.aux_loss_scope", settings.aux_loss_scope, "strict_compat has 'micro_batch' only")
    if groups is None or limited is None:
        if groups is not None or limited is not None:
            given, missing = ("expert", "limited") if limited is None else ("limited", "expert")
            raise ConfigError(f"xmoe.num_{given}_groups", groups or limited, f"needs num_{missing}_groups too")
        if settings.group_score != "top2_sum":
            raise ConfigError("xmoe.group_score", settings.group_score, "needs num_expert_groups")
        return
    if settings.strict_compat:
        raise ConfigError("xmoe.num_expert_groups", groups, "strict_compat reproduces DeepSpeed, which has no groups")
    if num_experts % groups:
        raise ConfigError("xmoe.num_expert_groups", groups, f"must divide num_experts ({num_experts})")
    if limited > groups:
        raise ConfigError("xmoe.num_limited_groups", limited, f"must be at most num_expert_groups ({groups})")
    if settings.top_k > limited * (num_experts // groups):
        raise ConfigError(
            "xmoe.num_limited_groups",
            limited,
            f"a token takes k ({settings.top_k}) experts, but {limited} of {groups} groups hold "
            f"{limited * (num_experts // groups)}",
        )


def _gumbel(like: Tensor) -> Tensor:
    zero, one = like.new_zeros(()), like.new_ones(())
    return torch.distributions.Gumbel(zero, one).rsample(like.shape)


def _uniform(like: Tensor, low: float, high: float) -> Tensor:
    return torch.distributions.Uniform(like.new_tensor(low), like.new_tensor(high)).rsample(like.shape)
