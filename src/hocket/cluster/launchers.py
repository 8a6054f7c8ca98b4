"""What launchers announce in environment variables: torchrun, Open MPI, MPICH and Slurm; and where they contradict each other.

A launcher may have started another one: ``srun torchrun …`` starts one torchrun per task, and ``mpirun`` in a batch script of Slurm
sees that script's variables. The inner one counts. Two that each say that they have started *this* process as one of several, and
say different things, are refused: every process would train for itself.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hocket.errors import HocketError

LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}
"""Rank, number of processes, rank on this machine, processes on this machine; those inside come before those around them."""
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")


@dataclass(frozen=True)
class Announced:
    """What one launcher says of this process."""

    launcher: str
    rank: int
    size: int
    local_rank: int = 0
    per_host: int = 0
    """0 where it does not say."""

    def __str__(self) -> str:
        return f"{self.launcher} says that this is process {self.rank} of {self.size}"


def announced(environ: Mapping[str, str]) -> Announced | None:
    """What the launcher of this process says; None if there is none.

    >>> announced({"PMI_RANK": "1", "PMI_SIZE": "2"})
    Announced(launcher='MPICH', rank=1, size=2, local_rank=0, per_host=0)
    """
    found = [one for launcher in LAUNCHERS if (one := _said_by(launcher, environ)) is not None]
    for other in found[1:]:
        if not _agree(found[0], other, environ):
            raise HocketError(
                f"Two launchers at once: {found[0]}, and {other}; start hocket with one of them, or unset "
                f"{LAUNCHERS[other.launcher][0]}."
            )
    return found[0] if found else None


def _said_by(launcher: str, environ: Mapping[str, str]) -> Announced | None:
    rank, size, local, per_host = LAUNCHERS[launcher]
    if rank not in environ or size not in environ:
        return None
    here = environ.get(per_host) or "0"
    if launcher == "Slurm":
        if _batch_script(environ):
            return None
        here = tasks_here(environ.get("SLURM_STEP_TASKS_PER_NODE") or here, environ.get("SLURM_NODEID", "0"))
    try:
        said = Announced(launcher, int(environ[rank]), int(environ[size]), int(environ.get(local) or 0), int(here))
    except ValueError:
        told = ", ".join(f"{name}={environ[name]}" for name in (rank, size, local, per_host) if name in environ)
        raise HocketError(f"{told}: {launcher} sets whole numbers here; unset them, or start hocket with {launcher}.") from None
    if said.size <= 0:
        return None
    if not 0 <= said.rank < said.size:
        raise HocketError(
            f"{rank}={said.rank}, {size}={said.size}: processes are numbered from 0 to {said.size - 1}; unset both, or start "
            f"hocket with {launcher}."
        )
    return said


def _batch_script(environ: Mapping[str, str]) -> bool:
    """Whether this is the script of ``sbatch`` itself, which srun has not started: a process alone, whatever was allocated."""
    return "SLURM_JOB_ID" in environ and "SLURM_LOCALID" in environ and not any(name in environ for name in _STEP)


def tasks_here(listed: str, node: str) -> str:
    """The number of tasks on a node from Slurm's list for all nodes.

    >>> tasks_here("2(x2),1", "1"), tasks_here("2(x2),1", "2"), tasks_here("4", "3")
    ('2', '1', '4')
    """
    counts: list[str] = []
    for part in listed.split(","):
        count, _, times = part.partition("(x")
        counts += [count] * int(re.sub(r"\D", "", times) or 1)
    place = int(node) if node.isdigit() else 0
    return counts[min(place, len(counts) - 1)] or "0"


def _agree(inner: Announced, outer: Announced, environ: Mapping[str, str]) -> bool:
    if outer.size == 1 or (inner.rank, inner.size) == (outer.rank, outer.size):
        return True
    if inner.launcher == "torchrun":  # one torchrun per process of the outer launcher; each starts one process or more
        return not inner.per_host or inner.size >= inner.per_host + outer.size - 1
    # mpirun starts its helpers on other machines with srun, fewer than there are processes.
    return inner.size != outer.size
