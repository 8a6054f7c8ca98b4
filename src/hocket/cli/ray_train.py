"""``hocket train --launcher ray`` with strategies in which all take part: an actor of Ray looks after each worker's process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hocket.drivers.processes import interruptible
from hocket.drivers.ray_cluster import ray_machines
from hocket.errors import HocketError
from hocket.supervisor.together import run_together


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
        run_together(machines, ["-m", "hocket.cli.main", *arguments], out, replace)


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
