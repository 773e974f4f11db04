"""What rank 0 shows while it trains: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

_PLAIN_LINES = 40
"""About how many lines of steps a run prints where there is no terminal."""


@dataclass(frozen=True, kw_only=True)
class StepView:
    """The numbers of one step that are shown; all of them are also in metrics.jsonl under these names.

    ``loss_bits_per_byte``      the loss per byte of text: per token, over the mean bytes of the stream's tokens
    ``tokens_per_s``            tokens of all ranks over the step's wall time
    ``effective_tflops_per_s``  operations really computed, in 1e12 per second over all ranks
    ``nominal_tflops_per_s``    the same if every token kept all of its experts
    ``redundancy``              share of the rows between nodes that one for each expert would send and were not sent
    ``busiest_receiver``        rows that the busiest rank received from others, over the ranks' mean
    """

    loss_bits_per_byte: float
    loss_bits_per_token: float
    aux_loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float
    effective_tflops_per_s: float
    nominal_tflops_per_s: float
    dropped_share: float
    load_cv: float
    dead_experts: int
    all_to_all_bytes: int
    between_nodes_bytes: int
    redundancy: float
    busiest_receiver: float

    def cells(self) -> list[tuple[str, str]]:
        """Names and formatted values, for both kinds of display."""
        return [
            ("loss", f"{self.loss_bits_per_byte:.3f} bits/byte"),
            ("speed", f"{self.tokens_per_s:,.0f} tokens/s"),
            ("effective", f"{self.effective_tflops_per_s:.4g} TFLOP/s"),
            ("nominal", f"{self.nominal_tflops_per_s:.4g} TFLOP/s"),
            ("dropped", f"{100 * self.dropped_share:.1f} %"),
            ("load CV", f"{self.load_cv:.2f}"),
            ("dead experts", f"{self.dead_experts}"),
            ("all-to-all", f"{self.all_to_all_bytes / 1e6:.1f} MB, {self.between_nodes_bytes / 1e6:.1f} between nodes"),
        ]


class PatientConsole(Console):
    """A console whose reader may go away (``| head``, a launcher that died): rich would end the process then."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        if self.file is sys.stdout:
            # Else Python fails at exit, when it flushes what the reader never took.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Display:
    """Shows the progress of one run. On ranks other than 0 it is silent.

    A console that goes away never stops the training: output ends there.
    """

    def __init__(self, *, active: bool, num_steps: int, console: Console | None = None) -> None:
        self.console = console or PatientConsole(highlight=False, soft_wrap=True)
        self._active, self._num_steps = active, num_steps
        self._every = max(1, num_steps // _PLAIN_LINES)
        self._live: Live | None = None
        self._validation: float | None = None
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
        )
        self._task = self._progress.add_task("train", total=num_steps)

    @contextlib.contextmanager
    def running(self, *, first_step: int) -> Iterator[None]:
        """Shows the live panel, on a terminal, until the block ends."""
        if not (self._active and self.console.is_terminal):
            yield
            return
        self._progress.update(self._task, completed=first_step)
        with Live(self._progress, console=self.console, refresh_per_second=4) as self._live:
            yield
        self._live = None

    def say(self, text: str) -> None:
        """One line of text."""
        if not self._active:
            return
        try:
            self.console.print(text, markup=False)
        except OSError:
            self._active = False

    def step(self, step: int, view: StepView) -> None:
        """Shows finished step number ``step``."""
        if not self._active:
            return
        if self._live is None:
            if step == 1 or step % self._every == 0 or step == self._num_steps:
                cells = "  ".join(f"{name} {value}" for name, value in view.cells())
                self.say(f"step {step}/{self._num_steps}  {cells}")
            return
        self._progress.update(self._task, completed=step)
        with contextlib.suppress(OSError):
            self._live.update(self._panel(view))

    def validation(self, step: int, bits: float) -> None:
        self._validation = bits
        if self._live is None:
            self.say(f"step {step}/{self._num_steps}  validation {bits:.3f} bits/byte")

    def _panel(self, view: StepView) -> Table:
        cells = view.cells()
        if self._validation is not None:
            cells.insert(1, ("validation", f"{self._validation:.3f} bits/byte"))
        grid = Table.grid(padding=(0, 2), expand=True)
        half = (len(cells) + 1) // 2
        for left, right in zip(cells[:half], [*cells[half:], ("", "")], strict=False):
            grid.add_row(Text(left[0], "dim"), left[1], Text(right[0], "dim"), right[1])
        panel = Table.grid(expand=True)
        panel.add_row(self._progress)
        panel.add_row(grid)
        return panel

    def summary(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """A table of results."""
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(justify="right")
        for name, value in rows:
            table.add_row(name, value)
        if self._active:
            with contextlib.suppress(OSError):
                self.console.print(table)
