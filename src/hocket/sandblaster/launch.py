"""Sandblaster on processes of this machine: one coordinator, some shards, some workers, and whoever called, who only watches.

Workers may die at any moment: the others take over. If the coordinator dies, it is started again and goes on from the last
iteration: after each one the shards write their vectors to the folder and then the coordinator its scalars (``state.json``), each
file whole or not at all. A later call with the same folder goes on there too.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.errors import HocketError, WorkerLost
from hocket.messages.frame import JOB_BYTES
from hocket.messages.link import Listener
from hocket.sandblaster.coordinator import ProcessWorld
from hocket.sandblaster.figures import rows
from hocket.sandblaster.lbfgs import Settings, State, converse, lbfgs
from hocket.sandblaster.roles import ShardProcess, WorkerProcess, end_with_parent
from hocket.sandblaster.vectors import cuts

if TYPE_CHECKING:
    from hocket.sandblaster.api import Sandblaster

LINK_FILE, STATE_FILE, FAILURE_FILE = "coordinator.json", "state.json", "failure.json"
QUEUE = 100_000
"""Messages that the coordinator's link holds for one peer; they are small, and none may be lost."""
START_S = 60.0
LEAVE_S = 5.0


@dataclass(frozen=True)
class Plan:
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
    patience_s: float

    def facts(self) -> dict[str, Any]:
        """What must be the same to go on from what lies in the folder."""
        same = {name: getattr(self, name) for name in ("values", "portions", "shards", "exact", "digest")}
        return {**asdict(self.settings), **same}


class Company:
    """The processes of a run, as those who watch see them."""

    def __init__(self, start: Callable[[], BaseProcess]) -> None:
        self._start = start
        self.coordinator = start()
        self.shards: list[BaseProcess] = []
        self.workers: list[BaseProcess] = []
        self.restarts = 0

    @property
    def everyone(self) -> list[BaseProcess]:
        """All of them."""
        return [self.coordinator, *self.shards, *self.workers]

    def check(self, most_restarts: int) -> bool:
        """Whether the run is over; starts a coordinator that was killed again."""
        code = self.coordinator.exitcode
        if code is not None and code < 0 and self.restarts < most_restarts:
            self.coordinator = self._start()
            self.restarts += 1
        elif code is not None:
            return True
        for i, shard in enumerate(self.shards):
            if shard.exitcode:
                raise WorkerLost(f"Shard {i} ended with code {shard.exitcode}: start again to go on from the last iteration.", i)
        if all(worker.exitcode for worker in self.workers):
            raise WorkerLost(f"All workers ended, the last with code {self.workers[-1].exitcode}: look at their output.")
        return False

    def leave(self) -> None:
        """Nobody stays."""
        deadline = time.monotonic() + LEAVE_S
        for process in self.everyone:
            process.join(max(0.0, deadline - time.monotonic()) if self.coordinator.exitcode == 0 else 0.0)
            if process.exitcode is None:
                process.kill()
                process.join()


def launch(
    job: Sandblaster,
    folder: Path | None = None,
    patience_s: float = 5.0,
    restarts: int = 3,
    watch: Callable[[Company], None] = lambda _: None,
) -> tuple[list[dict[str, Any]], Tensor, str]:
    """Run ``job`` on processes: metrics, weights and why it ended."""
    with _place(folder) as where:
        point = job.objective().point.cpu()
        plan = Plan(
            secrets.token_bytes(JOB_BYTES),
            where,
            job.settings,
            _digest(point, *job.train),
            len(point),
            len(job.portions),
            job.shards,
            job.backups,
            job.exact,
            patience_s,
        )
        _check_folder(plan)
        for name in (LINK_FILE, FAILURE_FILE):
            (where / name).unlink(missing_ok=True)
        _watch(_start(plan, point, _pickled(job), job.workers), plan, restarts, watch)
        found = json.loads((where / STATE_FILE).read_text())
        iteration = found["state"]["iteration"]
        slices = [torch.load(where / f"shard-{i}-{iteration}.pt", weights_only=True)["x"] for i in range(job.shards)]
        return found["metrics"], torch.cat(slices), found["state"]["ended"]


def _start(plan: Plan, point: Tensor, job: bytes, workers: int) -> Company:
    context = _context()

    def begin(role: Callable[..., None], *arguments: Any) -> BaseProcess:
        process = context.Process(target=role, args=(plan, *arguments), daemon=True)
        process.start()
        return process

    company = Company(lambda: begin(be_coordinator))
    try:
        address = _address(plan, company.coordinator)
        for i, part in enumerate(cuts(plan.values, plan.shards)):
            company.shards.append(begin(be_shard, i, point[part].numpy(), address))
        company.workers = [begin(be_worker, i, job, address) for i in range(workers)]
    except BaseException:
        company.leave()
        raise
    return company


def _watch(company: Company, plan: Plan, restarts: int, watch: Callable[[Company], None]) -> None:
    try:
        while not company.check(restarts):
            watch(company)
            time.sleep(0.05)
        failure = plan.folder / FAILURE_FILE
        if failure.exists():
            told = json.loads(failure.read_text())
            raise (WorkerLost if told["kind"] == "WorkerLost" else HocketError)(told["sentence"])
        if company.coordinator.exitcode:
            raise WorkerLost(f"The coordinator ended with code {company.coordinator.exitcode}: start again to go on.")
    finally:
        company.leave()


def _context() -> ForkServerContext | SpawnContext:
    """A server that has imported torch once and forks, where there is such a thing; nothing of the caller's is inherited."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


# What each process does.


def be_coordinator(plan: Plan) -> None:
    """Hold the conversation, and write down after each iteration where it stands."""
    end_with_parent()
    try:
        with Listener(_known_address(plan), plan.job, high_water=QUEUE) as listener:
            _write(plan.folder / LINK_FILE, {"address": listener.address})
            world = ProcessWorld(
                listener, plan.portions, plan.shards, backups=plan.backups, exact=plan.exact, patience_s=plan.patience_s
            )
            _converse(plan, world)
            world.farewell()
    except (HocketError, WorkerLost) as error:
        _write(plan.folder / FAILURE_FILE, {"kind": type(error).__name__, "sentence": str(error)})
        raise SystemExit(1) from None


def be_shard(plan: Plan, number: int, values: Any, address: str) -> None:
    """Hold a slice of every vector."""
    end_with_parent()
    torch.set_num_threads(1)
    ShardProcess(number, torch.from_numpy(values), plan.exact, address, plan.job, plan.folder).serve()


def be_worker(plan: Plan, number: int, job: bytes, address: str) -> None:
    """Compute portions."""
    end_with_parent()
    torch.set_num_threads(1)
    sandblaster: Sandblaster = pickle.loads(job)  # from the process that started this one
    WorkerProcess(number, sandblaster.objective(), plan.shards, address, plan.job).serve()


def _converse(plan: Plan, world: ProcessWorld) -> None:
    file = plan.folder / STATE_FILE
    state, metrics = State(), []
    if file.exists():
        found = json.loads(file.read_text())
        state, metrics = State(**found["state"]), found["metrics"]
        world.load(state.iteration)
    for row in rows(converse(lbfgs(plan.settings, state), world), world, lambda: None, state.evaluations):
        metrics.append(row)
        world.save(state.iteration)
        _write(file, {"facts": plan.facts(), "state": asdict(state), "metrics": metrics})


# Files.


@contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory() as own:
            yield Path(own)
        return
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def _check_folder(plan: Plan) -> None:
    file = plan.folder / STATE_FILE
    if not file.exists():
        return
    facts = json.loads(file.read_text())["facts"]
    other = [name for name, value in plan.facts().items() if facts.get(name) != value]
    if other:
        raise HocketError(f"{plan.folder} holds another run, with {other[0]}={facts.get(other[0])}: choose another folder.")


def _known_address(plan: Plan) -> str:
    """Where a coordinator before this one listened, or any free port."""
    file = plan.folder / LINK_FILE
    return json.loads(file.read_text())["address"] if file.exists() else "tcp://127.0.0.1:0"


def _address(plan: Plan, coordinator: BaseProcess) -> str:
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
