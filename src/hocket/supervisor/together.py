"""Workers that all take part in every exchange, as processes of a Supervisor (:mod:`hocket.drivers.processes`) on several machines.

The processes find each other as torchrun's do. When one dies the others are ended; with ``replace`` all are started again and go on
from the last checkpoint in ``out``, which all machines must then see.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hocket.cluster.virtual import VirtualCluster
from hocket.drivers.machines import Machines
from hocket.drivers.processes import MAX_RESTARTS, Role, Supervisor, how_ended, reported_error, say
from hocket.drivers.ray_cluster import RayMachines
from hocket.errors import HocketError, NonFiniteGradient, WorkerLost
from hocket.train.checkpoints import LEAST_KEPT, Checkpoints
from hocket.train.record import CHECKPOINTS

WORKER = "worker"
_LOOK_S = 0.1
_SETTLE_S = 2.0
"""After a death, wait so long for the exit codes of the others: the first cause is reported."""


def run_together(machines: RayMachines, command: Sequence[str], out: Path | None = None, replace: bool = False) -> None:
    """Run Python with the arguments ``command``, those of a training that takes ``--resume``, as one worker per place."""
    command = list(command)
    for attempt in range(MAX_RESTARTS + 1):
        try:
            _run_once(machines, command)
            return
        except WorkerLost as error:
            if not replace or out is None or attempt == MAX_RESTARTS:
                raise
            command = _again(command, out)
            say(f"{str(error).rstrip('.')}; all start again{' from the last checkpoint' * ('--resume' in command)}")


def _run_once(machines: RayMachines, command: Sequence[str]) -> None:
    """Run the processes to their end; raises the error of the process that failed first."""
    port = machines.free_port()

    def start(rank: int, incarnation: int) -> Any:
        return machines.start(rank, command, environ_of(machines, rank, port))

    with Supervisor([Role(WORKER, len(machines.places), start, grace_s=0.0)]) as supervisor:
        supervisor.start(WORKER)
        _watch(supervisor)


def _watch(supervisor: Supervisor) -> None:
    """Wait until all workers have ended; show the output of the first one."""
    first, shown = supervisor.process(WORKER, 0), 0
    while True:
        codes = supervisor.codes(WORKER).values()
        sys.stdout.writelines(line for line in first.lines[shown:] if not line.startswith('{"error"'))
        shown = len(first.lines)
        if any(codes):
            _raise_first(supervisor)
        if None not in codes:
            sys.stdout.flush()
            return
        time.sleep(_LOOK_S)


def _raise_first(supervisor: Supervisor) -> None:
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline and supervisor.running(WORKER):
        time.sleep(_LOOK_S)
    died = {rank: code for rank, code in supervisor.ended(WORKER).items() if code}
    for rank in died:
        failure = reported_error(supervisor.process(WORKER, rank))
        if failure is not None and failure["kind"] != "WorkerLost":
            raise (NonFiniteGradient if failure["kind"] == "NonFiniteGradient" else HocketError)(failure["error"])
    rank, code = min(died.items(), key=lambda item: item[1])  # a killed process is the cause; those that lost it are not
    raise WorkerLost(f"Worker {rank} {how_ended(code)}, and the others were ended.", rank)


def environ_of(machines: Machines, rank: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set for worker ``rank``."""
    networks = [place.network for place in machines.places]
    found = {
        "RANK": rank,
        "WORLD_SIZE": len(networks),
        "LOCAL_RANK": networks[:rank].count(networks[rank]),
        "LOCAL_WORLD_SIZE": networks.count(networks[rank]),
        "MASTER_ADDR": machines.places[0].address if len(set(networks)) > 1 else "127.0.0.1",
        "MASTER_PORT": port,
        "HOCKET_TELLS_ERRORS": 1,
    }
    passed = {name: os.environ[name] for name in ("HOCKET_CLOSED_NETWORK", "HOCKET_DATA") if name in os.environ}
    return {**passed, **{name: str(value) for name, value in found.items()}}


def _again(command: list[str], out: Path) -> list[str]:
    """The command that resumes a run from its newest checkpoint; where there is none, remove the run's files and start anew."""
    with Checkpoints(out / CHECKPOINTS, VirtualCluster(1), LEAST_KEPT, say) as kept:
        found = kept.newest() is not None
    if not found and "--resume" not in command:
        shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
        for name in ("run.json", "metrics.jsonl"):
            (out / name).unlink(missing_ok=True)
    return [*command, "--resume"] if found and "--resume" not in command else command
