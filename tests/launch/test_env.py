"""Where a process stands, from each launcher's variables."""

from __future__ import annotations

import pytest

from xmoe.launch.env import LaunchError, find_place, first_host

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "frontier[00123-00124,00200]",
}


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
        pytest.param(SLURM | {"SLURM_PROCID": "9"}, r"rank 9 is not below", id="slurm-rank-too-high"),
    ],
)
def test_contradictions_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        find_place(environ)


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
