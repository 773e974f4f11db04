"""How one router routes, and whether that fits its number of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from .balance import AuxLossScope
from .config import ConfigError
from .kernels.reference import GateRule


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
    def gate_rule(self) -> GateRule:
        return GateRule(
            top_k=self.top_k,
            score_function=self.score_function,
            normalize=self.normalizes,
            scale=self.routed_scaling_factor,
            num_groups=self.num_expert_groups or 1,
            num_limited=self.num_limited_groups or 1,
            group_score=self.group_score,
            z_sums=self.z_loss_coefficient != 0,
        )

    @property
    def scores_rule(self) -> GateRule:
        """The same decision, whose weights are the scores themselves."""
        return replace(self.gate_rule, normalize=False, scale=1.0, z_sums=False)

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


def check_settings(settings: RouterSettings, num_experts: int) -> None:
    """Raises ValueError (ConfigError, where it is a key of the JSON section) when they do not fit the router."""
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
