"""The routed expert MLP as a sequence of grouped GEMMs and sums by row, on the device from end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .grouped_dgrad import grouped_dgrad, grouped_dgrad_activated
from .grouped_forward import grouped_forward, grouped_forward_activated
from .grouped_wgrad import grouped_wgrad
from .plan import tile_schedule
from .ragged import Stacked, TileSchedule, stack
from .reference_activation import Activation
from .reference_experts import ExpertWeights, WantedGradients
from .rows import combine_rows, segment_sums
from .tiles import tile_height


def expert_mlp_forward(
    x_RD: Tensor,
    row_ids_M: Tensor,
    assignments_RK: Tensor,
    weights_M: Tensor,
    counts: Sequence[int],
    counts_e: Tensor,
    *,
    experts: ExpertWeights,
    activation: Activation,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``y_RD`` and the pre-activations that backward needs; see the twin.

    Rows are gathered and weights applied inside the first GEMM; what leaves the second is summed by row in float32, in
    the order of ``assignments_RK``. ``counts`` is not read: the device's ``counts_e`` are.
    """
    schedules = _Schedules(counts_e=counts_e, num_rows=row_ids_M.numel(), like=x_RD)
    up, down = stack(experts.up), stack(experts.down)
    hidden_MF, up_MF, gate_MF = grouped_forward_activated(
        x_RD,
        up,
        _stacked(experts.gate),
        schedules.of("grouped_forward_activated", up.first.shape, matrices=2 if experts.gate else 1),
        row_ids_M=row_ids_M,
        weights_M=weights_M,
        activation=activation,
        up_bias=_stacked(experts.up_bias),
        gate_bias=_stacked(experts.gate_bias),
    )
    y_MD = grouped_forward(
        hidden_MF,
        down,
        schedules.of("grouped_forward", down.first.shape),
        bias=_stacked(experts.down_bias),
        bias_scale_M=weights_M if experts.down_bias else None,
    )
    return combine_rows(y_MD, assignments_RK), up_MF, gate_MF


def expert_mlp_backward(
    grad_y_RD: Tensor,
    x_RD: Tensor | None,
    row_ids_M: Tensor,
    assignments_RK: Tensor,
    weights_M: Tensor,
    counts: Sequence[int],
    counts_e: Tensor,
    *,
    experts: ExpertWeights,
    activation: Activation,
    up_MF: Tensor,
    gate_MF: Tensor | None,
    wanted: WantedGradients | None = None,
) -> tuple[Tensor | None, Tensor, ExpertWeights]:
    """Gradients of :func:`expert_mlp_forward`: of ``x_RD``, of ``weights_M`` and of every expert's; see the twin."""
    wanted = wanted if wanted is not None else WantedGradients.all_of(experts)
    grad_y_RD, x_RD = grad_y_RD.contiguous(), x_RD.contiguous() if x_RD is not None else None
    schedules = _Schedules(counts_e=counts_e, num_rows=row_ids_M.numel(), like=grad_y_RD)
    down = stack(experts.down)
    schedule = schedules.of("grouped_dgrad_activated", down.first.shape[::-1])
    offsets_e1 = schedule.offsets_e1
    grads: dict[str, Tensor] = {}

    hidden_MF, d_up_MF, d_gate_MF, grad_weights_M = grouped_dgrad_activated(
        grad_y_RD,
        down,
        schedule,
        row_ids_M=row_ids_M,
        up_MF=up_MF,
        gate_MF=gate_MF,
        weights_M=weights_M,
        activation=activation,
        down_bias=_stacked(experts.down_bias),
    )
    if "down" in wanted.kinds:
        grads["down"] = grouped_wgrad(grad_y_RD, hidden_MF, schedule, row_ids_M=row_ids_M, gathered="d_out")
    del hidden_MF  # as large as the pre-activations, and read for the last time
    if "down_bias" in wanted.kinds:
        grads["down_bias"] = segment_sums(grad_y_RD, offsets_e1, row_ids_M=row_ids_M, weights_M=weights_M)
    for name, d_out_MF in (("up", d_up_MF), ("gate", d_gate_MF)):
        if name in wanted.kinds:
            grads[name] = grouped_wgrad(d_out_MF, x_RD, schedule, row_ids_M=row_ids_M, gathered="x")
        if f"{name}_bias" in wanted.kinds:
            grads[f"{name}_bias"] = segment_sums(d_out_MF, offsets_e1)
    grad_x_RD = None
    if wanted.rows:
        up, gate = stack(experts.up), _stacked(experts.gate)
        schedule = schedules.of("grouped_dgrad", up.first.shape[::-1])
        second = (d_gate_MF, gate) if d_gate_MF is not None and gate is not None else None
        grad_x_RD = combine_rows(grouped_dgrad(d_up_MF, up, schedule, second=second), assignments_RK)
    per_expert = ExpertWeights(**{name: grads[name].unbind() if name in grads else () for name in ExpertWeights.FIELDS})
    return grad_x_RD, grad_weights_M.to(weights_M.dtype), per_expert


def _stacked(matrices: Sequence[Tensor]) -> Stacked | None:
    return stack(matrices) if matrices else None


@dataclass(frozen=True, kw_only=True)
class _Schedules:
    """The rows of one call cut into tiles, once for each height that its kernels are configured for.

    ``like``  a tensor of the dtype and on the device of the operands
    """

    counts_e: Tensor
    num_rows: int
    like: Tensor
    found: dict[int, TileSchedule] = field(default_factory=dict)

    def of(self, op: str, sizes: Sequence[int], *, matrices: int = 1) -> TileSchedule:
        """The schedule for grouped GEMM ``op`` of these ``sizes``: the width of its result and of its sums."""
        (width, inner), num_experts = sizes, self.counts_e.numel()
        given = dict(num_experts=num_experts, num_rows=self.num_rows, width=width, inner=inner, matrices=matrices)
        block_m = tile_height(op, self.like, **given)
        if block_m not in self.found:
            self.found[block_m] = tile_schedule(self.counts_e, block_m=block_m, num_rows=self.num_rows)
        return self.found[block_m]
