"""Who am I: rank, world and meeting point of this process, from whichever launcher started it.

The only module that reads launcher variables. Four sources, the first that applies:

    torchrun, deepspeed   RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    SLURM (srun)          SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID and the step's node list
    MPI (mpiexec)         OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, or PMI_RANK, PMI_SIZE, MPI_LOCALRANKID; the ranks
                          agree on a meeting point through mpi4py, unless MASTER_ADDR and MASTER_PORT name one
    single                none of these: a world of one on a free port
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_FIRST_PORT, _NUM_PORTS = 20000, 20000
# What mpiexec gives its ranks. Left in place, whatever speaks MPI in this process or below it later (DeepSpeed's own
# CPU backend can) would call an mpiexec that this rank has signed off from.
_MPI_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL", "HYDI_", "HYDRA_")


@dataclass(frozen=True, kw_only=True)
class _MpiLauncher:
    """One family of mpiexec: its name, the variables it sets, and whose ranks it can start."""

    name: str
    rank: str
    size: str
    local_rank: str
    is_open_mpi: bool


_MPI_LAUNCHERS = (
    _MpiLauncher(
        name="Open MPI's mpiexec",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        is_open_mpi=True,
    ),
    _MpiLauncher(
        name="an mpiexec of the MPICH family",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        is_open_mpi=False,
    ),
)
# As mpi4py names them; all others take part in MPICH's start-up protocol.
_OPEN_MPI_VENDORS = ("Open MPI", "Spectrum MPI")


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
    source: Literal["torchrun", "slurm", "mpi", "single"]

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise LaunchError(
                f"rank {self.rank} is not below the world size {self.world_size} ({self.source} variables); "
                "start all ranks from one launcher"
            )

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Writes the place as torchrun's variables, which torch and DeepSpeed read, and takes away mpiexec's."""
        for name in [name for name in environ if name.startswith(_MPI_PREFIXES)]:
            del environ[name]
        values = (self.rank, self.world_size, self.local_rank, self.master_addr, self.master_port)
        environ.update(zip(_TORCHRUN, map(str, values), strict=True))


def find_place(environ: Mapping[str, str]) -> ProcessPlace:
    """Reads the place of this process. Raises LaunchError naming the variable and its value.

    torchrun below srun is no contradiction: one SLURM task then starts several ranks. Below mpiexec every rank must
    call this: they talk.
    """
    torchrun = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environ]
    slurm = _is_slurm_step(environ)
    mpi = next((launcher for launcher in _MPI_LAUNCHERS if launcher.rank in environ), None)
    if not torchrun:
        if mpi is not None and not (slurm and _same_place(environ, mpi)):
            return _from_mpi(environ, mpi)
        return _from_slurm(environ) if slurm else _alone()
    if missing := [name for name in _TORCHRUN if name not in environ]:
        raise LaunchError(
            f"{torchrun[0]} is set ({environ[torchrun[0]]!r}) but {', '.join(missing)} is not; start the ranks with "
            "torchrun, srun or mpiexec, or unset it to run one process"
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


def is_launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process, so that its parent must outlive it."""
    names = ("WORLD_SIZE", "SLURM_PROCID", *(launcher.rank for launcher in _MPI_LAUNCHERS))
    return any(name in environ for name in names)


def _same_place(environ: Mapping[str, str], mpi: _MpiLauncher) -> bool:
    """Whether srun itself set the MPI variables. An mpiexec may use srun to reach the nodes, with other numbers."""
    pairs = ((mpi.rank, "SLURM_PROCID"), (mpi.size, "SLURM_NTASKS"))
    return all(environ.get(ours) == environ[slurms] for ours, slurms in pairs)


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


def _from_mpi(environ: Mapping[str, str], launcher: _MpiLauncher) -> ProcessPlace:
    rank = _integer(environ, launcher.rank)
    if launcher.size not in environ:
        raise LaunchError(f"{launcher.rank} is set ({rank}) but {launcher.size} is not; start the ranks with mpiexec")
    world_size = _integer(environ, launcher.size)
    local_rank = _integer(environ, launcher.local_rank) if launcher.local_rank in environ else None
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if address is None or port is None or local_rank is None:
        found = _meet(_load_mpi(launcher), rank=rank, world_size=world_size)
        address, port = address or found[0], port or str(found[1])
        local_rank = found[2] if local_rank is None else local_rank
    return ProcessPlace(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        master_addr=address,
        master_port=_integer({"MASTER_PORT": port}, "MASTER_PORT"),
        source="mpi",
    )


def _load_mpi(launcher: _MpiLauncher) -> Any:
    """mpi4py's MPI, not started. Raises LaunchError when ``launcher`` cannot start ranks of that MPI."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{launcher.name} started this process, and mpi4py cannot load its MPI library ({error}); install mpi4py "
            "for the MPI of this machine, or set MASTER_ADDR and MASTER_PORT"
        ) from None
    vendor, version = MPI.get_vendor()
    if (vendor in _OPEN_MPI_VENDORS) != launcher.is_open_mpi:
        # Started all the same, each rank would be a world of one, or wait for peers for ever.
        raise LaunchError(
            f"{launcher.name} started this process ({launcher.rank} is set), but mpi4py uses {vendor} "
            f"{'.'.join(map(str, version))}; use the mpiexec of {vendor}, or install mpi4py for the launcher's MPI"
        )
    return MPI


def _meet(mpi: Any, *, rank: int, world_size: int) -> tuple[str, int, int]:
    """Rank 0's address, a free port there, and this process's number on its node. Starts MPI and ends it.

    MPI is not needed later, and a process that ended without ``MPI_Finalize`` would be a failure to mpiexec.
    """
    mpi.Init()
    try:
        ranks = mpi.COMM_WORLD
        if (ranks.rank, ranks.size) != (rank, world_size):
            raise LaunchError(
                f"mpiexec calls this rank {rank} of {world_size}, mpi4py calls it {ranks.rank} of {ranks.size}; "
                "use the mpiexec that belongs to mpi4py's MPI"
            )
        neighbours = ranks.Split_type(mpi.COMM_TYPE_SHARED)
        local_rank, one_node = neighbours.rank, neighbours.size == world_size
        neighbours.Free()
        address = "127.0.0.1" if one_node else socket.gethostname()
        address, port = ranks.bcast((address, _free_port()) if rank == 0 else None)
        return address, port, local_rank
    finally:
        mpi.Finalize()


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list: ``first_host("node[003-010,12],login1") == "node003"``."""
    match = re.match(r"([^\[,]+)(?:\[([^\]\-,]+)[^\]]*\]([^\[,]*))?", node_list)
    if match is None:
        raise LaunchError(f"SLURM's node list {node_list!r} names no host")
    return match[1] + (match[2] or "") + (match[3] or "")


def _alone() -> ProcessPlace:
    return ProcessPlace(
        rank=0,
        world_size=1,
        local_rank=0,
        master_addr="127.0.0.1",
        master_port=_free_port(),
        source="single",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        value = int(environ[name])
    except ValueError:
        value = -1
    if value < 0:
        raise LaunchError(f"{name} is {environ[name]!r}: must be an integer, 0 or more")
    return value
