"""Tools of the tests: ranks as processes, comparison by a table of tolerances, a dense oracle.

Nothing of the package imports this module.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .testing_cluster.jobs import RankFailure
from .testing_cluster.nodes import load_function
from .types import ExpertPlan

# Bounds on (max, RMS) of |error| / max(RMS of the reference, |reference|), against float64 from the same rounded
# inputs. Measured at D=512, F=256, E=8 with float32 accumulation, then given room: float32 2.7e-6 / 4.1e-7, float16
# 2.4e-3 / 4.4e-4, bfloat16 1.9e-2 / 3.5e-3.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (5e-3, 1e-3),
    torch.bfloat16: (3e-2, 5e-3),
}

# Among them what an engine imports when it is made: with the muon module torch's compiler, seconds per process.
_PRELOAD = [
    *("torch", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_layer"),
    *("matplotlib.pyplot", "hypothesis", "pytest", "torch.profiler._cupti_monitor"),
    *("xmoe.integrations.deepspeed", "xmoe.testing", "xmoe.metrics", "xmoe.launch.cli", "xmoe.training.run"),
]


def assert_close(
    actual: Tensor | None, expected: Tensor | None, *, dtype: torch.dtype | None = None, what: str = "tensor"
) -> None:
    """Compares with the table's bounds for ``dtype`` (by default ``actual``'s). Raises AssertionError."""
    if actual is None or expected is None:
        assert actual is None, f"{what}: expected none"
        assert expected is None, f"{what}: is missing"
        return
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not actual.numel():
        return
    worst, rms = TOLERANCES[dtype or actual.dtype]
    reference = expected.detach().double()
    error = (actual.detach().double() - reference).abs()
    assert bool(torch.isfinite(error).all()), f"{what}: not finite"
    scale = reference.abs().clamp(min=max(float(reference.square().mean().sqrt()), 1e-30))
    relative = error / scale
    found = float(relative.max()), float(relative.square().mean().sqrt())
    assert found[0] <= worst, f"{what}: error {found[0]:.3g} (RMS {found[1]:.3g}) exceeds {worst:g}"
    assert found[1] <= rms, f"{what}: RMS error {found[1]:.3g} (max {found[0]:.3g}) exceeds {rms:g}"


def dense_oracle(x_TD: Tensor, *, experts: list[nn.Module], topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
    """Every token through every expert, in a loop, masked by its routing: obviously right, and slow. ``[T, D]``.

    Differentiable in everything; give it float64 modules and inputs.
    """
    out_TD = torch.zeros_like(x_TD)
    for index, expert in enumerate(experts):
        weight_T = (topk_weights_TK * (topk_ids_TK == index)).sum(dim=1)
        result = expert(x_TD)
        out_TD = out_TD + weight_T[:, None] * (result[0] if isinstance(result, tuple) else result)
    return out_TD


def assignments_of(row_ids_M: Tensor, num_rows: int) -> Tensor:
    """``ExpertPlan.assignments_RK`` of these row ids, by a loop: int32, filled up with M, which is no assignment.

    Example: row ids [2, 0, 2] of 3 rows gives [[1, 3], [3, 3], [0, 2]].
    """
    of_row: list[list[int]] = [[] for _ in range(num_rows)]
    for assignment, row in enumerate(row_ids_M.tolist()):
        of_row[row].append(assignment)
    width = max(map(len, of_row), default=0)
    padded = [found + [row_ids_M.numel()] * (width - len(found)) for found in of_row]
    return torch.tensor(padded, dtype=torch.int32, device=row_ids_M.device).view(num_rows, width)


def check_assignments(plan: ExpertPlan, num_rows: int) -> None:
    """Compares both sides of a plan, host and device. Raises AssertionError."""
    num_assignments = plan.row_ids_M.numel()
    assert plan.counts_e.tolist() == plan.tokens_per_local_expert
    assert plan.counts_e.dtype == torch.int64
    assert plan.assignments_RK.dtype == torch.int32
    assert plan.assignments_RK.shape[0] == num_rows
    for row, found in enumerate(plan.assignments_RK.tolist()):
        wanted = [m for m, other in enumerate(plan.row_ids_M.tolist()) if other == row]
        assert sorted(m for m in found if 0 <= m < num_assignments) == wanted, f"assignments of row {row}"


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    init: bool = True,
    return_exceptions: bool = False,
) -> list[Any]:
    """Runs ``function(*args)`` on ``world_size`` fresh processes joined by gloo; returns the results by rank.

    The processes are forked from one server that has imported torch and DeepSpeed already, so that a job costs
    fractions of a second and starts with clean process groups. ``function`` stands at the top level of its file.
    ``init=False`` leaves the process group to the function (RANK, LOCAL_RANK and WORLD_SIZE are set).

    A rank's exception is raised here as RankFailure, with everything the ranks printed; ranks that have not ended
    after ``timeout_s`` are killed and reported with their Python stacks. With ``return_exceptions`` a rank's
    exception is its result instead.
    """
    context = multiprocessing.get_context("forkserver")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context.set_forkserver_preload(_PRELOAD)
    source = (function.__code__.co_filename, function.__qualname__)
    with tempfile.TemporaryDirectory(prefix="xmoe-ranks-") as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            job = (rank, world_size, source, pickle.dumps(args), folder, timeout_s, init)
            process = context.Process(target=_rank_main, args=(theirs, *job), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            answers = _collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return _results(answers, Path(folder), return_exceptions=return_exceptions, timeout_s=timeout_s)


def _collect(pipes: list[Connection], timeout_s: float) -> dict[int, tuple[bool, bytes]]:
    """Answers by rank; after a first failure the other ranks get a few seconds more to say theirs."""
    deadline = time.monotonic() + timeout_s
    answers: dict[int, tuple[bool, bytes]] = {}
    waiting = dict(enumerate(pipes))
    while waiting and time.monotonic() < deadline:
        for pipe in wait(list(waiting.values()), timeout=max(deadline - time.monotonic(), 0.0)):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                answers[rank] = pickle.loads(waiting[rank].recv_bytes())
            except EOFError:
                answers[rank] = (False, pickle.dumps(RuntimeError("the process died without an answer")))
            del waiting[rank]
            if not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + 3.0)
    return answers


def _results(
    answers: dict[int, tuple[bool, bytes]], folder: Path, *, return_exceptions: bool, timeout_s: float
) -> list[Any]:
    results, said = [], []
    for rank, log in enumerate(sorted(folder.glob("rank-*.log"), key=lambda path: int(path.stem[5:]))):
        good, value = answers.get(rank, (False, None))
        result = pickle.loads(value) if value is not None else None
        if value is None:
            said.append(f"rank {rank} did not finish (limit {timeout_s:g} s):\n{log.read_text()[-4000:]}")
        elif not good and not return_exceptions:
            said.append(f"rank {rank} raised {type(result).__name__}: {result}\n{log.read_text()[-4000:]}")
        results.append(result)
    if said:
        raise RankFailure("\n".join(said))
    return results


def _rank_main(
    pipe: Connection,
    rank: int,
    world_size: int,
    source: tuple[str, str],
    arguments: bytes,
    folder: str,
    timeout_s: float,
    init: bool,
) -> None:
    log = open(os.path.join(folder, f"rank-{rank}.log"), "w", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.dump_traceback_later(max(timeout_s - 2.0, timeout_s * 0.9), file=log)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        if init:
            limit = timedelta(seconds=timeout_s + 60)  # after the job's own, which reports every rank's stack
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        answer = (True, pickle.dumps(load_function(*source)(*pickle.loads(arguments))))
    except BaseException as error:
        traceback.print_exc(file=log)
        try:
            answer = (False, pickle.dumps(error))
            pickle.loads(answer[1])
        except Exception:  # an error that cannot travel is told by its text
            answer = (False, pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}")))
    log.flush()
    pipe.send_bytes(pickle.dumps(answer))
    time.sleep(timeout_s)  # killed by the parent: a rank that leaves early breaks the others' last collective
    os._exit(0)
