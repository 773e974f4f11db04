"""The step loop of ``xmoe train``."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xmoe.config import TrainConfig
from xmoe.metrics import take_layer_loads
from xmoe.models.flops import FlopCount

from . import checkpoints
from .corpus import Corpus
from .display import Display, StepView
from .metrics_file import MetricsFile
from .sampler import Sampler
from .step_metrics import LocalStep, StepMetrics, reduce_step
from .stop import StopRequest
from .validate import read_batch, validation_bits
from .windows import LayerWindows

_NUM_WINDOWS = 60
"""About how many columns the expert-load picture has."""


def agreed_to_stop(stop: StopRequest, device: torch.device) -> bool:
    """Whether any rank was asked to stop. Collective; the loop itself asks within the all-reduce of each step."""
    flag = torch.tensor(float(stop.reason is not None), device=device)
    dist.all_reduce(flag)
    return bool(flag.item() > 0)


@dataclass(kw_only=True)
class Trainer:
    """One rank's view of a run.

    ``metrics``    rank 0's metrics.jsonl, None on the others
    ``made_with``  what a checkpoint of this run must be resumed with
    """

    engine: Any
    config: TrainConfig
    corpus: Corpus
    sampler: Sampler
    flops: FlopCount
    stop: StopRequest
    display: Display
    metrics: MetricsFile | None
    checkpoint_folder: Path
    made_with: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._window_steps = max(1, self.config.run.steps // _NUM_WINDOWS)
        self._windows = LayerWindows(self.metrics, last_step=0)

    def train(self, *, first_step: int) -> bool:
        """Trains from ``first_step`` finished steps to ``run.steps`` and saves the last one.

        Returns False when the ranks agreed to stop earlier; the state at that step is saved then. Raises
        RuntimeError on every rank when the loss is no longer finite.
        """
        run = self.config.run
        self._windows = LayerWindows(self.metrics, last_step=first_step)
        take_layer_loads(self.engine.module)
        with self.display.running(first_step=first_step):
            for step in range(first_step + 1, run.steps + 1):
                started_s = time.perf_counter()
                metrics = self._train_step(step)
                if not math.isfinite(metrics.loss_nats):
                    raise RuntimeError(
                        f"the loss is {metrics.loss_nats} at step {step}; lower the learning rate, or resume from "
                        f"the last checkpoint in {self.checkpoint_folder} with other settings"
                    )
                self._report(step, metrics, elapsed_s=time.perf_counter() - started_s)
                if metrics.stop:
                    self._save(step)
                    return False
                if step % run.eval_interval == 0 and step < run.steps:
                    self._report_validation(step, self.validate(run.eval_sequences))
                if step == run.steps or (run.save_interval and step % run.save_interval == 0):
                    self._save(step)
        return True

    def _train_step(self, step: int) -> StepMetrics:
        """Runs the micro-batches of one optimizer step and sums what all ranks measured."""
        tp_size = self.config.model.tp_size
        data_rank, place = divmod(dist.get_rank(), tp_size)
        losses, aux_losses, num_tokens = [], [], 0
        for index in range(self.sampler.accumulation):
            starts = self.sampler.starts(step - 1, data_rank, accumulation_index=index)
            tokens_BS, targets_BS = read_batch(
                self.corpus.train, starts, length=self.sampler.sequence_length, device=self.engine.device
            )
            loss, aux_loss = self.engine(tokens_BS, targets_BS)
            self.engine.backward(loss + self.config.model.aux_loss_weight * aux_loss)
            self.engine.step()
            losses.append(loss.detach().double())
            aux_losses.append(aux_loss.detach().double())
            num_tokens += targets_BS.numel() if place == 0 else 0
        local = LocalStep(
            loss_sum_nats=float(torch.stack(losses).sum()),
            aux_loss_sum=float(torch.stack(aux_losses).sum()),
            num_micro_batches=len(losses),
            num_tokens=num_tokens,
            loads=take_layer_loads(self.engine.module),
            stop=self.stop.reason is not None,
            num_sharers=1 if self.config.xmoe.sequence_shard else tp_size,
        )
        return reduce_step(local, self.engine.device)

    def _report(self, step: int, metrics: StepMetrics, *, elapsed_s: float) -> None:
        # Read on every rank: at ZeRO 0 the norm is a collective.
        grad_norm = self.engine.get_global_grad_norm()
        view = StepView(
            loss_bits_per_byte=metrics.loss_bits / self.corpus.train_bytes_per_token,
            loss_bits_per_token=metrics.loss_bits,
            aux_loss=metrics.aux_loss,
            grad_norm=float(grad_norm) if grad_norm is not None else math.nan,
            learning_rate=float(self.engine.get_lr()[0]),
            tokens_per_s=metrics.num_tokens / elapsed_s,
            effective_tflops_per_s=1e-12
            * self.flops.training(num_tokens=metrics.num_tokens, num_routed_rows=metrics.computed_rows)
            / elapsed_s,
            nominal_tflops_per_s=1e-12 * self.flops.nominal_training(metrics.num_tokens) / elapsed_s,
            dropped_share=metrics.dropped_share,
            load_cv=metrics.load_cv,
            dead_experts=metrics.num_dead_experts,
            all_to_all_bytes=metrics.all_to_all_bytes,
            between_nodes_bytes=metrics.between_nodes_bytes,
            redundancy=metrics.traffic.redundancy,
            busiest_receiver=metrics.busiest_receiver,
        )
        self._windows.add(metrics)
        if step % self._window_steps == 0 or step == self.config.run.steps:
            self._windows.write(step)
        self.display.step(step, view)
        if self.metrics is not None and step % self.config.run.log_interval == 0:
            fields = asdict(view)
            self.metrics.write("train", step=step, **fields)
            self.engine.monitor.write_events([(f"xmoe/{key}", value, step) for key, value in fields.items()])

    def validate(self, num_sequences: int) -> float:
        """Bits per byte of the held-out text. Collective."""
        bits_per_token = validation_bits(
            self.engine,
            self.corpus.held_out,
            length=self.sampler.sequence_length,
            count=num_sequences,
            micro_batch=self.sampler.micro_batch,
            tp_size=self.config.model.tp_size,
        )
        return bits_per_token / self.corpus.held_out_bytes_per_token

    def _report_validation(self, step: int, bits: float) -> None:
        self.display.validation(step, bits)
        if self.metrics is not None:
            per_token = bits * self.corpus.held_out_bytes_per_token
            self.metrics.write("validation", step=step, val_bits_per_byte=bits, val_bits_per_token=per_token)
            self.engine.monitor.write_events([("xmoe/val_bits_per_byte", bits, step)])

    def _save(self, step: int) -> None:
        # A resumed run starts a new window, so this one must be in the file.
        self._windows.write(step)
        target = checkpoints.save(self.engine, self.checkpoint_folder, step=step, made_with=self.made_with)
        self.display.say(f"saved {target}")

    def report_final_validation(self, bits: float) -> None:
        """Shows and writes the validation after the last step, the last point of the curve."""
        self._report_validation(self.config.run.steps, bits)
