"""``hocket train --launcher ray`` with strategies in which all take part: an actor of Ray looks after each worker's process.

The processes find each other as torchrun's do. When one dies the others are ended; with ``--replace`` all are started again and go
on from the last checkpoint in ``--out``, which all machines must then see.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from hocket.cluster.virtual import VirtualCluster
from hocket.drivers.machines import Machines, RemoteProcess
from hocket.drivers.processes import MAX_RESTARTS, error_told, how_ended, interruptible, say
from hocket.drivers.ray_cluster import RayMachines, ray_machines
from hocket.errors import HocketError, NonFiniteGradient, WorkerLost
from hocket.train.checkpoints import LEAST_KEPT, Checkpoints
from hocket.train.record import CHECKPOINTS

_LOOK_S = 0.1
_SETTLE_S = 2.0
"""The others notice a death a little later, and the first cause is wanted."""


def train_on_ray(processes: int, what: str, gpus: bool, keys: Path | None, out: Path | None, replace: bool) -> None:
    """Run this command as ``processes`` workers on the Ray cluster."""
    if replace and out is None:
        raise HocketError("--replace starts all workers again from a checkpoint; add --out, the folder of checkpoints.")
    arguments = _without_launcher(sys.argv[1:])
    with interruptible(), ray_machines(processes, what, gpus) as machines:
        if machines.several and keys is None and not os.environ.get("HOCKET_CLOSED_NETWORK"):
            raise HocketError(
                f"The {processes} workers are on {machines.count} machines of the Ray cluster: make keys with `hocket keys FILE`, "
                "copy the file to all and add --keys FILE, or set HOCKET_CLOSED_NETWORK=1 where nobody else can reach the network."
            )
        for attempt in range(MAX_RESTARTS + 1):
            try:
                _run(machines, arguments)
                return
            except WorkerLost as error:
                if not replace or out is None or attempt == MAX_RESTARTS:
                    raise
                arguments = _again(arguments, out)
                say(f"{str(error).rstrip('.')}; all start again{' from the last checkpoint' * ('--resume' in arguments)}")


def _again(arguments: list[str], out: Path) -> list[str]:
    """The arguments of a run that goes on from its newest checkpoint; where there is none, what it has written is removed."""
    with Checkpoints(out / CHECKPOINTS, VirtualCluster(1), LEAST_KEPT, say) as kept:
        found = kept.newest() is not None
    if not found and "--resume" not in arguments:
        shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
        for name in ("run.json", "metrics.jsonl"):
            (out / name).unlink(missing_ok=True)
    return [*arguments, "--resume"] if found and "--resume" not in arguments else arguments


def _without_launcher(arguments: list[str]) -> list[str]:
    """The command's own arguments for a worker, which has a launcher already.

    >>> _without_launcher(["train", "--launcher", "ray", "--workers", "2", "--replace"])
    ['train', '--workers', '2']
    """
    kept, skip = [], False
    for argument in arguments:
        if skip or argument in ("--launcher", "--replace") or argument.startswith("--launcher="):
            skip = argument == "--launcher"
            continue
        kept.append(argument)
    return kept


def _run(machines: RayMachines, arguments: list[str]) -> None:
    """Once, to the end; raises what the first process that failed said."""
    port = machines.free_port()
    command, ranks = ["-m", "hocket.cli.main", *arguments], range(len(machines.places))
    processes = [machines.start(rank, command, environ_of(machines, rank, port)) for rank in ranks]
    try:
        _watch(processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def environ_of(machines: Machines, rank: int, port: int) -> dict[str, str]:
    """What torchrun would tell worker ``rank``."""
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


def _watch(processes: list[RemoteProcess]) -> None:
    shown = 0
    while True:
        codes = [process.poll() for process in processes]
        lines = processes[0].lines
        sys.stdout.writelines(line for line in lines[shown:] if not line.startswith('{"error"'))
        shown = len(lines)
        if any(codes):
            _raise_first(processes)
        if None not in codes:
            sys.stdout.flush()
            return
        time.sleep(_LOOK_S)


def _raise_first(processes: list[RemoteProcess]) -> None:
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline and None in [process.poll() for process in processes]:
        time.sleep(_LOOK_S)
    died = {rank: code for rank, process in enumerate(processes) if (code := process.returncode)}
    for rank in died:
        told = error_told(processes[rank])
        if told is not None and told["kind"] != "WorkerLost":
            raise (NonFiniteGradient if told["kind"] == "NonFiniteGradient" else HocketError)(told["error"])
    rank, code = min(died.items(), key=lambda item: item[1])  # one that was killed says more than those that miss it
    raise WorkerLost(f"Worker {rank} {how_ended(code)}, and the others were ended.", rank)
