"""``xmoe train`` jobs as small as they go: under torchrun, or faster on preloaded ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from xmoe.testing import run_ranks

WORLD = 4
NUM_STEPS = 60
START_S = 90
STOP_S = 30


def run_file(**sections: dict[str, Any]) -> dict[str, Any]:
    """A run of a model of width 16; each argument updates one section."""
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000000,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": "auto"}},
        "zero_optimization": {"stage": 1},
        # Noise in the router's input: a resumed run has the same losses only if each rank's random state is too.
        "xmoe": {"input_jitter": 0.01},
        "model": {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "num_kv_heads": 1,
            "dense_ffn_size": 32,
            "num_experts": 8,
            "top_k": 2,
            "expert_ffn_size": 16,
            "ep_size": 4,
            "correction_bias": True,
        },
        "data": {"sequence_length": 32},
        "run": {"steps": NUM_STEPS, "eval_interval": 20, "eval_sequences": 6, "final_eval_sequences": 6},
    }
    for name, values in sections.items():
        content[name] = content[name] | values
    return content


def write_text(folder: Path) -> Path:
    """A few text files that compress to something learnable."""
    folder.mkdir(parents=True)
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"line {i} of a text with few words and no end\n" * 100)
    return folder


@dataclass
class Job:
    """A started torchrun. ``folder`` holds what the ranks tell the test."""

    launcher: subprocess.Popen[str]
    folder: Path
    output: Path

    def rank_pid(self, rank: int) -> int:
        return int((self.folder / f"pid_{rank}").read_text())

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, condition: Callable[[], bool], *, what: str, timeout_s: float = START_S) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end or self.launcher.poll() is not None:
                self.kill()
                raise AssertionError(f"no {what} within {timeout_s} s; the job said:\n{self.text()}")
            time.sleep(0.02)

    def wait(self, timeout_s: float) -> int:
        """The launcher's exit code, once it and all ranks are gone."""
        end = time.monotonic() + timeout_s
        try:
            code = self.launcher.wait(timeout_s)
            while any(psutil.pid_exists(self.rank_pid(rank)) for rank in range(WORLD)):
                assert time.monotonic() < end, f"a rank outlived the launcher; the job said:\n{self.text()}"
                time.sleep(0.05)
        finally:
            self.kill()
        return code

    def exit_codes(self) -> list[str]:
        paths = [self.folder / f"exit_{rank}" for rank in range(WORLD)]
        return [path.read_text() if path.exists() else "killed" for path in paths]

    def kill(self) -> None:
        """Ends what is left of this job, and nothing else."""
        pids = [self.launcher.pid] if self.launcher.poll() is None else []
        pids += [self.rank_pid(rank) for rank in range(WORLD) if (self.folder / f"pid_{rank}").exists()]
        for pid in pids:
            try:
                process = psutil.Process(pid)
                if pid == self.launcher.pid or "rank_main" in " ".join(process.cmdline()):
                    process.kill()
            except psutil.NoSuchProcess:
                pass
        self.launcher.wait(10)


def start(work: Path, content: dict[str, Any] | None, *arguments: str) -> Job:
    """Starts ``xmoe train`` on four ranks in the folder ``work``; ``content`` replaces work/run.json."""
    if content is not None:
        (work / "run.json").write_text(json.dumps(content))
    number = len(list(work.glob("job*")))
    folder = work / f"job{number}"
    folder.mkdir()
    environ = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "XMOE_TEST_FOLDER": str(folder),
        "PYTHONSAFEPATH": "1",
    }
    output = folder / "output.txt"
    with output.open("w") as stream:
        launcher = subprocess.Popen(
            [
                sys.executable,
                *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)),
                str(Path(__file__).with_name("rank_main.py")),
                *("train", "--config", "run.json", *arguments),
            ],
            cwd=work,
            env=environ,
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return Job(launcher=launcher, folder=folder, output=output)


def run_on_ranks(
    work: Path,
    *arguments: str,
    world: int = WORLD,
    timeout_s: float = 100,
    meanwhile: Callable[[Callable[[int], int]], None] | None = None,
) -> list[tuple[int, str]]:
    """``xmoe ARGUMENTS`` on preloaded ranks in the folder ``work``: each rank's exit code and standard error.

    ``%RANK%`` in an argument becomes the rank. No launcher, so no launcher's second of start-up for each rank.
    ``meanwhile`` is called while they run, with a function from ranks to their process ids.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        answers = thread.submit(
            run_ranks, world, command_on_this_rank, str(work), arguments, folder, timeout_s=timeout_s
        )
        if meanwhile is not None:
            meanwhile(lambda rank: int(Path(folder, f"pid_{rank}").read_text()))
        return answers.result()


def command_on_this_rank(work: str, arguments: tuple[str, ...], folder: str | None = None) -> tuple[int, str]:
    """Runs the command in this process; its process id is in ``folder``/pid_RANK."""
    from xmoe.launch.cli import main

    os.chdir(work)
    if folder is not None:
        Path(folder, f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))
    # The ranks are joined already; the command only wants to see where they met.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    sys.argv = ["xmoe", *(argument.replace("%RANK%", os.environ["RANK"]) for argument in arguments)]
    errors = io.StringIO()
    code: object = 0
    with contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    return int(code or 0), errors.getvalue()  # type: ignore[call-overload]
