"""What a window of a few steps measured of each MoE layer, for two kinds of lines of metrics.jsonl."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from xmoe.metrics import Traffic

from .metrics_file import MetricsFile
from .step_metrics import LayerStep, StepMetrics


@dataclass
class _LayerWindow:
    """Sums over the window's steps of one layer; ``busiest_received`` of each step's busiest rank."""

    selected_E: Tensor
    traffic: Traffic = field(default_factory=Traffic)
    bytes_by_link: Counter[str] = field(default_factory=Counter)
    busiest_received: int = 0
    mean_received: float = 0.0
    stage_s: Counter[str] = field(default_factory=Counter)
    slowest_stage_s: Counter[str] = field(default_factory=Counter)

    def add(self, layer: LayerStep, selected_E: Tensor) -> None:
        self.selected_E = self.selected_E + selected_E
        self.traffic = self.traffic + layer.traffic
        for name in ("to_self_bytes", "inside_node_bytes", "between_nodes_bytes"):
            self.bytes_by_link[name] += getattr(layer, name)
        self.busiest_received += int(layer.received_W.max())
        self.mean_received += int(layer.received_W.sum()) / layer.received_W.numel()
        self.stage_s.update(layer.stage_s)
        self.slowest_stage_s.update(layer.slowest_stage_s)

    def dispatch_fields(self, num_steps: int) -> dict[str, Any]:
        """What a line of kind ``dispatch`` says of the layer (``metrics_file``)."""
        rows = {f"{name}_rows": getattr(self.traffic, name) for name in ("to_self", "inside_node", "between_nodes")}
        seconds = {name: getattr(self, name) for name in ("stage_s", "slowest_stage_s")}
        return {
            **rows,
            **self.bytes_by_link,
            "redundancy": self.traffic.redundancy,
            "busiest_receiver": self.busiest_received / self.mean_received if self.mean_received else 1.0,
            **{
                name: {stage: total / num_steps for stage, total in totals.items()}
                for name, totals in seconds.items()
                if totals
            },
        }


class LayerWindows:
    """Sums steps up, and at a window's end writes a line of each kind for each layer.

    ``metrics``    rank 0's file; None on the others, which write nothing
    ``last_step``  the last finished step before the window
    """

    def __init__(self, metrics: MetricsFile | None, *, last_step: int) -> None:
        self._metrics = metrics
        self._last_step = last_step
        self._layers: dict[str, _LayerWindow] = {}

    def add(self, metrics: StepMetrics) -> None:
        """Adds the step after those added before."""
        for layer, selected_E in zip(metrics.layers, metrics.selected_LE, strict=True):
            if layer.name not in self._layers:
                self._layers[layer.name] = _LayerWindow(selected_E=selected_E.new_zeros(selected_E.shape))
            self._layers[layer.name].add(layer, selected_E)

    def write(self, step: int) -> None:
        """Ends the window with ``step``; one without steps writes nothing."""
        if self._metrics is not None:
            for name, window in self._layers.items():
                place = {"step": step, "first_step": self._last_step + 1, "layer": name}
                self._metrics.write("expert_load", **place, selected=window.selected_E.tolist())
                self._metrics.write("dispatch", **place, **window.dispatch_fields(step - self._last_step))
        self._last_step, self._layers = step, {}
