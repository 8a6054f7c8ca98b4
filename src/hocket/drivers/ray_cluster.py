"""A Ray cluster that runs already: what it has, and processes on its machines, each looked after by an actor.

Ray places the actors, and says which machine each is on. An actor starts one process there, passes on what is written to it and
what it tells, and ends it. Ray is an extra: ``pip install 'hocket[ray]'``.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from hocket.drivers.machines import LOST, Agent, Location, Machines, RemoteProcess, own_network
from hocket.errors import HocketError

_ROOM_S = 60.0
_PLACE_S = 120.0
_ANSWER_S = 10.0
CONNECT = "start one with `ray start --head` (and `ray start --address=HEAD:6379` on the other machines), or set RAY_ADDRESS"


def import_ray() -> Any:
    """The package, or one sentence that says how to install it."""
    try:
        import ray
    except ImportError:
        raise HocketError("The launcher ray needs the package ray: pip install 'hocket[ray]'.") from None
    return ray


def connect() -> Any:
    """Ray, joined to the cluster that RAY_ADDRESS or this machine names."""
    ray = import_ray()
    if ray.is_initialized():
        return ray
    _check_address(os.environ.get("RAY_ADDRESS", ""))
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # its coming default; else it warns of it
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=True, logging_level="ERROR", configure_logging=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        text = str(error).strip().splitlines()[0].rstrip(".")
        raise HocketError(f"No Ray cluster could be joined ({text}): {CONNECT}.") from None
    return ray


def _check_address(address: str) -> None:
    """Refuse an address at which nobody listens: Ray would wait for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    except OSError as error:
        raise HocketError(f"No Ray cluster could be joined ({address}: {error.strerror or 'no answer'}): {CONNECT}.") from None


def check_room(ray: Any, cpus: int, what: str, gpus: int = 0) -> None:
    """Refuse what no machine of the cluster could ever hold."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, needed in (("CPU", cpus), ("GPU", gpus)):
        most = max((int(node.get(name, 0)) for node in nodes), default=0)
        if needed > most:
            raise HocketError(
                f"{what} needs {needed} {name}{'s' * (needed > 1)} on one machine, and the largest of the {len(nodes)} machines "
                f"of the Ray cluster has {most}: add a machine with `ray start --address=HEAD:6379 --num-{name.lower()}s=N`."
            )


class Tasks:
    """Tasks of a Ray cluster that several threads wait for, and that can be ended together."""

    def __init__(self, ray: Any) -> None:
        self._ray, self._stopped = ray, threading.Event()
        self._open: set[Any] = set()

    def run(self, remote: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a task; after :meth:`stop` the wait counts as interrupted."""
        if self._stopped.is_set():
            raise KeyboardInterrupt
        reference = remote(*arguments)
        self._open.add(reference)
        try:
            while not self._ray.wait([reference], timeout=0.5)[0]:
                if self._stopped.is_set():
                    raise KeyboardInterrupt
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            if self._stopped.is_set():
                raise KeyboardInterrupt from None
            text = str(error).strip().splitlines()[0]
            raise HocketError(f"A task of the Ray cluster ended without a result ({text}); --retry starts it again.") from None
        finally:
            self._open.discard(reference)

    def stop(self) -> None:
        self._stopped.set()
        for reference in list(self._open):
            self._ray.cancel(reference, force=True)


class AgentActor:
    """An agent as an actor; ``folder`` is that of the command, for files and modules of the user's, where it exists."""

    def __init__(self, address: str, folder: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        self._agent = Agent(address)

    def place(self) -> Location:
        return self._agent.place

    def free_port(self) -> int:
        """A free port of the actor's machine."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def tell(self, what: str, *arguments: Any) -> None:
        with suppress(KeyError):  # of a process that an earlier actor had started
            getattr(self._agent, what)(*arguments)

    def look(self, name: str) -> tuple[int | None, list[str]]:
        return self._agent.look(name)

    def shutdown(self) -> None:
        self._agent.shutdown()


class RayMachines(Machines):
    """A place for each of ``workers``, with an actor that Ray starts again should it die."""

    assigns_gpus = True

    def __init__(self, ray: Any, workers: int, what: str, gpus: bool = False) -> None:
        self._ray, self._names = ray, itertools.count()
        self._group = _room(ray, workers, what, gpus)
        self._own = Location(own_network(), ray.util.get_node_ip_address(), "")
        actor = ray.remote(max_restarts=-1, max_task_retries=-1)(AgentActor)  # calls during the restart wait for the new actor
        self.actors = []
        for number in range(workers):
            where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, number)
            node = ray.util.placement_group_table(self._group)["bundles_to_node_id"][number]
            address = next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node)
            options = actor.options(
                num_cpus=1, num_gpus=int(gpus), scheduling_strategy=where, name=f"hocket {os.getpid()} {number}"
            )
            self.actors.append(options.remote(address, os.getcwd()))
        super().__init__(ray.get([one.place.remote() for one in self.actors], timeout=_PLACE_S))

    def free_port(self) -> int:
        """A free port on the machine of the first place."""
        return int(self._ray.get(self.actors[0].free_port.remote()))

    @property
    def count(self) -> int:
        return len({place.network for place in (self._own, *self.places)})

    def bind_here(self) -> str:
        return f"tcp://{self._own.address}:0" if self.several else super().bind_here()

    def start(self, place: int, arguments: Sequence[str], environ: Mapping[str, str]) -> RemoteProcess:
        process = RayProcess(self._ray, self.actors[place], f"{place}-{next(self._names)}")
        process.tell("start", list(arguments), {**environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")})
        return process

    def close(self) -> None:
        """End all actors and their processes."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.get([actor.shutdown.remote() for actor in self.actors], timeout=10)
        for actor in self.actors:
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)


class RayProcess(RemoteProcess):
    """A process of an actor."""

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        super().__init__()
        self._ray, self._actor, self._name, self._asked = ray, actor, name, None

    def tell(self, what: str, *arguments: Any) -> None:
        self._actor.tell.remote(what, self._name, *arguments)

    def look(self) -> tuple[int | None, list[str]] | None:
        self._asked = self._asked or self._actor.look.remote(self._name)
        if not self._ray.wait([self._asked], timeout=0)[0]:
            return None
        asked, self._asked = self._asked, None
        try:
            return self._ray.get(asked)
        except self._ray.exceptions.RayError:  # the actor has died
            return LOST, self.lines


def _room(ray: Any, workers: int, what: str, gpus: bool) -> Any:
    """A placement group of one CPU, and one GPU if asked for, per worker."""
    bundle = {"CPU": 1, **({"GPU": 1} if gpus else {})}
    for name in bundle:
        there = int(ray.cluster_resources().get(name, 0))
        if there < workers:
            raise HocketError(
                f"{what} needs {workers} {name}s, one per worker, and the Ray cluster has {there}: add machines with "
                f"`ray start --address=HEAD:6379`, or use fewer workers."
            )
    group = ray.util.placement_group([bundle] * workers, strategy="PACK")
    if not group.wait(timeout_seconds=_ROOM_S):
        ray.util.remove_placement_group(group)
        raise HocketError(
            f"{what} waited {_ROOM_S:.0f} s for free CPUs or GPUs of the Ray cluster: others use them; `ray status` lists them."
        )
    return group


@contextmanager
def ray_machines(workers: int, what: str, gpus: bool = False) -> Iterator[RayMachines]:
    """Places on the Ray cluster, as long as the context lasts."""
    ray = connect()
    machines = RayMachines(ray, workers, what, gpus)
    try:
        yield machines
    finally:
        machines.close()
