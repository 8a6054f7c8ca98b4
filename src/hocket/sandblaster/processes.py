"""The processes of a run: each is a program on sockets, and resumes from files.

After each iteration the shards write their vectors to the folder (``shard-NUMBER-ITERATION.pt``) and then the coordinator its state
(``state.json``; the one before is ``previous.json``), each file whole or not at all, with a checksum.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.drivers.processes import say
from hocket.drivers.record import Recorder
from hocket.drivers.snapshots import KEPT
from hocket.drivers.sockets import SocketDriver
from hocket.errors import HocketError, WorkerLost
from hocket.files import sealed, sealed_json, unsealed, unsealed_json, write_whole
from hocket.programs.base import Compute, Effects, Restore, Snapshot
from hocket.sandblaster.coordinator import CoordinatorConfig, SandblasterCoordinator, ShardSilent
from hocket.sandblaster.objective import Objective
from hocket.sandblaster.protocol import BEAT_S, COORDINATOR
from hocket.sandblaster.roles import SandblasterShard, SandblasterWorker
from hocket.train.throttle import Throttle
from hocket.transport.frame import Envelope, Kind
from hocket.transport.link import Caller, Listener

if TYPE_CHECKING:
    from hocket.sandblaster.api import Sandblaster

LINK_FILE, STATE_FILE, PREVIOUS_FILE, FAILURE_FILE = "coordinator.json", "state.json", "previous.json", "failure.json"
QUEUE = 100_000
"""Messages that the coordinator's link holds for one peer; they are small."""
ANY_PORT = "tcp://127.0.0.1:0"
Computing = Callable[[Tensor, int], tuple[float, Tensor]]


@dataclass(frozen=True)
class Plan:
    """The facts of a run that all its processes have."""

    job: bytes
    folder: Path
    config: CoordinatorConfig
    digest: str
    values: int
    record: Path | None = None
    """A folder for recordings of all that happens to the processes, to replay the run."""

    def facts(self) -> dict[str, Any]:
        """The facts that must be equal to resume from the folder."""
        config = self.config
        shape = {"values": self.values, "portions": config.portions, "shards": config.shards, "exact": config.exact}
        return {**asdict(config.settings), **shape, "digest": self.digest}

    def address(self) -> str:
        """Where a coordinator before this one listened, or any free port."""
        file = self.folder / LINK_FILE
        return json.loads(file.read_text())["address"] if file.exists() else ANY_PORT

    def written(self) -> dict[str, Any]:
        """The coordinator's state and metrics after the last iteration, and the run's facts; nothing before the first."""
        return next(iter(self.generations().values()), {})

    def generations(self) -> dict[str, dict[str, Any]]:
        """The readable states of the last iteration and of the one before it, by file."""
        found = {}
        for name in (STATE_FILE, PREVIOUS_FILE):
            with contextlib.suppress(OSError, ValueError):
                found[name] = unsealed_json((self.folder / name).read_bytes())
        return found

    def write(self, state: dict[str, Any]) -> None:
        """Write the state after an iteration, and keep the one after the iteration before."""
        last = self.generations().get(STATE_FILE)
        if last is not None and last["state"]["iteration"] != state["state"]["iteration"]:
            write_whole(self.folder / PREVIOUS_FILE, sealed_json(last))
        write_whole(self.folder / STATE_FILE, sealed_json({"facts": self.facts(), **state}))

    def recorder(self, process: str, identity: bytes = b"", **program: Any) -> Recorder:
        """The recorder of one process, which others know by ``identity``; ``program`` is what a replay builds it with."""
        recorder = Recorder(None if self.record is None else self.record / f"{process}.jsonl")
        recorder.start(identity=identity.hex(), **program)
        return recorder

    def slices(self, shard: int, iteration: int | str) -> Path:
        """The file of a shard's vectors after an iteration."""
        return self.folder / f"shard-{shard}-{iteration}.pt"


class ProcessDriver(SocketDriver):
    """A socket driver that also computes portions, and saves and loads snapshots by name."""

    program: Any

    def __init__(self, program: Any, save: Any = None, load: Any = None, **links: Any) -> None:
        super().__init__(program, **links)
        self.program: Any = program  # a coordinator, a shard or a worker
        self._save, self._load = save, load
        self._portions: deque[Compute] = deque()

    def run(self, compute: Computing | None = None) -> None:
        """Start the program and serve it until it has finished; ``compute(point, portion)`` is what a worker does."""
        self.begin(self.program.start)
        while not self.finished:
            self.poll(0.0 if self._portions else BEAT_S)
            if self._portions and compute is not None:
                task = self._portions.popleft()
                loss, gradient = compute(task.point, task.portion)
                self.begin(self.program.computed, task.portion, loss, gradient)

    def carry_out(self, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, Compute):
                self._portions.append(effect)
            elif isinstance(effect, Snapshot):
                self._save(effect.name, self.program.state_dict())
            elif isinstance(effect, Restore):
                self.begin(self.program.restored, self._load(effect.name))
            else:
                super().carry_out([effect])


def be_coordinator(plan: Plan, incarnation: int) -> None:
    """Run the coordinator, and write its state after each iteration."""
    end_with_parent()
    program = SandblasterCoordinator(replace(plan.config, incarnation=incarnation), plan.written() or None)

    try:
        listener = Listener(plan.address(), plan.job, high_water=QUEUE)
        write_json(plan.folder / LINK_FILE, {"address": listener.address})
        timeout_s, resumed = plan.config.liveness_timeout_s, bool(plan.written())
        recorder = plan.recorder("coordinator-0", incarnation=incarnation, liveness_timeout_s=timeout_s, resumed=resumed)
        with closing(
            ProcessDriver(program, listener=listener, save=lambda _, state: plan.write(state), recorder=recorder)
        ) as driver:
            driver.run()
    except (HocketError, WorkerLost) as error:
        silent = error.worker if isinstance(error, ShardSilent) else None
        kind = "HocketError" if isinstance(error, HocketError) else "WorkerLost"
        write_json(plan.folder / FAILURE_FILE, {"kind": kind, "sentence": str(error), "silent": silent})
        raise SystemExit(1) from None


def be_shard(plan: Plan, incarnation: int, number: int, values: Any) -> None:
    """Hold a slice of every vector."""
    end_with_parent()
    torch.set_num_threads(1)
    listener = Listener(ANY_PORT, plan.job, most_bytes=most_bytes(len(values)), high_water=64)
    identity = f"shard {number} {incarnation}".encode()
    coordinator = Caller(plan.address(), plan.job, identity=identity, high_water=1000)
    program = SandblasterShard(number, torch.from_numpy(values), plan.config.exact, listener.address, incarnation)

    def save(name: str, vectors: dict[str, Tensor]) -> None:
        write_whole(plan.slices(number, name), sealed(vectors))
        for old in plan.folder.glob(plan.slices(number, "*").name):
            if int(old.stem.rpartition("-")[2]) <= int(name) - KEPT:
                old.unlink()

    def load(name: str) -> Any:
        path = plan.slices(number, name)
        try:
            return unsealed(path.read_bytes())
        except Exception as error:
            say(f"{path} is missing or damaged ({error}); {plan.config.remedy}")
            raise SystemExit(1) from None

    recorder = plan.recorder(f"shard-{number}", identity, address=listener.address, incarnation=incarnation)
    links = {"listener": listener, "callers": {COORDINATOR: coordinator}, "recorder": recorder}
    with closing(ProcessDriver(program, save, load, **links)) as driver:
        driver.run()


def be_worker(plan: Plan, number: int, job: bytes, slowdown: float) -> None:
    """Compute portions, each in ``slowdown`` times the time it needs."""
    end_with_parent()
    torch.set_num_threads(1)
    sandblaster: Sandblaster = pickle.loads(job)  # from the process that started this one
    program = SandblasterWorker(plan.values, plan.config.shards)
    identity = f"worker {number} {secrets.token_hex(4)}".encode()

    def connect(peer: int, address: str) -> Caller:
        return Caller(address, plan.job, identity=identity, most_bytes=most_bytes(plan.values), high_water=64)

    coordinator = Caller(plan.address(), plan.job, identity=identity)
    threading.Thread(target=_beat, args=(program, plan), daemon=True).start()
    recorder = plan.recorder(f"worker-{number}", identity)
    with closing(ProcessDriver(program, callers={COORDINATOR: coordinator}, connect=connect, recorder=recorder)) as driver:
        driver.run(throttled(sandblaster.objective(), slowdown))


def throttled(objective: Objective, slowdown: float) -> Computing:
    """Computes portions, each in ``slowdown`` times the time it needs."""
    throttle = Throttle(slowdown)

    def compute(point: Tensor, portion: int) -> tuple[float, Tensor]:
        throttle.begin()
        result = objective.portion(point, portion)
        throttle.end()
        return result

    return compute


def _beat(worker: SandblasterWorker, plan: Plan) -> None:
    """Send a sign of life, also during a long portion."""
    with Caller(plan.address(), plan.job) as link:
        while True:
            link.send(Envelope(Kind.BEAT, worker.ticket), 0)
            time.sleep(BEAT_S)


def end_with_parent() -> None:
    """End this process when the one that started it has ended, however that happened."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def most_bytes(values: int) -> int:
    """The size of a message with ``values`` float64 values."""
    return (1 << 20) + 8 * values


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write the whole file or none."""
    write_whole(file, json.dumps(content).encode())
