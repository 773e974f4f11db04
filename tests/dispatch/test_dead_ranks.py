"""A rank that dies or stops in the middle of a dispatch: all others end by themselves, and say where they were."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("dead_rank_main.py")
WORLD, STEP, TIMEOUT_S = 4, 3, 6.0

# Where the last rank falls, and where others may then wait or fail, whatever the machine's load. What it had waited for
# has reached all others; what it had begun without waiting has reached all, some or none. So a rank may be anywhere
# from the first exchange that the fallen one had not waited for to the last that can be reached without it.
# A layer's exchanges, in the order in which a rank waits for them:
WAITS = [
    "dispatch of rows",
    "dispatch of weights",
    "dispatch of rows, second hop",
    "combine of rows, second hop",
    "combine of rows",
]
FLAT, BOTH = {"dispatch": "flat"}, {"dispatch": "node+gpu", "ranks_per_node": 2}
SCENARIOS = {
    "killed": (signal.SIGKILL, FLAT, "dispatch of rows", WAITS[:1]),
    "stopped": (signal.SIGSTOP, FLAT, "dispatch of rows", WAITS[:1]),
    # All have their rows of the first hop, some their weights. One without holds up its neighbour, which then waits at
    # the second hop or on its way home; two neighbours with theirs wait for results from the other node.
    "stopped-hierarchical": (signal.SIGSTOP, BOTH, "dispatch of rows, second hop", WAITS[1:]),
    # The first chunk's results were to leave. Under way are the second chunk's second hop and the third one's rows and
    # weights: a rank without some of these waits there, one with all of them for the first chunk's results.
    "killed-overlapped": (signal.SIGKILL, {**BOTH, "overlap_chunks": 3}, "combine of rows", WAITS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for each scenario, after all have been run."""
    folder = tmp_path_factory.mktemp("dead-ranks")
    scenarios = {
        name: {"signal": number, "operation": operation, "section": {**section, "collective_timeout_s": TIMEOUT_S}}
        for name, (number, section, operation, _) in SCENARIOS.items()
    }
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-P", str(SCRIPT), str(folder), json.dumps(scenarios)]
    # A session of its own, so that its ranks can be ended with it.
    job = subprocess.Popen(command, env=environ, start_new_session=True)
    try:
        assert job.wait(timeout=540) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_all_others_end_and_name_the_collective_the_layer_and_the_step(folder, name):
    number, _, _, operations = SCENARIOS[name]
    ends = json.loads((folder / name / "ends.json").read_text())
    assert sorted(ends) == ["0", "1", "2"], "a rank still waited when the script's limit had passed"
    reports = []
    for rank, status in ends.items():
        log = (folder / name / f"rank-{rank}.log").read_text()
        assert status == 1, f"rank {rank}: {log[-2000:]}"
        reports.append([line for line in log.splitlines() if f"RuntimeError: rank {rank}" in line][-1])
        titles = [f"'blocks.0: {operation}, step {STEP}'" for operation in operations]
        assert any(title in reports[-1] for title in titles), reports[-1]
    if number == signal.SIGSTOP:
        # Nothing closes a stopped rank's connections: the first to give up is a rank whose time was up.
        assert any(f"has waited {TIMEOUT_S:g} s in" in report for report in reports)
