"""Which launcher starts the processes of a command: one that has started this process, this machine alone, or Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hocket.cluster.join import LaunchInfo, find_launcher, launcher_store
from hocket.drivers.machines import Machines
from hocket.drivers.processes import interruptible
from hocket.drivers.store_agents import StoreAgent, StoreMachines, job_secret, job_store
from hocket.errors import HocketError
from hocket.supervisor import FaultPolicy
from hocket.train.settings import RunSettings
from hocket.transport.tunnel import Tunnel

RAY = "ray"
_NEED_KEYS = "messages between machines need keys: make them with `hocket keys FILE`, copy the file to all, and add --keys FILE."


def check_launcher(launcher: str | None, environ: Mapping[str, str]) -> None:
    """Refuse an unknown launcher, and Ray under another launcher."""
    if launcher is None:
        return
    if launcher != RAY:
        raise HocketError(f"--launcher {launcher}: use {RAY}; torchrun, mpirun and srun start `hocket train` themselves.")
    if (found := _several(environ)) is not None:
        raise HocketError(
            f"Two launchers at once: --launcher {RAY}, and {found.launcher}, which has started this command {found.processes} "
            f"times; start the command once, without {found.launcher}."
        )


def refuse_launched(environ: Mapping[str, str], what: str, instead: str) -> None:
    """Refuse a launcher that started several processes of a command that is one process."""
    if (found := _several(environ)) is not None:
        raise HocketError(f"{what} is one process, but {found.launcher} has started {found.processes} of them: {instead}.")


def _several(environ: Mapping[str, str]) -> LaunchInfo | None:
    found = find_launcher(environ)
    return None if found is None or found.processes == 1 else found


def check_options(found: LaunchInfo | None, settings: RunSettings, processes: int | None) -> None:
    """Refuse options that contradict what a launcher has started."""
    if found is None or found.processes == 1:
        return
    started = f"{found.launcher} has started {found.processes} processes"
    if processes not in (None, found.processes):
        raise HocketError(f"--processes {processes}: {started}; leave --processes out.")
    if settings.split is None and settings.workers.count < found.processes:
        raise HocketError(
            f"--workers {settings.workers.count}: {started}, and each hosts at least one worker; leave --workers out."
        )


@contextmanager
def launched_machines(keys: Path | None) -> Iterator[Machines | None]:
    """The machines of the launcher's job, in its first process; None in the others, which start processes for the first one until
    it ends."""
    place = find_launcher(os.environ)
    assert place is not None
    if keys is None and not place.one_host:
        raise HocketError(f"{place.launcher} has started processes on several machines, and {_NEED_KEYS}")
    tunnel = None if keys is None else Tunnel.with_keys(keys)
    store = job_store(launcher_store(place, tunnel=tunnel), place.attempt)
    with interruptible(), job_secret(store, place.rank, keys) as secret:
        agent = StoreAgent(store, place.rank, place.address, secret)
        if place.rank > 0:
            agent.serve()
            yield None
            return
        machines = StoreMachines(store, place.processes, agent.agent, secret)
        try:
            yield machines
        finally:
            machines.close()


def check_machines(machines: Machines, settings: RunSettings, policy: FaultPolicy) -> None:
    """Refuse options that processes on several machines do not support."""
    if not machines.several:
        return
    if policy.keys is None:
        raise HocketError(f"{settings.strategy} sends messages between {machines.count} machines, and {_NEED_KEYS}")
    if policy.record is not None:
        raise HocketError("--record writes on one machine, and the processes of this run are on several; leave it out.")
