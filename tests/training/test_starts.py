"""The README's start lines, run from a clone's root: equal losses from all of them, and no rank is left behind.

Starting four ranks takes most of the time, so each line is run once: what ``deepspeed`` begins and TERM interrupts,
``torchrun`` finishes; ``mpiexec`` and srun's variables give the run they are compared with.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jobs
import psutil
import pytest

from xmoe.testing import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]

CLONE = Path(__file__).resolve().parents[2]
NUM_STEPS = 24
# DeepSpeed compiles its Muon optimizer while it is imported, which no job here uses: seconds for each rank.
SITE = """
import sys, types

class Unused(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

name = "deepspeed.runtime.zero.muon.muon_optimizer"
sys.modules[name] = Unused(name)
"""


def start_line(launcher: str) -> list[str]:
    """The README's line that starts four ranks with ``launcher``, split into arguments."""
    lines = re.findall(rf"^    (\S*{launcher} .*xmoe train .*)$", (CLONE / "README.md").read_text(), re.MULTILINE)
    (line,) = [line for line in lines if "moe_cpu_small" in line]
    return shlex.split(line)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what a clone's root holds, and the run file in place of the README's."""
    root = tmp_path_factory.mktemp("clone")
    for name in ("kernels", "xmoe"):
        (root / name).symlink_to(CLONE / name)
    (root / ".venv").symlink_to(sys.prefix)
    # Any rank with the root on its sys.path would fail on this; no launcher imports typer.
    (root / "typer.py").write_text("raise ImportError('the root of the clone is on sys.path')")
    (root / "site").mkdir()
    (root / "site/sitecustomize.py").write_text(SITE)
    (root / "launch/configs").mkdir(parents=True)
    jobs.write_text(root / "text")
    content = jobs.run_file(data={"paths": ["text"], "cache_dir": "cache"}, run={"steps": NUM_STEPS})
    (root / "launch/configs/moe_cpu_small.json").write_text(json.dumps(content))
    return root


def start(root: Path, line: list[str], *arguments: str) -> subprocess.Popen[bytes]:
    launchers_own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONSAFEPATH")
    environ = {name: value for name, value in os.environ.items() if name not in launchers_own}
    environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "site")}
    with (root / "output.txt").open("wb") as stream:
        return subprocess.Popen([*line, *arguments], cwd=root, env=environ, stdout=stream, stderr=subprocess.STDOUT)


def end(processes: list[psutil.Process]) -> None:
    """Kills those of the test's own processes that are left."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def finish(root: Path, line: list[str], *arguments: str) -> None:
    job = start(root, line, *arguments)
    try:
        assert job.wait(180) == 0, (root / "output.txt").read_text()
    finally:
        if job.poll() is None:
            end([*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)])
            job.wait(10)


def losses(root: Path, name: str) -> dict[int, float]:
    path = root / "runs" / name / "metrics.jsonl"
    text = path.read_text().splitlines(keepends=True) if path.exists() else []
    lines: list[dict[str, Any]] = [json.loads(line) for line in text if line.endswith("\n")]
    return {line["step"]: line["loss_bits_per_byte"] for line in lines if line["kind"] == "train"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def below_srun(root: str, arguments: list[str], port: int) -> int:
    """Runs the command as srun would start it; the process is a preloaded one."""
    rank, world = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ |= {"SLURM_PROCID": rank, "SLURM_NTASKS": world, "SLURM_LOCALID": rank, "MASTER_PORT": str(port)}
    os.environ |= {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}
    from xmoe.launch.cli import main

    os.chdir(root)
    sys.argv = ["xmoe", *arguments]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[int, float]:
    """Losses of the run started with srun's variables."""
    line = start_line("srun")
    arguments = [*line[line.index(".venv/bin/xmoe") + 1 :], "--name", "srun"]
    assert run_ranks(4, below_srun, str(root), arguments, free_port(), init=False, timeout_s=150) == [0] * 4
    found = losses(root, "srun")
    assert list(found) == list(range(1, NUM_STEPS + 1))
    return found


def test_mpiexec_gives_the_losses_of_srun(root: Path, expected: dict[int, float]) -> None:
    if not Path(sys.prefix, "bin/mpiexec").exists():
        pytest.skip("no mpiexec in this environment: pip install mpi4py mpich")
    finish(root, start_line("mpiexec"), "--name", "mpi")
    assert losses(root, "mpi") == pytest.approx(expected, abs=1e-6)


def test_deepspeed_stopped_by_term_and_torchrun_give_the_losses_of_srun(root: Path, expected: dict[int, float]) -> None:
    line = start_line("deepspeed")
    line.insert(1, f"--master_port={free_port()}")
    job = start(root, line, "--name", "r")
    launcher = psutil.Process(job.pid)
    family: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 180
        while len(losses(root, "r")) < 3:
            assert time.monotonic() < deadline, (root / "output.txt").read_text()
            assert job.poll() is None, (root / "output.txt").read_text()
            time.sleep(0.02)
        family = launcher.children(recursive=True)
        assert sum("--local_rank=" in " ".join(process.cmdline()) for process in family) == 4
        # What a batch system or a user does: the one process they know gets the signal.
        job.send_signal(signal.SIGTERM)
        gone, left = psutil.wait_procs(family, timeout=60)
        assert len(gone) >= 5
        assert not left, (root / "output.txt").read_text()
        job.wait(10)
    finally:
        end([*family, launcher])
        job.wait(10)
    first = losses(root, "r")
    assert 3 <= len(first) < NUM_STEPS
    checkpoints = sorted((root / "runs/r/checkpoints").glob("step_*"))
    assert [path.name for path in checkpoints] == [f"step_{max(first):08d}"]
    assert (checkpoints[0] / "manifest.json").is_file()

    finish(root, start_line("torchrun"), "--name", "r", "--resume")
    assert losses(root, "r") == pytest.approx(expected, abs=1e-6)
    assert losses(root, "r").items() >= first.items()
