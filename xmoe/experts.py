"""The local experts: any module, run as one fused operator where its formula is known.

An expert keeps the parameters its author gave it, one set for each expert, in the author's order. That keeps state
dicts, optimizer states and ZeRO's flat partitions those of DeepSpeed's native layer, byte for byte. A stacked
``[e, out, in]`` view, where a kernel wants one, is a matter of strides, not of other parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .kernels.reference import Activation, ExpertWeights, accumulator_dtype
from .ops.attach import attach, join_backward
from .ops.expert_mlp import GradientSums, expert_mlp
from .types import ExpertPlan, Rows

# Names of (gate, up, down) or of (up, down) under which the field's models keep their linear layers.
_GATED_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_PLAIN_NAMES = (
    ("fc1", "fc2"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("up_proj", "down_proj"),
    ("c_fc", "c_proj"),
    ("w1", "w2"),
)
_PLAIN_ACTIVATIONS: tuple[Activation, ...] = ("gelu", "gelu_tanh", "relu")


@dataclass(frozen=True, kw_only=True)
class MLPFormula:
    """Where an expert keeps its linear layers, and what it does between them: ``down(act(up(x)))``."""

    activation: Activation
    up: str
    down: str
    gate: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.up, self.down) if self.gate is None else (self.up, self.down, self.gate)

    def weights(self, experts: Iterable[nn.Module]) -> ExpertWeights:
        """The experts' own parameters, in lists."""
        experts = list(experts)

        def parameters(name: str | None, kind: str) -> list[Tensor]:
            found = [getattr(_child(expert, name), kind) for expert in experts] if name is not None else []
            return [] if not found or found[0] is None else found

        return ExpertWeights(
            up=parameters(self.up, "weight"),
            down=parameters(self.down, "weight"),
            gate=parameters(self.gate, "weight"),
            up_bias=parameters(self.up, "bias"),
            down_bias=parameters(self.down, "bias"),
            gate_bias=parameters(self.gate, "bias"),
        )


def _child(module: nn.Module, name: str) -> nn.Linear:
    child = module.get_submodule(name)
    assert isinstance(child, nn.Linear)
    return child


def _decide_now(decide: Callable[[], Any]) -> Any:
    return decide()


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``tensor`` as autocast to ``dtype`` casts a product's operand: float64 stays, and None is no autocast."""
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the calls of one forward share: see :meth:`Experts.prepare`.

    ``weights``  of the fused MLP; None where the experts are called as the modules they are
    ``dtype``    of autocast, which the results have either way (float64 stays float64); None where it is off
    ``sums``     of the weights' gradients over the calls
    """

    weights: ExpertWeights | None
    dtype: torch.dtype | None
    sums: GradientSums


class Experts(nn.Module):
    """The experts of one rank, run over ragged rows.

    ``expert`` is copied ``num_local`` times, as DeepSpeed copies it. ``initialize(module, logical_id)``, if given,
    then gives each copy its own weights: it is called with torch's generator seeded by one draw for the layer and by
    the logical id, so an expert starts the same whatever the expert-parallel size.

    ``trains_somewhere``  some rank's experts of this layer train: then every rank's results take part in backward,
                          as a combine whose backward some ranks begin and others do not would never end
    """

    MLPS = "mlps"  # name of the module list, and so of the experts in the state dict

    def __init__(
        self,
        expert: nn.Module,
        num_local: int,
        *,
        first_id: int = 0,
        initialize: Callable[[nn.Module, int], None] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.add_module(self.MLPS, nn.ModuleList([copy.deepcopy(expert) for _ in range(num_local)]))
        self.formula = recognize(expert)
        self.trains_somewhere = False
        self.initialize_each(first_id, initialize)

    def initialize_each(self, first_id: int, initialize: Callable[[nn.Module, int], None] | None) -> None:
        """Calls ``initialize(expert, logical_id)`` for each local expert, each from its own random stream."""
        if initialize is None:
            return
        seed = int(torch.randint(2**62, ()))  # another one for the next layer
        for local_id, expert in enumerate(self.modules_in_order()):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + first_id + local_id)
                initialize(expert, first_id + local_id)

    def modules_in_order(self) -> nn.ModuleList:
        """The local experts, by local id."""
        mlps = getattr(self, self.MLPS)
        assert isinstance(mlps, nn.ModuleList)
        return mlps

    def prepare(
        self,
        device_type: str,
        *,
        num_calls: int = 1,
        decide: Callable[[Callable[[], Any]], Any] = _decide_now,
    ) -> Prepared:
        """What ``num_calls`` calls of one forward share.

        ``decide`` says whether the experts run fused, or what was recorded (see ``xmoe.replay``): a profiler hooks
        them in the forward only, and a recompute that keeps other tensors than the forward is refused by torch.
        The results' dtype does not hang on it: on the other ranks, which expect rows of their own dtype, nobody may
        have hooked anything.
        """
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        experts = self.modules_in_order()
        fused = decide(lambda: self.formula is not None and all(map(self._is_plain, experts)))
        if self.formula is None or not fused:
            return Prepared(weights=None, dtype=dtype, sums=GradientSums(num_calls))
        weights = self.formula.weights(experts)
        if dtype is not None:
            weights = ExpertWeights(
                **{field: [_cast(w, dtype) for w in getattr(weights, field)] for field in ExpertWeights.FIELDS}
            )
        return Prepared(weights=weights, dtype=dtype, sums=GradientSums(num_calls))

    def forward(self, rows: Rows, plan: ExpertPlan, prepared: Prepared | None = None) -> Tensor:
        """``y_RD``: for each row the weighted sum of its assignments' experts, in the rows' dtype or autocast's."""
        prepared = prepared if prepared is not None else self.prepare(rows.x_RD.device.type)
        y_RD = self._results(rows, plan, prepared)
        return join_backward(y_RD) if self.trains_somewhere else y_RD

    def _results(self, rows: Rows, plan: ExpertPlan, prepared: Prepared) -> Tensor:
        if self.formula is None or prepared.weights is None:
            return attach(_cast(self._loop(rows, plan), prepared.dtype), rows.x_RD, rows.weights_M)
        return expert_mlp(
            _cast(rows.x_RD, prepared.dtype),
            plan.row_ids_M,
            plan.assignments_RK,
            rows.weights_M,
            plan.tokens_per_local_expert,
            plan.counts_e,
            experts=prepared.weights,
            activation=self.formula.activation,
            sums=prepared.sums,
        )

    def _is_plain(self, expert: nn.Module) -> bool:
        """Whether ``expert`` still is what was recognised: nobody hooked, wrapped or replaced its parts since."""
        names = self.formula.names if self.formula is not None else ()
        return all(type(expert.get_submodule(name)) is nn.Linear for name in names) and not any(
            map(_is_altered, expert.modules())
        )

    def _loop(self, rows: Rows, plan: ExpertPlan) -> Tensor:
        """Any module, called as DeepSpeed calls it: on ``[1, n, D]``, of a tuple result the first element.

        Every expert is called, without rows too: hooks of its parameters then fire on every rank alike.
        """
        x_RD = rows.x_RD
        y_RD = torch.zeros_like(x_RD, dtype=accumulator_dtype(x_RD.dtype))
        start = 0
        for expert, count in zip(self.modules_in_order(), plan.tokens_per_local_expert, strict=True):
            ids = plan.row_ids_M[start : start + count]
            weights_n1 = rows.weights_M[start : start + count, None]
            result = expert(x_RD.index_select(0, ids)[None])
            result = result[0] if isinstance(result, tuple) else result
            y_RD.index_add_(0, ids, (result[0] * weights_n1).to(y_RD.dtype))
            start += count
        return y_RD.to(x_RD.dtype)


def _is_altered(module: nn.Module) -> bool:
    return "forward" in vars(module) or bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def recognize(expert: nn.Module) -> MLPFormula | None:
    """The formula of an expert module, or None where it is not one of the known.

    Names only propose; what decides is that the module computes what the formula says, on random rows in float64.
    A module that drops out, scales, normalises or adds a residual is therefore never mistaken for a plain MLP.
    """
    for formula in _proposals(expert):
        if _computes(expert, formula):
            return formula
    return None


def _proposals(expert: nn.Module) -> Iterator[MLPFormula]:
    linears = {name for name, child in expert.named_children() if type(child) is nn.Linear}
    for gate, up, down in _GATED_NAMES:
        if {gate, up, down} <= linears:
            yield MLPFormula(activation="swiglu", up=up, down=down, gate=gate)
    pairs = [pair for pair in _PLAIN_NAMES if set(pair) <= linears]
    if isinstance(expert, nn.Sequential):
        names = [name for name, child in expert.named_children() if type(child) is nn.Linear]
        pairs += [(names[0], names[1])] if len(names) == 2 else []
    for up, down in pairs:
        for activation in _PLAIN_ACTIVATIONS:
            yield MLPFormula(activation=activation, up=up, down=down)


@torch.no_grad()
def _computes(expert: nn.Module, formula: MLPFormula) -> bool:
    owners = {name.rpartition(".")[0] for name, _ in expert.named_parameters()}
    if (
        owners != set(formula.names)
        or any(True for _ in expert.buffers())
        or any(p.is_meta for p in expert.parameters())
    ):
        return False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Weights of any scale (zeros, too) must leave a difference to see: the probe has its own.
        probe = copy.deepcopy(expert).to(device="cpu", dtype=torch.float64).train()
        for parameter in probe.parameters():
            parameter.normal_()
        # Rows of any size, too: a clamp shows in the large ones only, an epsilon in the small ones.
        sizes = torch.logspace(-4, 4, 17, dtype=torch.float64)[:, None]
        x = sizes * torch.randn(1, 17, _child(probe, formula.up).in_features, dtype=torch.float64)
        try:
            found = [probe(x) for _ in range(2)]
        except Exception:  # a module of another calling convention: not this formula, whatever it raises
            return False
    expected = _apply_formula(probe, formula, x)
    results = [result[0] if isinstance(result, tuple) else result for result in found]
    return all(
        isinstance(result, Tensor)
        and result.shape == expected.shape
        and bool(((result - expected).abs().amax(-1) <= 1e-9 * expected.abs().amax(-1)).all())
        for result in results
    )


def _apply_formula(expert: nn.Module, formula: MLPFormula, x: Tensor) -> Tensor:
    up = _child(expert, formula.up)(x)
    if formula.gate is not None:
        hidden = nn.functional.silu(_child(expert, formula.gate)(x)) * up
    elif formula.activation == "relu":
        hidden = up.relu()
    else:
        hidden = nn.functional.gelu(up, approximate="tanh" if formula.activation == "gelu_tanh" else "none")
    return _child(expert, formula.down)(hidden)
