"""``MoE``: the constructor, the return values, the state dict and the engine's view of ``deepspeed.moe.layer.MoE``.

The classes below are DeepSpeed's by inheritance (the engine and users' code ask with ``isinstance``) and xmoe's by
behaviour: DeepSpeed's constructors and forwards are not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe import experts as native_experts
from deepspeed.moe import layer as native_layer
from deepspeed.moe import sharded_moe as native_moe
from deepspeed.utils.timer import SynchronizedWallClockTimer
from torch import Tensor, nn

from ... import experts as core_experts
from ...config import ConfigError, XMoEConfig
from ...dispatch.flat import FlatDispatcher
from ...dispatch.local import LocalDispatcher
from ...groups import warm_up
from ...layer import RoutedMLP
from ...ops.collectives import Exchange
from ...router import RouterSettings, TopKRouter

_JITTER_EPSILON = 1e-2  # of DeepSpeed's noisy_gate_policy 'Jitter'


class TopKGate(TopKRouter, native_moe.TopKGate):
    """xmoe's router in the place of DeepSpeed's gate: ``wg``, ``k`` and the timers the engine reads."""

    def __init__(
        self, hidden_size: int, num_experts: int, *, settings: RouterSettings, correction_bias: bool = False
    ) -> None:
        TopKRouter.__init__(self, hidden_size, num_experts, settings=settings, correction_bias=correction_bias)
        self.k = settings.top_k
        self.ep_group = None
        self.timers = SynchronizedWallClockTimer()
        self.wall_clock_breakdown = False
        self.gate_time = 0.0


class Experts(core_experts.Experts, native_experts.Experts):
    """xmoe's experts under DeepSpeed's names, marked so that DeepSpeed reduces them over their own group."""

    MLPS = "deepspeed_experts"

    def __init__(
        self,
        expert: nn.Module,
        num_local_experts: int,
        expert_group_name: str,
        *,
        first_id: int = 0,
        initialize: Callable[[nn.Module, int], None] | None = None,
    ) -> None:
        core_experts.Experts.__init__(self, expert, num_local_experts, first_id=first_id, initialize=initialize)
        self.num_local_experts = num_local_experts
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = expert_group_name  # type: ignore[attr-defined]


class MOELayer(RoutedMLP, native_moe.MOELayer):
    """xmoe's layer in the place of DeepSpeed's: gate, experts, group and the timers the engine reads."""

    def __init__(self, gate: TopKGate, experts: Experts, *, shared_mlp: nn.Module | None, shared_gate: bool) -> None:
        width = gate.wg.in_features
        RoutedMLP.__init__(
            self,
            gate,
            experts,
            shared_mlp=shared_mlp,
            shared_gate=nn.Linear(width, 1, bias=False) if shared_gate else None,
        )
        self.ep_group: Any = None
        self.num_local_experts = experts.num_local_experts
        self.ep_size = gate.num_experts // experts.num_local_experts
        self.ep_group_name = f"ep_size_{self.ep_size}"
        self.time_falltoall = self.time_salltoall = self.time_moe = 0.0
        self.timers = SynchronizedWallClockTimer()
        self.wall_clock_breakdown = False
        self.use_tutel = False
        self.l_aux: Any = None
        self.exp_counts: Any = None

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> Tensor:
        output, self.l_aux, self.exp_counts = RoutedMLP.forward(self, hidden_states, used_token)
        return output


class MoE(native_layer.MoE):
    """Drop-in for ``deepspeed.moe.layer.MoE``, padding-free and for any k up to ``num_experts``.

    The positional arguments are DeepSpeed's, in DeepSpeed's order and meaning. Keyword-only beyond them:

    ``shared_mlp``       module ``[..., D] -> [..., D]`` applied to every token and added (shared experts)
    ``shared_gate``      scale it by ``sigmoid(x @ w)``, ``w`` a parameter
    ``correction_bias``  auxiliary-loss-free balancing: a saved float32 buffer, moved by ``xmoe.initialize``'s engine
    ``expert_init``      ``expert_init(module, logical_id)`` initialises each expert; without it all start equal, as
                         DeepSpeed's do
    the keys of the JSON section ``"xmoe"`` (``xmoe.config.XMoEConfig``), for this layer alone

    Returns ``(output, l_aux, exp_counts)``: output shaped like the input; a scalar with gradient that no model
    coefficient multiplies yet; int64 ``[num_experts]``, this rank's selections before any drop.

    Raises ValueError for arguments that do not fit together, ConfigError for a setting that the JSON contradicts.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
        *,
        shared_mlp: nn.Module | None = None,
        shared_gate: bool = False,
        correction_bias: bool = False,
        expert_init: Callable[[nn.Module, int], None] | None = None,
        dispatch: Literal["auto", "local", "flat"] | None = None,
        strict_compat: bool | None = None,
        score_function: Literal["softmax", "sigmoid"] | None = None,
        normalize_weights: bool | None = None,
        routed_scaling_factor: float | None = None,
        aux_loss_coefficient: float | None = None,
        z_loss_coefficient: float | None = None,
        correction_bias_update_rate: float | None = None,
        input_jitter: float | None = None,
        drop_policy: Literal["probs", "position", "random"] | None = None,
        force_balance: bool | None = None,
        self_row_guard: Literal["auto", "on", "off"] | None = None,
        collective_timeout_s: float | None = None,
    ) -> None:
        given = {key: value for key, value in locals().items() if key in XMoEConfig.model_fields}
        self._given = {key: value for key, value in given.items() if value is not None}
        nn.Module.__init__(self)
        _check_arguments(num_experts, ep_size, noisy_gate_policy, shared_gate=shared_gate, shared_mlp=shared_mlp)
        if noisy_gate_policy == "Jitter":
            self._given.setdefault("input_jitter", _JITTER_EPSILON)
        self._routing: dict[str, Any] = {
            "top_k": k,
            "capacity_factor": capacity_factor,
            "eval_capacity_factor": eval_capacity_factor,
            "min_capacity": min_capacity,
            "drop_tokens": drop_tokens,
            "random_token_selection": use_rts,
            "sample_second_expert": top2_2nd_expert_sampling,
            "noisy_logits": noisy_gate_policy == "RSample",
        }
        self.layer_name = "MoE"
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.ep_size = ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_size
        self._config = self._merged(XMoEConfig())
        rank_in_group = dist.get_rank() % ep_size if expert_init is not None and dist.is_initialized() else 0
        self.deepspeed_moe = MOELayer(
            TopKGate(hidden_size, num_experts, settings=self._settings(), correction_bias=correction_bias),
            Experts(
                expert,
                self.num_local_experts,
                self.expert_group_name,
                first_id=rank_in_group * self.num_local_experts,
                initialize=expert_init,
            ),
            shared_mlp=shared_mlp,
            shared_gate=shared_gate,
        )
        self._expert_init = expert_init
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def configure(self, config: XMoEConfig, *, name: str) -> None:
        """Takes the JSON section's settings; those of the constructor stand. ``name`` is the layer's module path.

        Raises ConfigError when the constructor and the JSON give the same setting different values.
        """
        for key in sorted(config.model_fields_set & self._given.keys()):
            if getattr(config, key) != self._given[key]:
                raise ConfigError(
                    f"xmoe.{key}",
                    getattr(config, key),
                    f"the constructor of layer '{name}' gives {key}={self._given[key]!r}; give it in one place",
                )
        self.layer_name = name
        self._config = self._merged(config)
        self.deepspeed_moe.gate.configure(self._settings())

    def _merged(self, config: XMoEConfig) -> XMoEConfig:
        merged = config.model_copy(update=self._given)
        XMoEConfig.model_validate(merged.model_dump())
        if merged.dispatch == "local" and self.ep_size > 1:
            raise ConfigError(
                "xmoe.dispatch", "local", f"needs ep_size 1, the layer has ep_size {self.ep_size}; use 'flat' or 'auto'"
            )
        return merged

    def _settings(self) -> RouterSettings:
        shared = RouterSettings.__dataclass_fields__.keys() & XMoEConfig.model_fields.keys()
        return RouterSettings(**self._routing, **{key: getattr(self._config, key) for key in shared})

    def _create_process_groups(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Called by the engine, on every rank and in module order: makes the groups, as DeepSpeed lays them out."""
        native_layer.MoE._create_process_groups(self, use_data_before_expert_parallel_)
        group, config = self.deepspeed_moe.ep_group, self._config
        if self.ep_size == 1 and config.dispatch != "flat":
            self.deepspeed_moe.set_dispatcher(LocalDispatcher())
            return
        guard = config.self_row_guard == "on" or (config.self_row_guard == "auto" and torch.version.hip is not None)
        exchange = Exchange(
            group=group, label=self.layer_name, timeout_s=config.collective_timeout_s, self_row_guard=guard
        )
        warm_up(group, torch.device(get_accelerator().current_device_name()))
        self.deepspeed_moe.set_dispatcher(FlatDispatcher(exchange))


def _check_arguments(
    num_experts: object, ep_size: object, policy: object, *, shared_gate: bool, shared_mlp: nn.Module | None
) -> None:
    for name, value in (("num_experts", num_experts), ("ep_size", ep_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} ({value!r}) must be a positive integer")
    assert isinstance(num_experts, int)
    assert isinstance(ep_size, int)
    if num_experts % ep_size:
        raise ValueError(f"num_experts ({num_experts}) must be a multiple of ep_size ({ep_size})")
    if policy not in (None, "None", "Jitter", "RSample"):
        raise ValueError(f"noisy_gate_policy ({policy!r}) must be None, 'None', 'Jitter' or 'RSample'")
    if shared_gate and shared_mlp is None:
        raise ValueError("shared_gate=True needs a shared_mlp to gate")
    for name, _ in shared_mlp.named_parameters() if shared_mlp is not None else ():
        if "expert" in name:
            raise ValueError(
                f"shared_mlp has a parameter named {name!r}: DeepSpeed's checkpoint code takes every name with "
                "'expert' in it for a routed expert; rename it"
            )


def replace_moe_layers(model: nn.Module, **settings: Any) -> int:
    """Replaces every native ``deepspeed.moe.layer.MoE`` inside a live model by :class:`MoE`, in place.

    The new layers take over the very parameters of the old ones, so an optimizer built before stays right; call it
    before ``initialize``. ``settings`` are keyword-only settings of :class:`MoE`. Returns the number replaced.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, native_layer.MoE) and not isinstance(child, MoE):
                setattr(parent, name, _converted(child, settings))
                replaced += 1
    return replaced


def _converted(native: native_layer.MoE, settings: dict[str, Any]) -> MoE:
    gate, experts = native.deepspeed_moe.gate, native.deepspeed_moe.experts
    layer = MoE(
        gate.wg.in_features,
        experts.deepspeed_experts[0],
        native.num_experts,
        native.ep_size,
        gate.k,
        gate.capacity_factor,
        gate.eval_capacity_factor,
        gate.min_capacity,
        native.use_residual,
        gate.noisy_gate_policy,
        gate.drop_tokens,
        gate.use_rts,
        False,
        native.enable_expert_tensor_parallelism,
        gate.top2_2nd_expert_sampling,
        **settings,
    )
    layer.deepspeed_moe.gate.wg = gate.wg
    layer.deepspeed_moe.experts.deepspeed_experts = experts.deepspeed_experts
    if native.use_residual:
        layer.mlp, layer.coefficient = native.mlp, native.coefficient
    return layer.train(native.training)
