"""Sandblaster on processes of this machine: one coordinator, some shards, some workers, and the caller, which only watches.

Workers may die at any moment: the others take over. A coordinator or shard that was killed is started again, and all go on from the
last iteration in the folder (see ``processes``). A later call with the same folder goes on there too.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.drivers.processes import Role, Supervisor, say
from hocket.drivers.record import digest
from hocket.errors import HocketError, WorkerLost
from hocket.files import sealed_json, unsealed, write_whole
from hocket.sandblaster.coordinator import GO_ON
from hocket.sandblaster.processes import (
    FAILURE_FILE,
    LINK_FILE,
    PREVIOUS_FILE,
    STATE_FILE,
    Plan,
    be_coordinator,
    be_shard,
    be_worker,
)
from hocket.sandblaster.vectors import cuts
from hocket.transport.frame import JOB_BYTES

if TYPE_CHECKING:
    from hocket.sandblaster.api import Sandblaster

NOTHING_KEPT = "start again, with a folder (on the command line --out) so that it can go on from the last iteration"
START_S = 60.0
LEAVE_S = 5.0
COORDINATOR_ROLE, SHARD, WORKER = "coordinator", "shard", "worker"
SETTLE_S = 0.5
"""After the coordinator has ended, wait so long for the exit code of a shard, which may be the cause."""


class ForkedProcess:
    """A process of ``multiprocessing`` with the methods of ``subprocess.Popen``."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.terminate, self.kill, self.wait = process.terminate, process.kill, process.join

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode


class SandblasterProcesses(Supervisor):
    """The processes of a run, as the process that started them sees them; ``roles`` are coordinator, shard and worker."""

    def __init__(self, roles: Sequence[Role], remedy: str, leave_s: float = 0.0) -> None:
        super().__init__(roles, max_restarts=sys.maxsize)  # this class counts them
        self._remedy, self._leave_s = remedy, leave_s
        self.times_restarted = 0
        """How often processes that were killed have been started again; several at once count once."""

    def of(self, role: str) -> list[Any]:
        return [self.process(role, number) for number in self.codes(role)]

    @property
    def everyone(self) -> list[Any]:
        return [*self.of(COORDINATOR_ROLE), *self.of(SHARD), *self.of(WORKER)]

    def check(self, most_restarts: int) -> bool:
        """Whether the run is over; starts a coordinator or shards that were killed again."""
        code = self.code
        if code == 0:
            return True
        if code is not None or any(self.ended(SHARD).values()):  # perhaps because another process ended
            self._settle()
        dead = {i: ended for i, ended in self.ended(SHARD).items() if ended}
        killed = any(ended < 0 for ended in (*dead.values(), 0 if code is None else code))
        if killed and max(dead.values(), default=-1) < 0 and self.times_restarted < most_restarts:
            self._restart()
        elif dead:
            place, ended = max(dead.items(), key=lambda item: item[1])  # an error of its own says more than a death
            raise WorkerLost(f"Shard {place} ended with code {ended}: {self._remedy}.", place)
        elif code is not None:
            return True
        codes = list(self.codes(WORKER).values())
        if all(codes):
            raise WorkerLost(f"All workers ended, the last with code {codes[-1]}: see their own output.")
        return False

    @property
    def code(self) -> int | None:
        """The coordinator's exit code; None while it runs."""
        return self.codes(COORDINATOR_ROLE)[0]

    def _settle(self) -> None:
        """Wait briefly, in case another shard ends too."""
        before, deadline = len(self.ended(SHARD)), time.monotonic() + SETTLE_S
        while len(self.ended(SHARD)) == before < len(self.codes(SHARD)) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _restart(self) -> None:
        """Start ended shards again, and the coordinator if it has ended."""
        self.times_restarted += 1
        for role in (SHARD, COORDINATOR_ROLE):
            for number in self.ended(role):
                self.restart(role, number)

    def shutdown(self, leave_s: float = 0.0) -> None:
        """End all processes; when the run has ended by itself, all is saved, and only recordings take time."""
        super().shutdown(self._leave_s if self.codes(COORDINATOR_ROLE).get(0) == 0 else leave_s)


def launch(
    job: Sandblaster,
    folder: Path | None = None,
    liveness_timeout_s: float = 5.0,
    restarts: int = 3,
    watch: Callable[[SandblasterProcesses], None] = lambda _: None,
    on_iteration: Callable[[dict[str, Any]], None] = lambda _: None,
    slowdown: Sequence[float] = (1.0,),
    record: Path | None = None,
) -> tuple[list[dict[str, Any]], Tensor, str]:
    """Run ``job`` on processes: metrics, weights and why it ended."""
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as name:
        where = Path(name)
        where.mkdir(parents=True, exist_ok=True)
        point = job.objective().point.cpu()
        config = job.config(liveness_timeout_s=liveness_timeout_s, remedy=NOTHING_KEPT if folder is None else GO_ON)
        plan = Plan(secrets.token_bytes(JOB_BYTES), where, config, digest([point, *job.train]), len(point), record)
        _check_folder(plan)
        (where / LINK_FILE).unlink(missing_ok=True)
        processes = _processes(plan, point, _pickled(job), job.workers, slowdown)
        reported = 0

        def tell() -> None:
            """Report the iterations that the coordinator has written, each once, also those before this call."""
            nonlocal reported
            for row in plan.written().get("metrics", [])[reported:]:
                reported += 1
                on_iteration(row)

        def look() -> None:
            tell()
            watch(processes)

        try:
            with processes:
                _start(processes, plan)
                _watch(processes, plan, restarts, look)
        finally:
            tell()
        found = plan.written()
        iteration = found["state"]["iteration"]
        slices = [unsealed(plan.slices(i, iteration).read_bytes())["x"] for i in range(job.shards)]
        return found["metrics"], torch.cat(slices), found["state"]["ended"]


def _processes(plan: Plan, point: Tensor, job: bytes, workers: int, slowdown: Sequence[float]) -> SandblasterProcesses:
    context, incarnations = _context(), count()

    def begin(target: Callable[..., None], *arguments: Any) -> ForkedProcess:
        process = context.Process(target=target, args=(plan, *arguments), daemon=True)
        process.start()
        return ForkedProcess(process)

    def begin_coordinator(number: int, incarnation: int) -> ForkedProcess:
        (plan.folder / FAILURE_FILE).unlink(missing_ok=True)
        return begin(be_coordinator, next(incarnations))

    def begin_shard(number: int, incarnation: int) -> ForkedProcess:
        part = cuts(plan.values, plan.config.shards)[number]
        return begin(be_shard, next(incarnations), number, point[part].numpy())

    def begin_worker(number: int, incarnation: int) -> ForkedProcess:
        return begin(be_worker, number, job, slowdown[number % len(slowdown)])

    roles = [
        Role(COORDINATOR_ROLE, 1, begin_coordinator, grace_s=0.0),
        Role(SHARD, plan.config.shards, begin_shard, grace_s=0.0),
        Role(WORKER, workers, begin_worker, grace_s=0.0),
    ]
    return SandblasterProcesses(roles, plan.config.remedy, 0.0 if plan.record is None else LEAVE_S)


def _start(processes: SandblasterProcesses, plan: Plan) -> None:
    """Start all; the others read where the coordinator listens."""
    processes.start(COORDINATOR_ROLE)
    deadline = time.monotonic() + START_S
    while not (plan.folder / LINK_FILE).exists():
        if processes.code is not None or time.monotonic() > deadline:
            raise WorkerLost("The coordinator did not start: see its own output.")
        time.sleep(0.02)
    processes.start(SHARD)
    processes.start(WORKER)


def _watch(processes: SandblasterProcesses, plan: Plan, restarts: int, look: Callable[[], None]) -> None:
    failure = plan.folder / FAILURE_FILE
    while True:
        if processes.code and failure.exists() and processes.times_restarted < restarts:
            silent = json.loads(failure.read_text()).get("silent")
            if silent is not None:  # stopped, or hanging: another takes its place, as if it had been killed
                processes.process(SHARD, silent).kill()
                processes.process(SHARD, silent).wait()
        if processes.check(restarts):
            break
        look()
        time.sleep(0.05)
    if failure.exists():
        error = json.loads(failure.read_text())
        raise (WorkerLost if error["kind"] == "WorkerLost" else HocketError)(error["sentence"])
    if processes.code:
        raise WorkerLost(f"The coordinator ended with code {processes.code}: {plan.config.remedy}.")


def _context() -> ForkServerContext | SpawnContext:
    """A fork server that has imported torch, where the system has one; children inherit nothing from the caller."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _check_folder(plan: Plan) -> None:
    """Refuse another run's folder; where the last iteration is damaged, go back to the one before it."""
    problems: list[str] = []
    for file in (plan.folder / STATE_FILE, plan.folder / PREVIOUS_FILE):
        if not file.exists():
            continue
        found = plan.generations().get(file.name, {})
        problem = _problem(plan, file, found)
        if problem is None and problems:
            write_whole(plan.folder / STATE_FILE, sealed_json(found))
            say(f"{problems[0]}; the run goes on from iteration {found['state']['iteration']}")
        if problem is None:
            return
        problems.append(problem)
    if problems:
        raise HocketError(f"{problems[0]}, so the run cannot be resumed: choose another folder.")


def _problem(plan: Plan, file: Path, found: dict[str, Any]) -> str | None:
    """What is damaged in an iteration's files; None where they are whole."""
    try:
        facts, iteration = dict(found["facts"]), int(found["state"]["iteration"])
    except (KeyError, TypeError, ValueError):
        return f"{file} is damaged"
    other = [name for name, value in plan.facts().items() if facts.get(name) != value]
    if other:
        raise HocketError(f"{plan.folder} holds another run, with {other[0]}={facts.get(other[0])}: choose another folder.")
    for i in range(plan.config.shards):
        part = plan.slices(i, iteration)
        try:
            unsealed(part.read_bytes())
        except Exception as error:
            return f"{part} is missing or damaged ({type(error).__name__})"
    return None


def _pickled(job: Sandblaster) -> bytes:
    try:
        return pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise HocketError(
            f"Processes need a model and a loss that can be sent to them ({error}): define them in a module."
        ) from None
