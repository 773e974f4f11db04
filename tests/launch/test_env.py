"""Where a process stands, from each launcher's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xmoe.launch import env
from xmoe.launch.env import LaunchError, find_place, first_host, is_launched

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "frontier[00123-00124,00200]",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "HYDI_CONTROL_FD": "7", "PMI_FD": "9"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def place(environ: dict[str, str]) -> tuple[int, int, int, str, int, str]:
    found = find_place(environ)
    return (
        found.rank,
        found.world_size,
        found.local_rank,
        found.master_addr,
        found.master_port,
        found.source,
    )


def test_torchrun() -> None:
    assert place(TORCHRUN) == (3, 8, 1, "node1", 29500, "torchrun")


def test_slurm() -> None:
    assert place(SLURM) == (5, 8, 1, "frontier00123", 20000 + 1234567 % 20000, "slurm")


def test_slurm_with_a_chosen_meeting_point() -> None:
    assert place(SLURM | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})[3:5] == ("a", 1)


def test_one_process_gets_a_free_port() -> None:
    rank, world, local, address, port, source = place({})
    assert (rank, world, local, address, source) == (0, 1, 0, "127.0.0.1", "single")
    assert 1024 <= port < 65536


def test_a_batch_script_is_no_slurm_step() -> None:
    batch = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}
    assert find_place(batch).source == "single"


@pytest.mark.parametrize(
    "slurm",
    [
        pytest.param({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, id="one-task-per-node"),
        pytest.param({"SLURM_PROCID": "3"}, id="same-place"),
        pytest.param({"SLURM_PROCID": "1", "TORCHELASTIC_RUN_ID": "x"}, id="torchrun-ranks-by-its-own-order"),
    ],
)
def test_torchrun_below_srun(slurm: dict[str, str]) -> None:
    assert find_place(SLURM | slurm | TORCHRUN).source == "torchrun"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        pytest.param(
            {"RANK": "0"}, r"RANK is set \('0'\) but WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT", id="part"
        ),
        pytest.param(TORCHRUN | {"RANK": "8"}, r"rank 8 is not below the world size 8", id="rank-too-high"),
        pytest.param(TORCHRUN | {"WORLD_SIZE": "many"}, r"WORLD_SIZE is 'many': must be an integer", id="word"),
        pytest.param(TORCHRUN | {"LOCAL_RANK": "-1"}, r"LOCAL_RANK is '-1'", id="negative"),
        pytest.param(SLURM | TORCHRUN, r"RANK \(3\) and SLURM_PROCID \(5\) differ in a world of 8", id="conflict"),
        pytest.param({"PMI_RANK": "0"}, r"PMI_RANK is set \(0\) but PMI_SIZE is not", id="mpi-part"),
        pytest.param(MPICH | MEETING | {"PMI_RANK": "4"}, r"rank 4 is not below the world size 4", id="mpi-rank"),
        pytest.param(SLURM | {"SLURM_PROCID": "9"}, r"rank 9 is not below", id="slurm-rank-too-high"),
    ],
)
def test_contradictions_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        find_place(environ)


@pytest.mark.parametrize("variables", [MPICH, OPEN_MPI], ids=["mpich", "open-mpi"])
def test_mpi_with_a_chosen_meeting_point_needs_no_mpi4py(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert place(variables | MEETING) == (2, 4, 0, "node1", 29500, "mpi")
    with pytest.raises(ModuleNotFoundError, match="mpi4py"):
        find_place(variables)


def test_torchrun_below_mpiexec() -> None:
    assert find_place(MPICH | TORCHRUN).source == "torchrun"


@pytest.mark.parametrize(
    ("slurm", "source"),
    [
        pytest.param({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, "slurm", id="srun-sets-both"),
        pytest.param({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "mpi", id="mpiexec-reaches-nodes-by-srun"),
        pytest.param({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, "mpi", id="in-another-order"),
    ],
)
def test_mpi_and_srun(slurm: dict[str, str], source: str) -> None:
    assert find_place(SLURM | slurm | MPICH | MEETING).source == source


@pytest.mark.parametrize(
    ("variables", "vendor", "message"),
    [
        (OPEN_MPI, ("MPICH", (5, 0, 2)), r"Open MPI's mpiexec started .*mpi4py uses MPICH 5\.0\.2"),
        (MPICH, ("Open MPI", (5, 0, 8)), r"an mpiexec of the MPICH family started .*mpi4py uses Open MPI 5"),
    ],
    ids=["open-mpi-launches-mpich", "mpich-launches-open-mpi"],
)
def test_a_launcher_of_another_mpi_is_an_error_before_mpi_starts(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], vendor: tuple[Any, ...], message: str
) -> None:
    # Without Init: starting it would be an AttributeError.
    library = SimpleNamespace(rc=SimpleNamespace(), MPI=SimpleNamespace(get_vendor=lambda: vendor))
    monkeypatch.setitem(sys.modules, "mpi4py", library)
    with pytest.raises(LaunchError, match=message):
        find_place(variables)
    assert library.rc.initialize is False


def test_a_rank_that_mpi_numbers_otherwise_is_an_error() -> None:
    ended: list[bool] = []
    world = SimpleNamespace(rank=0, size=1)
    mpi = SimpleNamespace(Init=lambda: None, Finalize=lambda: ended.append(True), COMM_WORLD=world)
    with pytest.raises(LaunchError, match=r"calls this rank 2 of 4, mpi4py calls it 0 of 1"):
        env._meet(mpi, rank=2, world_size=4)
    assert ended == [True]


FOUND = """
import os, pathlib, sys
from xmoe.launch.env import find_place
place = find_place(os.environ)
place.export(os.environ)
left = [name for name in os.environ if name.startswith(("PMI", "MPI_", "HYD"))]
found = f"{place.rank} {place.world_size} {place.local_rank} {place.master_addr} {place.master_port} {left}"
pathlib.Path(sys.argv[1], str(place.rank)).write_text(found)
"""


def test_ranks_meet_under_a_real_mpiexec(tmp_path: Path) -> None:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.skip(f"{mpiexec} is missing: pip install mpi4py mpich")
    environ = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    command = [str(mpiexec), "-n", "3", sys.executable, "-P", "-c", FOUND, str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = [(tmp_path / str(rank)).read_text().split(maxsplit=5) for rank in range(3)]
    assert [line[:4] for line in lines] == [[str(rank), "3", str(rank), "127.0.0.1"] for rank in range(3)]
    assert len({line[4] for line in lines}) == 1
    assert {line[5] for line in lines} == {"[]"}


@pytest.mark.parametrize(
    ("environ", "launched"),
    [({}, False), ({"WORLD_SIZE": "4"}, True), ({"SLURM_PROCID": "0"}, True), (MPICH, True), (OPEN_MPI, True)],
)
def test_a_launched_process_is_known(environ: dict[str, str], launched: bool) -> None:
    assert is_launched(environ) == launched


def test_export_writes_torchruns_variables() -> None:
    environ: dict[str, str] = {}
    find_place(SLURM).export(environ)
    assert environ["RANK"] == "5"
    assert find_place(environ).world_size == 8


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("node[003-010,12],login1", "node003"),
        ("n[1,5]-ib", "n1-ib"),
        ("x1000c[0-7]", "x1000c0"),
    ],
)
def test_first_host(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


def test_an_empty_node_list_is_an_error() -> None:
    with pytest.raises(LaunchError, match="names no host"):
        first_host("[1-2]")
