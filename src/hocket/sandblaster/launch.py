"""Sandblaster on processes of this machine: one coordinator, some shards, some workers, and whoever called, who only watches.

Workers may die at any moment: the others take over. If the coordinator or a shard dies, it is started again and all go on from the
last iteration: after each one the shards write their vectors to the folder and then the coordinator its scalars (``state.json``),
each file whole or not at all. A later call with the same folder goes on there too.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.errors import HocketError, WorkerLost
from hocket.messages.frame import JOB_BYTES
from hocket.messages.link import Listener
from hocket.sandblaster.coordinator import GO_ON, ProcessWorld
from hocket.sandblaster.figures import rows
from hocket.sandblaster.lbfgs import Settings, State, converse, lbfgs
from hocket.sandblaster.roles import ShardProcess, WorkerProcess, end_with_parent
from hocket.sandblaster.vectors import cuts
from hocket.server.snapshots import unsealed

if TYPE_CHECKING:
    from hocket.sandblaster.api import Sandblaster

LINK_FILE, STATE_FILE, FAILURE_FILE = "coordinator.json", "state.json", "failure.json"
QUEUE = 100_000
"""Messages that the coordinator's link holds for one peer; they are small, and none may be lost."""
NOTHING_KEPT = "start again, with a folder (on the command line --out) so that it can go on from the last iteration"
START_S = 60.0
LEAVE_S = 5.0
SETTLE_S = 0.5
"""A shard's end may be known a little later than that of a coordinator who could not do without it."""


@dataclass(frozen=True)
class LaunchPlan:
    """What all processes of a run know."""

    job: bytes
    folder: Path
    settings: Settings
    digest: str
    values: int
    portions: int
    shards: int
    backups: bool
    exact: bool
    liveness_timeout_s: float
    remedy: str

    def facts(self) -> dict[str, Any]:
        """What must be the same to go on from what lies in the folder."""
        same = {name: getattr(self, name) for name in ("values", "portions", "shards", "exact", "digest")}
        return {**asdict(self.settings), **same}


class Company:
    """The processes of a run, as those who watch see them."""

    def __init__(self, start: Callable[[], BaseProcess], start_shard: Callable[[int], BaseProcess], remedy: str) -> None:
        self._start, self._start_shard, self._remedy = start, start_shard, remedy
        self.coordinator = start()
        self.shards: list[BaseProcess] = []
        self.workers: list[BaseProcess] = []
        self.restarts = 0

    @property
    def everyone(self) -> list[BaseProcess]:
        """All of them."""
        return [self.coordinator, *self.shards, *self.workers]

    def check(self, most_restarts: int) -> bool:
        """Whether the run is over; starts a coordinator or shards that were killed again."""
        code = self.coordinator.exitcode
        if code == 0:
            return True
        if code is not None or any(shard.exitcode for shard in self.shards):  # perhaps for want of another
            wait([shard.sentinel for shard in self.shards if shard.exitcode is None], SETTLE_S)
        dead = {i: shard.exitcode for i, shard in enumerate(self.shards) if shard.exitcode}
        killed = any(ended < 0 for ended in (*dead.values(), 0 if code is None else code))
        if killed and max(dead.values(), default=-1) < 0 and self.restarts < most_restarts:
            self._restart()
        elif dead:
            place, ended = max(dead.items(), key=lambda item: item[1])  # an error of its own says more than a death
            raise WorkerLost(f"Shard {place} ended with code {ended}: {self._remedy}.", place)
        elif code is not None:
            return True
        if all(worker.exitcode for worker in self.workers):
            raise WorkerLost(f"All workers ended, the last with code {self.workers[-1].exitcode}: look at their output.")
        return False

    def _restart(self) -> None:
        """Start shards that have ended, and the coordinator again: only one that begins anew has all shards at one iteration."""
        self.restarts += 1
        self.coordinator.kill()
        self.coordinator.join()
        for i, shard in enumerate(self.shards):
            if shard.exitcode is not None:
                self.shards[i] = self._start_shard(i)
        self.coordinator = self._start()

    def leave(self) -> None:
        """Nobody stays."""
        deadline = time.monotonic() + LEAVE_S
        for process in self.everyone:
            process.join(max(0.0, deadline - time.monotonic()) if self.coordinator.exitcode == 0 else 0.0)
            if process.exitcode is None:
                process.kill()
                process.join()


class Log:
    """Tells what the coordinator has written down, each iteration once, also those before this call."""

    def __init__(self, file: Path, tell: Callable[[dict[str, Any]], None]) -> None:
        self._file, self._tell = file, tell
        self._seen, self._told = (0, 0), 0

    def read(self) -> None:
        """Tell what is new."""
        if not self._file.exists():
            return
        found = self._file.stat()
        if (changed := (found.st_ino, found.st_mtime_ns)) == self._seen:
            return
        self._seen = changed
        for row in json.loads(self._file.read_text())["metrics"][self._told :]:
            self._told += 1
            self._tell(row)


def launch(
    job: Sandblaster,
    folder: Path | None = None,
    liveness_timeout_s: float = 5.0,
    restarts: int = 3,
    watch: Callable[[Company], None] = lambda _: None,
    on_iteration: Callable[[dict[str, Any]], None] = lambda _: None,
    slowdown: Sequence[float] = (1.0,),
) -> tuple[list[dict[str, Any]], Tensor, str]:
    """Run ``job`` on processes: metrics, weights and why it ended."""
    with _place(folder) as where:
        point = job.objective().point.cpu()
        plan = LaunchPlan(
            secrets.token_bytes(JOB_BYTES),
            where,
            job.settings,
            _digest(point, *job.train),
            len(point),
            len(job.portions),
            job.shards,
            job.backups,
            job.exact,
            liveness_timeout_s,
            NOTHING_KEPT if folder is None else GO_ON,
        )
        _check_folder(plan)
        (where / LINK_FILE).unlink(missing_ok=True)
        log = Log(where / STATE_FILE, on_iteration)
        _watch(_start(plan, point, _pickled(job), job.workers, slowdown), plan, restarts, watch, log)
        found = json.loads((where / STATE_FILE).read_text())
        iteration = found["state"]["iteration"]
        slices = [unsealed((where / f"shard-{i}-{iteration}.pt").read_bytes())["x"] for i in range(job.shards)]
        return found["metrics"], torch.cat(slices), found["state"]["ended"]


def _start(plan: LaunchPlan, point: Tensor, job: bytes, workers: int, slowdown: Sequence[float]) -> Company:
    context = _context()

    def begin(role: Callable[..., None], *arguments: Any) -> BaseProcess:
        process = context.Process(target=role, args=(plan, *arguments), daemon=True)
        process.start()
        return process

    def begin_coordinator() -> BaseProcess:
        (plan.folder / FAILURE_FILE).unlink(missing_ok=True)
        return begin(be_coordinator)

    def begin_shard(place: int) -> BaseProcess:
        return begin(be_shard, place, point[cuts(plan.values, plan.shards)[place]].numpy(), _known_address(plan))

    company = Company(begin_coordinator, begin_shard, plan.remedy)
    try:
        address = _address(plan, company.coordinator)
        for i in range(plan.shards):
            company.shards.append(begin_shard(i))
        company.workers = [begin(be_worker, i, job, address, slowdown[i % len(slowdown)]) for i in range(workers)]
    except BaseException:
        company.leave()
        raise
    return company


def _watch(company: Company, plan: LaunchPlan, restarts: int, watch: Callable[[Company], None], log: Log) -> None:
    try:
        while not company.check(restarts):
            log.read()
            watch(company)
            time.sleep(0.05)
        failure = plan.folder / FAILURE_FILE
        if failure.exists():
            told = json.loads(failure.read_text())
            raise (WorkerLost if told["kind"] == "WorkerLost" else HocketError)(told["sentence"])
        if company.coordinator.exitcode:
            raise WorkerLost(f"The coordinator ended with code {company.coordinator.exitcode}: {plan.remedy}.")
    finally:
        company.leave()
        log.read()


def _context() -> ForkServerContext | SpawnContext:
    """A server that has imported torch once and forks, where there is such a thing; nothing of the caller's is inherited."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


# What each process does.


def be_coordinator(plan: LaunchPlan) -> None:
    """Hold the conversation, and write down after each iteration where it stands."""
    end_with_parent()
    try:
        with Listener(_known_address(plan), plan.job, high_water=QUEUE) as listener:
            _write(plan.folder / LINK_FILE, {"address": listener.address})
            world = ProcessWorld(
                listener,
                plan.portions,
                plan.shards,
                backups=plan.backups,
                exact=plan.exact,
                liveness_timeout_s=plan.liveness_timeout_s,
                remedy=plan.remedy,
            )
            _converse(plan, world)
            world.farewell()
    except (HocketError, WorkerLost) as error:
        _write(plan.folder / FAILURE_FILE, {"kind": type(error).__name__, "sentence": str(error)})
        raise SystemExit(1) from None


def be_shard(plan: LaunchPlan, number: int, values: Any, address: str) -> None:
    """Hold a slice of every vector."""
    end_with_parent()
    torch.set_num_threads(1)
    ShardProcess(number, torch.from_numpy(values), plan.exact, address, plan.job, plan.folder).serve()


def be_worker(plan: LaunchPlan, number: int, job: bytes, address: str, slowdown: float) -> None:
    """Compute portions, each in ``slowdown`` times the time it needs."""
    end_with_parent()
    torch.set_num_threads(1)
    sandblaster: Sandblaster = pickle.loads(job)  # from the process that started this one
    WorkerProcess(number, sandblaster.objective(), plan.shards, address, plan.job, slowdown).serve()


def _converse(plan: LaunchPlan, world: ProcessWorld) -> None:
    file = plan.folder / STATE_FILE
    state, metrics = State(), []
    if file.exists():
        found = json.loads(file.read_text())
        state, metrics = State(**found["state"]), found["metrics"]
        world.load(state.iteration)

    def write_down() -> None:
        _write(file, {"facts": plan.facts(), "state": asdict(state), "metrics": metrics})

    for row in rows(converse(lbfgs(plan.settings, state), world), world, lambda: None, state.evaluations):
        metrics.append(row)
        world.save(state.iteration)
        write_down()
    write_down()  # why it ended may be known only now


# Files.


@contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory() as own:
            yield Path(own)
        return
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def _check_folder(plan: LaunchPlan) -> None:
    file = plan.folder / STATE_FILE
    if not file.exists():
        return
    found = json.loads(file.read_text())
    facts = found["facts"]
    other = [name for name, value in plan.facts().items() if facts.get(name) != value]
    if other:
        raise HocketError(f"{plan.folder} holds another run, with {other[0]}={facts.get(other[0])}: choose another folder.")
    for i in range(plan.shards):
        part = plan.folder / f"shard-{i}-{found['state']['iteration']}.pt"
        try:
            unsealed(part.read_bytes())
        except Exception as error:
            raise HocketError(
                f"{part} is missing or damaged ({type(error).__name__}), so there is nothing to go on from: choose another folder."
            ) from None


def _known_address(plan: LaunchPlan) -> str:
    """Where a coordinator before this one listened, or any free port."""
    file = plan.folder / LINK_FILE
    return json.loads(file.read_text())["address"] if file.exists() else "tcp://127.0.0.1:0"


def _address(plan: LaunchPlan, coordinator: BaseProcess) -> str:
    deadline = time.monotonic() + START_S
    while not (plan.folder / LINK_FILE).exists():
        if coordinator.exitcode is not None or time.monotonic() > deadline:
            raise WorkerLost("The coordinator did not start: look at its output.")
        time.sleep(0.02)
    return _known_address(plan)


def _write(file: Path, content: dict[str, Any]) -> None:
    """There is the whole file or none."""
    beside = file.with_suffix(".new")
    with beside.open("w") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(file)


def _digest(*tensors: Tensor) -> str:
    """Of the weights to begin with and of the batch."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _pickled(job: Sandblaster) -> bytes:
    try:
        return pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise HocketError(
            f"Processes need a model and a loss that can be sent to them ({error}): define them in a module."
        ) from None
