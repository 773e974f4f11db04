"""Who am I: rank, world and meeting point of this process, from whichever launcher started it.

The only module that reads launcher variables. Three sources, the first that applies:

    torchrun, deepspeed   RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    SLURM (srun)          SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID and the step's node list
    single                none of these: a world of one on a free port
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_FIRST_PORT, _NUM_PORTS = 20000, 20000


class LaunchError(ValueError):
    """The launcher's variables are missing, malformed or contradict each other."""


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """Where this process stands: ``0 <= rank < world_size``; ranks meet at ``master_addr:master_port``."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    source: Literal["torchrun", "slurm", "single"]

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise LaunchError(
                f"rank {self.rank} is not below the world size {self.world_size} ({self.source} variables); "
                "start all ranks from one launcher"
            )

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Writes the place as torchrun's variables, which torch and DeepSpeed read."""
        values = (self.rank, self.world_size, self.local_rank, self.master_addr, self.master_port)
        environ.update(zip(_TORCHRUN, map(str, values), strict=True))


def find_place(environ: Mapping[str, str]) -> ProcessPlace:
    """Reads the place of this process. Raises LaunchError naming the variable and its value.

    torchrun below srun is no contradiction: one SLURM task then starts several ranks.
    """
    torchrun = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environ]
    slurm = _is_slurm_step(environ)
    if not torchrun:
        return _from_slurm(environ) if slurm else _alone()
    if missing := [name for name in _TORCHRUN if name not in environ]:
        raise LaunchError(
            f"{torchrun[0]} is set ({environ[torchrun[0]]!r}) but {', '.join(missing)} is not; start the ranks with "
            "torchrun or srun, or unset it to run one process"
        )
    place = ProcessPlace(
        rank=_integer(environ, "RANK"),
        world_size=_integer(environ, "WORLD_SIZE"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        master_addr=environ["MASTER_ADDR"],
        master_port=_integer(environ, "MASTER_PORT"),
        source="torchrun",
    )
    if slurm and "TORCHELASTIC_RUN_ID" not in environ:
        _check_agreement(place, environ)
    return place


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process. A batch script has the variables as well, but no step of its own."""
    in_batch_script = "SLURM_JOB_ID" in environ and not {"SLURM_STEP_ID", "SLURM_STEPID"} & environ.keys()
    return all(name in environ for name in _SLURM) and not in_batch_script


def _check_agreement(place: ProcessPlace, environ: Mapping[str, str]) -> None:
    """Variables exported by hand below srun must name the same place; another world size is another launcher's."""
    if place.world_size == _integer(environ, "SLURM_NTASKS") and place.rank != _integer(environ, "SLURM_PROCID"):
        raise LaunchError(
            f"RANK ({place.rank}) and SLURM_PROCID ({environ['SLURM_PROCID']}) differ in a world of "
            f"{place.world_size}; unset RANK, WORLD_SIZE and LOCAL_RANK below srun"
        )


def _from_slurm(environ: Mapping[str, str]) -> ProcessPlace:
    job = environ.get("SLURM_JOB_ID", "0")
    # The same on every rank without talking, and different for jobs that share a node.
    default_port = _FIRST_PORT + (int(job) if job.isdigit() else 0) % _NUM_PORTS
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    return ProcessPlace(
        rank=_integer(environ, "SLURM_PROCID"),
        world_size=_integer(environ, "SLURM_NTASKS"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        master_addr=environ.get("MASTER_ADDR") or (first_host(nodes) if nodes else "127.0.0.1"),
        master_port=_integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else default_port,
        source="slurm",
    )


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list: ``first_host("node[003-010,12],login1") == "node003"``."""
    match = re.match(r"([^\[,]+)(?:\[([^\]\-,]+)[^\]]*\]([^\[,]*))?", node_list)
    if match is None:
        raise LaunchError(f"SLURM's node list {node_list!r} names no host")
    return match[1] + (match[2] or "") + (match[3] or "")


def _alone() -> ProcessPlace:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ProcessPlace(rank=0, world_size=1, local_rank=0, master_addr="127.0.0.1", master_port=port, source="single")


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        value = int(environ[name])
    except ValueError:
        value = -1
    if value < 0:
        raise LaunchError(f"{name} is {environ[name]!r}: must be an integer, 0 or more")
    return value
