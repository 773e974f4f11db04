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

# Where the last rank falls, and where others may then wait for it: not all need its second hop, and whoever falls on
# entering that has not yet ended the exchange of weights, begun before and waited for after it.
FLAT, BOTH = {"dispatch": "flat"}, {"dispatch": "node+gpu", "ranks_per_node": 2}
SCENARIOS = {
    "killed": (signal.SIGKILL, FLAT, "dispatch of rows", {"dispatch of rows"}),
    "stopped": (signal.SIGSTOP, FLAT, "dispatch of rows", {"dispatch of rows"}),
    "killed-hierarchical": (signal.SIGKILL, BOTH, "dispatch of rows", {"dispatch of rows"}),
    "stopped-hierarchical": (
        signal.SIGSTOP,
        BOTH,
        "dispatch of rows, second hop",
        {"dispatch of rows, second hop", "dispatch of weights", "combine of rows"},
    ),
    # One chunk's results and the next one's rows are under way.
    "killed-overlapped": (
        signal.SIGKILL,
        {**BOTH, "overlap_chunks": 3},
        "combine of rows",
        {
            *("dispatch of rows", "dispatch of rows, second hop", "dispatch of weights"),
            *("combine of rows", "combine of rows, second hop"),
        },
    ),
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
        assert job.wait(timeout=360) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    return folder


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_all_others_end_and_name_the_collective_the_layer_and_the_step(folder, name):
    number, _, _, operations = SCENARIOS[name]
    ends = json.loads((folder / name / "ends.json").read_text())
    assert sorted(ends) == ["0", "1", "2"], "a rank still waited when the script's limit had passed"
    reports = []
    for rank, (status, seconds) in ends.items():
        log = (folder / name / f"rank-{rank}.log").read_text()
        assert status == 1, f"rank {rank}: {log[-2000:]}"
        assert seconds < 60
        reports.append([line for line in log.splitlines() if f"RuntimeError: rank {rank}" in line][-1])
        titles = [f"'blocks.0: {operation}, step {STEP}'" for operation in operations]
        assert any(title in reports[-1] for title in titles), reports[-1]
    if number == signal.SIGSTOP:
        # Nothing closes a stopped rank's connections: the first to give up is a rank whose time was up.
        assert any(f"has waited {TIMEOUT_S:g} s in" in report for report in reports)
