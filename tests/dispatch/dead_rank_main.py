"""Trains a small network on ranks that nobody watches; the last one dies, or stops, in the middle of a dispatch.

    python dead_rank_main.py FOLDER '{NAME: {"signal": 9, "operation": "dispatch of rows", "section": {...}}, ...}'

forks WORLD ranks for one scenario after the other, once everything is imported; each ends as a Python process of its
own does, by returning or raising. The last rank sends itself the signal on entering the operation (the end of a
collective's label) in step STEP; "section" is the "xmoe" section. When all others have ended, or LIMIT_S has passed,
FOLDER/NAME/ends.json says with which status; what a rank wrote is in rank-N.log beside it. Nothing here ends a
survivor before.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xmoe.integrations.deepspeed import MoE, initialize

WORLD = 4
STEP = 3
WIDTH = 8
LIMIT_S = 120.0  # a hang lasts half an hour, the process group's own limit


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [
            MoE(
                WIDTH,
                nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH)),
                8,
                WORLD,
                3,
                drop_tokens=False,
            )
            for _ in range(2)
        ]
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.blocks:
            x = x + layer(x)[0]
        return x.square().sum()


def train(rank: int, folder: Path, scenario: dict[str, Any]) -> None:
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    net = Net()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**6,
        "xmoe": scenario["section"],
    }
    engine = initialize(model=net, model_parameters=list(net.parameters()), config=settings)[0]
    if rank == WORLD - 1:
        _fall(scenario["signal"], scenario["operation"])
    for step in range(1, STEP + 2):
        engine.backward(engine(torch.randn(1, 5 + (rank + step) % 3, WIDTH)))
        engine.step()


def _fall(number: int, operation: str) -> None:
    """Makes this rank send itself ``number`` as it enters ``operation`` in step STEP, its own rows unsent."""
    to_all = dist.all_to_all_single

    def fall(*args: object, **options: object) -> object:
        exchange = sys._getframe(1).f_locals["exchange"]
        if exchange.title.endswith(f"{operation}, step {STEP}"):
            os.kill(os.getpid(), number)
        return to_all(*args, **options)

    dist.all_to_all_single = fall


def fork_ranks(scenario: dict[str, Any], folder: Path) -> dict[int, int]:
    """Ranks by process; none in a rank that has trained to the end."""
    ranks: dict[int, int] = {}
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
            log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            train(rank, folder, scenario)
            return {}
        ranks[pid] = rank
    return ranks


def watch(ranks: dict[int, int], folder: Path) -> None:
    """Waits for all ranks but the last, at most LIMIT_S, and writes how they ended."""
    ends: dict[int, int] = {}
    started = time.monotonic()
    try:
        while len(ends) < WORLD - 1 and time.monotonic() - started < LIMIT_S:
            for pid, rank in ranks.items():
                if rank != WORLD - 1 and rank not in ends:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        ends[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
    finally:
        for pid, rank in ranks.items():
            if rank not in ends:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    (folder / "ends.json").write_text(json.dumps(ends))


def main() -> None:
    gc.freeze()  # a rank at its end looks through what is its own, not through all that was imported before
    for name, scenario in json.loads(sys.argv[2]).items():
        folder = Path(sys.argv[1], name)
        folder.mkdir()
        ranks = fork_ranks(scenario, folder)
        if not ranks:
            return  # to the end of the interpreter, like any rank
        watch(ranks, folder)


if __name__ == "__main__":
    main()
