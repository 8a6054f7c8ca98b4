"""Sandblaster on processes of this machine: one coordinator, some shards, some workers, and the caller, who only watches.

Workers may die at any moment: the others take over. A coordinator or shard that was killed is started again, and all go on from the
last iteration in the folder (see ``processes``). A later call with the same folder goes on there too.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import pickle
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.drivers.snapshots import unsealed
from hocket.errors import HocketError, WorkerLost
from hocket.messages.frame import JOB_BYTES
from hocket.sandblaster.coordinator import GO_ON
from hocket.sandblaster.processes import FAILURE_FILE, LINK_FILE, Plan, be_coordinator, be_shard, be_worker
from hocket.sandblaster.vectors import cuts

if TYPE_CHECKING:
    from hocket.sandblaster.api import Sandblaster

NOTHING_KEPT = "start again, with a folder (on the command line --out) so that it can go on from the last iteration"
START_S = 60.0
LEAVE_S = 5.0
SETTLE_S = 0.5
"""A shard's end may be known a little later than that of a coordinator that could not do without it."""


class Supervisor:
    """The processes of a run, as the process that started them sees them."""

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
        """Start shards that have ended, and the coordinator if it has, again."""
        self.restarts += 1
        for i, shard in enumerate(self.shards):
            if shard.exitcode is not None:
                self.shards[i] = self._start_shard(i)
        if self.coordinator.exitcode is not None:
            self.coordinator = self._start()

    def shutdown(self) -> None:
        """End all processes: those of a run that has ended by itself get some time to do so."""
        deadline = time.monotonic() + LEAVE_S
        for process in self.everyone:
            process.join(max(0.0, deadline - time.monotonic()) if self.coordinator.exitcode == 0 else 0.0)
            if process.exitcode is None:
                process.kill()
                process.join()


def launch(
    job: Sandblaster,
    folder: Path | None = None,
    liveness_timeout_s: float = 5.0,
    restarts: int = 3,
    watch: Callable[[Supervisor], None] = lambda _: None,
    on_iteration: Callable[[dict[str, Any]], None] = lambda _: None,
    slowdown: Sequence[float] = (1.0,),
) -> tuple[list[dict[str, Any]], Tensor, str]:
    """Run ``job`` on processes: metrics, weights and why it ended."""
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as name:
        where = Path(name)
        where.mkdir(parents=True, exist_ok=True)
        point = job.objective().point.cpu()
        config = job.config(liveness_timeout_s=liveness_timeout_s, remedy=NOTHING_KEPT if folder is None else GO_ON)
        plan = Plan(secrets.token_bytes(JOB_BYTES), where, config, _digest(point, *job.train), len(point))
        _check_folder(plan)
        (where / LINK_FILE).unlink(missing_ok=True)
        supervisor = _start(plan, point, _pickled(job), job.workers, slowdown)
        told = 0

        def tell() -> None:
            """What the coordinator has written down, each iteration once, also those before this call."""
            nonlocal told
            for row in plan.written().get("metrics", [])[told:]:
                told += 1
                on_iteration(row)

        def look() -> None:
            tell()
            watch(supervisor)

        try:
            _watch(supervisor, plan, restarts, look)
        finally:
            supervisor.shutdown()
            tell()
        found = plan.written()
        iteration = found["state"]["iteration"]
        slices = [unsealed(plan.slices(i, iteration).read_bytes())["x"] for i in range(job.shards)]
        return found["metrics"], torch.cat(slices), found["state"]["ended"]


def _start(plan: Plan, point: Tensor, job: bytes, workers: int, slowdown: Sequence[float]) -> Supervisor:
    context, incarnations = _context(), count()

    def begin(role: Callable[..., None], *arguments: Any) -> BaseProcess:
        process = context.Process(target=role, args=(plan, *arguments), daemon=True)
        process.start()
        return process

    def begin_coordinator() -> BaseProcess:
        (plan.folder / FAILURE_FILE).unlink(missing_ok=True)
        return begin(be_coordinator, next(incarnations))

    def begin_shard(number: int) -> BaseProcess:
        part = cuts(plan.values, plan.config.shards)[number]
        return begin(be_shard, next(incarnations), number, point[part].numpy())

    supervisor = Supervisor(begin_coordinator, begin_shard, plan.config.remedy)
    try:
        _wait_for(plan, supervisor.coordinator)
        supervisor.shards += (begin_shard(i) for i in range(plan.config.shards))
        supervisor.workers += (begin(be_worker, i, job, slowdown[i % len(slowdown)]) for i in range(workers))
    except BaseException:
        supervisor.shutdown()
        raise
    return supervisor


def _watch(supervisor: Supervisor, plan: Plan, restarts: int, look: Callable[[], None]) -> None:
    while not supervisor.check(restarts):
        look()
        time.sleep(0.05)
    failure = plan.folder / FAILURE_FILE
    if failure.exists():
        told = json.loads(failure.read_text())
        raise (WorkerLost if told["kind"] == "WorkerLost" else HocketError)(told["sentence"])
    if supervisor.coordinator.exitcode:
        raise WorkerLost(f"The coordinator ended with code {supervisor.coordinator.exitcode}: {plan.config.remedy}.")


def _context() -> ForkServerContext | SpawnContext:
    """A server that has imported torch once and forks, where there is such a thing; nothing of the caller's is inherited."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _check_folder(plan: Plan) -> None:
    found = plan.written()
    if not found:
        return
    facts = found["facts"]
    other = [name for name, value in plan.facts().items() if facts.get(name) != value]
    if other:
        raise HocketError(f"{plan.folder} holds another run, with {other[0]}={facts.get(other[0])}: choose another folder.")
    for i in range(plan.config.shards):
        part = plan.slices(i, found["state"]["iteration"])
        try:
            unsealed(part.read_bytes())
        except Exception as error:
            raise HocketError(
                f"{part} is missing or damaged ({type(error).__name__}), so there is nothing to go on from: choose another folder."
            ) from None


def _wait_for(plan: Plan, coordinator: BaseProcess) -> None:
    """Until the coordinator has written down where it listens."""
    deadline = time.monotonic() + START_S
    while not (plan.folder / LINK_FILE).exists():
        if coordinator.exitcode is not None or time.monotonic() > deadline:
            raise WorkerLost("The coordinator did not start: look at its output.")
        time.sleep(0.02)


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
