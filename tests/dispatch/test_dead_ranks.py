"""A rank that dies or stops in the middle of a dispatch: all others end by themselves, and say where they were."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).with_name("dead_rank_main.py")
WORLD, STEP, TIMEOUT_S = 4, 3, 6.0


def survivors(folder: Path, number: signal.Signals, operation: str, dispatch: str) -> dict[int, tuple[int, float, str]]:
    """Exit status, seconds after the signal, and output of every rank that ended before the script's limit."""
    section = {"dispatch": dispatch, "collective_timeout_s": TIMEOUT_S}
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-P", str(SCRIPT), str(folder), str(int(number)), operation, json.dumps(section)]
    # A session of its own, so that its ranks can be ended with it.
    job = subprocess.Popen(command, env=environ, start_new_session=True)
    try:
        assert job.wait(timeout=150) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    ends = json.loads((folder / "ends.json").read_text())
    logs = {rank: (folder / f"rank-{rank}.log").read_text() for rank in range(WORLD)}
    return {int(rank): (status, seconds, logs[int(rank)]) for rank, (status, seconds) in ends.items()}


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("dispatch", "operation"), [("flat", "dispatch of rows")])
def test_all_others_end_and_name_the_collective_the_layer_and_the_step(tmp_path, dispatch, operation, number):
    ended = survivors(tmp_path, number, operation, dispatch)
    assert sorted(ended) == list(range(WORLD - 1)), "ranks still waited when the limit had passed"
    for rank, (status, seconds, log) in ended.items():
        assert status == 1, f"rank {rank}: {log[-2000:]}"
        assert seconds < 60
        last = [line for line in log.splitlines() if f"RuntimeError: rank {rank}" in line][-1]
        assert f"'blocks.0: {operation}, step {STEP}'" in last, f"rank {rank}: {last}"
    if number == signal.SIGSTOP:
        # Nothing closes a stopped rank's connections: the first to give up is a rank whose time was up.
        assert any(f"has waited {TIMEOUT_S:g} s in" in log for _, _, log in ended.values())
