"""``MoE``: the constructor, the return values, the state dict and the engine's view of ``deepspeed.moe.layer.MoE``.

The classes below are DeepSpeed's by inheritance (the engine and users' code ask with ``isinstance``) and xmoe's by
behaviour: DeepSpeed's constructors and forwards are not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe import experts as native_experts
from deepspeed.moe import layer as native_layer
from deepspeed.moe import sharded_moe as native_moe
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group, bwc_tensor_model_parallel_world_size
from deepspeed.utils.timer import SynchronizedWallClockTimer
from torch import Tensor, nn

from ... import experts as core_experts
from ...balance import AuxLossScope
from ...config import ConfigError, XMoEConfig, parse_section
from ...dispatch.tensor_parallel import SharedTokens
from ...layer import RoutedMLP
from ...ops._backend import KernelChoice, why_not_triton
from ...ops.collectives import Exchange
from ...ops.losses import carry_loss
from ...router import RouterSettings, TopKRouter
from ...types import Routing
from .alike import agree_on_training
from .dispatchers import dispatcher_of
from .initial import InitialWeights
from .sequence import shard_of
from .timing import measured, timed_forward
from .unread import warn_of_unread_section

_JITTER_EPSILON = 1e-2  # of DeepSpeed's noisy_gate_policy 'Jitter'


def _setting(name: str) -> Any:
    """A native gate's attribute, read from and written to the router's settings: schedules assign to them."""

    def read(gate: TopKRouter) -> Any:
        return getattr(gate.settings, name)

    def write(gate: TopKRouter, value: Any) -> None:
        gate.configure(replace(gate.settings, **{name: value}))

    return property(read, write)


class TopKGate(TopKRouter, native_moe.TopKGate):
    """xmoe's router in the place of DeepSpeed's gate: ``wg``, ``k`` and the timers the engine reads."""

    k = _setting("top_k")
    capacity_factor = _setting("capacity_factor")
    eval_capacity_factor = _setting("eval_capacity_factor")
    min_capacity = _setting("min_capacity")
    drop_tokens = _setting("drop_tokens")
    use_rts = _setting("random_token_selection")
    top2_2nd_expert_sampling = _setting("sample_second_expert")
    noisy_gate_policy: str | None

    def __init__(
        self, hidden_size: int, num_experts: int, *, settings: RouterSettings, correction_bias: bool = False
    ) -> None:
        TopKRouter.__init__(self, hidden_size, num_experts, settings=settings, correction_bias=correction_bias)
        self.noisy_gate_policy = None
        self.ep_group = None
        self.timers = SynchronizedWallClockTimer()
        self.wall_clock_breakdown = False
        self.gate_time = 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Routing:
        with measured(self, native_moe.TOPK_GATE_TIMER, "gate_time"):
            return super().forward(*args, **kwargs)


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
        self.expert_group_name = expert_group_name
        # Megatron's marks (tensor_model_parallel, ...), without which split experts are left out of the norm.
        self._marks = {name: _plain_attributes(parameter) for name, parameter in expert.named_parameters()}
        self.mark_parameters()

    def mark_parameters(self) -> None:
        """Marks every expert for DeepSpeed; again where parameters were replaced (a copy, a load by assignment)."""
        for module in self.modules_in_order():
            for name, parameter in module.named_parameters():
                for mark, value in self._marks.get(name, {}).items():
                    vars(parameter).setdefault(mark, value)
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = self.expert_group_name  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copying a Parameter drops its attributes: without marks DeepSpeed would average different experts.
        super().__setstate__(state)
        self.mark_parameters()


def _plain_attributes(parameter: nn.Parameter) -> dict[str, Any]:
    return {name: value for name, value in vars(parameter).items() if isinstance(value, (bool, int, float, str))}


def mark_experts(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Experts):
            module.mark_parameters()


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

    def __getstate__(self) -> dict[str, Any]:
        # What the last forward left hangs on its graph, which can be neither copied nor pickled.
        return {**self.__dict__, "l_aux": None, "exp_counts": None}

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> Tensor:
        forward = timed_forward if self.wall_clock_breakdown else RoutedMLP.forward
        output, self.l_aux, self.exp_counts = forward(self, hidden_states, used_token)
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
        dispatch: Literal["auto", "local", "flat", "gpu", "node", "node+gpu"] | None = None,
        ranks_per_node: int | None = None,
        overlap_chunks: int | None = None,
        stage_times: bool | None = None,
        sequence_shard: bool | None = None,
        kernels: KernelChoice | None = None,
        strict_compat: bool | None = None,
        score_function: Literal["softmax", "sigmoid"] | None = None,
        normalize_weights: bool | None = None,
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
        group_score: Literal["top2_sum", "max"] | None = None,
        routed_scaling_factor: float | None = None,
        aux_loss_coefficient: float | None = None,
        aux_loss_scope: AuxLossScope | None = None,
        z_loss_coefficient: float | None = None,
        correction_bias_update_rate: float | None = None,
        input_jitter: float | None = None,
        drop_policy: Literal["probs", "position", "random"] | None = None,
        force_balance: bool | None = None,
        self_row_guard: Literal["auto", "on", "off"] | None = None,
        collective_timeout_s: float | None = None,
    ) -> None:
        self._given = _given_settings(locals())
        nn.Module.__init__(self)
        _check_sizes(hidden_size=hidden_size, num_experts=num_experts, ep_size=ep_size, k=k)
        _check_policy(noisy_gate_policy)
        _check_shared(shared_mlp, shared_gate=shared_gate)
        self._routing = _routing(locals())
        self.layer_name = "MoE"
        self._configured = False
        self.loss_scale: Callable[[], float] = _one
        self.current_step: Callable[[], int | None] = _none
        self.late_error: ConfigError | None = None
        self.input_is_sharded = False
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.ep_size = ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_size
        self._config = self._merged(XMoEConfig())
        first_id = (dist.get_rank() % ep_size if dist.is_initialized() else 0) * self.num_local_experts
        gate = TopKGate(hidden_size, num_experts, settings=self._settings(), correction_bias=correction_bias)
        gate.noisy_gate_policy = noisy_gate_policy
        self._initial = None if expert_init is None else InitialWeights.of(expert, expert_init, first_id)
        self.deepspeed_moe = MOELayer(
            gate,
            Experts(expert, self.num_local_experts, self.expert_group_name, first_id=first_id, initialize=expert_init),
            shared_mlp=shared_mlp,
            shared_gate=shared_gate,
        )
        self.deepspeed_moe.kernels = self._config.kernels
        self.deepspeed_moe.clock.enabled = self._config.stage_times
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def configure(self, config: XMoEConfig, *, name: str) -> None:
        """Takes the JSON section's settings; those of the constructor stand. ``name`` is the layer's module path.

        Raises ConfigError when the constructor and the JSON give the same setting different values, and for kernels
        that this machine cannot run.
        """
        for key in sorted(config.model_fields_set & self._given.keys()):
            if getattr(config, key) != self._given[key]:
                raise ConfigError(
                    f"xmoe.{key}",
                    getattr(config, key),
                    f"the constructor of layer '{name}' gives {key}={self._given[key]!r}; give it in one place",
                )
        self.layer_name = name
        self._configured = True
        mark_experts(self)
        self._config = self._merged(config)
        self.deepspeed_moe.gate.configure(self._settings())
        self.deepspeed_moe.kernels = self._config.kernels
        self.deepspeed_moe.clock.enabled = self._config.stage_times
        if self._config.kernels == "triton":
            reason = why_not_triton(device_type=get_accelerator().device_name())
            if reason is not None:
                raise ConfigError("xmoe.kernels", "triton", reason)

    def _merged(self, config: XMoEConfig) -> XMoEConfig:
        merged = config.model_copy(update=self._given)
        if merged.dispatch == "local" and self.ep_size > 1:
            raise ConfigError(
                "xmoe.dispatch", "local", f"needs ep_size 1, the layer has ep_size {self.ep_size}; use 'flat' or 'auto'"
            )
        return merged

    @property
    def is_configured(self) -> bool:
        """Whether ``xmoe.initialize`` gave the layer the JSON's settings."""
        return self._configured

    @property
    def settings(self) -> XMoEConfig:
        """Of the JSON, as far as the layer has them yet, and of the constructor."""
        return self._config

    @property
    def shards_sequence(self) -> bool:
        """Whether ranks that share tokens compute a slice of them each, by the JSON or the constructor."""
        return self._config.sequence_shard

    def _settings(self) -> RouterSettings:
        shared = RouterSettings.__dataclass_fields__.keys() & XMoEConfig.model_fields.keys()
        return RouterSettings(**self._routing, **{key: getattr(self._config, key) for key in shared})

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if self.ep_size > 1 and self.deepspeed_moe.ep_group is None:
            # No engine made the groups: inference, or a layer of its own. Every rank makes this call.
            if not dist.is_initialized():
                raise RuntimeError(
                    f"layer '{self.layer_name}' has ep_size {self.ep_size} and no process group exists: call "
                    "xmoe.initialize, or init_distributed and the layer's set_deepspeed_parallelism(), first"
                )
            self.set_deepspeed_parallelism()
        output: tuple[Tensor, Tensor, Tensor] = super().forward(hidden_states, used_token)
        return output

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "loss_scale": _one, "current_step": _none}  # a copy is no part of the engine

    def _step(self) -> int | None:
        return self.current_step()  # the engine comes after the groups

    def carry_loss(self, output: Tensor, loss: Tensor) -> Tensor:
        """``output``, unchanged, whose backward also adds ``loss``'s gradient, as if the model's loss had it as a term.

        For pipelines, whose stages pass on nothing but activations: ``self.moe.carry_loss(x + y, 0.01 * l_aux)``.
        Under ``xmoe.initialize`` the gradient is scaled as the engine scales the model's loss (by the number of
        micro-batches and by a loss scale); without an engine by 1. A loss carried must not be added to the model's
        loss as well.
        """
        return carry_loss(output, loss, self.loss_scale)

    def _create_process_groups(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Called by the engine, on every rank and in module order: makes the groups, as DeepSpeed lays them out."""
        super()._create_process_groups(use_data_before_expert_parallel_)
        if not self._configured:
            warn_of_unread_section()
        mark_experts(self)
        group, config = self.deepspeed_moe.ep_group, self._config
        if self._initial is not None:
            first_id = groups._get_expert_parallel_rank(self.expert_group_name) * self.num_local_experts
            self._initial.move(self.deepspeed_moe.experts, first_id)
            self._initial = None
        guard = config.self_row_guard == "on" or (config.self_row_guard == "auto" and torch.version.hip is not None)
        exchange = Exchange(
            group=group,
            label=self.layer_name,
            timeout_s=config.collective_timeout_s,
            self_row_guard=guard,
            step=self._step,
        )
        dispatcher = dispatcher_of(self, config, exchange)
        if dist.get_world_size(group) > 1:
            agree_on_training(self.deepspeed_moe.experts, group)
        shares_tokens = bwc_tensor_model_parallel_world_size(groups.mpu) > 1 and not self.shards_sequence
        if shares_tokens and not self.enable_expert_tensor_parallelism:
            same_tokens = replace(exchange, group=bwc_tensor_model_parallel_group(groups.mpu))
            dispatcher = SharedTokens(dispatcher, same_tokens)
        self.deepspeed_moe.set_dispatcher(dispatcher)
        self.deepspeed_moe.set_sequence_shard(shard_of(self, exchange) if self.shards_sequence else None)


def make_groups(ep_size: int, *, expert_tensor_parallelism: bool, data_first: bool) -> None:
    """DeepSpeed's groups for layers of ``ep_size``, unless there are. A collective of all ranks."""
    if f"ep_size_{ep_size}" in groups._get_expert_parallel_group_dict():
        return
    if groups.mpu is not None and expert_tensor_parallelism:
        groups._create_expert_data_and_model_parallel(ep_size, groups.mpu, data_first)
    else:
        groups._create_expert_and_data_parallel(ep_size, use_data_before_expert_parallel_=data_first)


def _one() -> float:
    return 1.0


def _none() -> None:
    return None


def _given_settings(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the constructor that are settings and were given. Raises ConfigError."""
    given = {key: arguments[key] for key in XMoEConfig.model_fields if arguments.get(key) is not None}
    parse_section("MoE", XMoEConfig, given)
    if arguments["noisy_gate_policy"] == "Jitter":
        given.setdefault("input_jitter", _JITTER_EPSILON)
    return given


def _check_sizes(**sizes: object) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} ({value!r}) must be a positive integer")
    num_experts, ep_size = sizes["num_experts"], sizes["ep_size"]
    if num_experts % ep_size:  # type: ignore[operator]
        raise ValueError(f"num_experts ({num_experts}) must be a multiple of ep_size ({ep_size})")


def _routing(arguments: dict[str, Any]) -> dict[str, Any]:
    """The router's settings among DeepSpeed's own arguments. Raises ValueError where a number is none."""
    for name in ("capacity_factor", "eval_capacity_factor", "min_capacity"):
        value = arguments[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name} ({value!r}) must be a number")
    return {
        "top_k": arguments["k"],
        "capacity_factor": arguments["capacity_factor"],
        "eval_capacity_factor": arguments["eval_capacity_factor"],
        "min_capacity": arguments["min_capacity"],
        "drop_tokens": arguments["drop_tokens"],
        "random_token_selection": arguments["use_rts"],
        "sample_second_expert": arguments["top2_2nd_expert_sampling"],
        "noisy_logits": arguments["noisy_gate_policy"] == "RSample",
    }


def _check_policy(policy: object) -> None:
    if policy not in (None, "None", "Jitter", "RSample"):
        raise ValueError(f"noisy_gate_policy ({policy!r}) must be None, 'None', 'Jitter' or 'RSample'")


def _check_shared(shared_mlp: nn.Module | None, *, shared_gate: bool) -> None:
    if shared_gate and shared_mlp is None:
        raise ValueError("shared_gate=True needs a shared_mlp to gate")
    for name in shared_mlp.state_dict() if shared_mlp is not None else ():
        if "expert" in name:
            raise ValueError(
                f"shared_mlp has a parameter named {name!r}: DeepSpeed's checkpoint code takes every name with "
                "'expert' in it for a routed expert; rename it"
            )
