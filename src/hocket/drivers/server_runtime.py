"""A worker of a parameter server as a training job uses it: :class:`~hocket.programs.server.worker.ServerWorker` on sockets.

Per step the job calls :meth:`ServerRuntime.before_update` with its gradients, steps its own optimiser where ``steps_locally`` says
so, and calls :meth:`ServerRuntime.after_update`. Weights come into the rows that it joined with.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from hocket.cluster.ledger import Entry
from hocket.drivers.heartbeats import Heartbeats
from hocket.drivers.observer import Observer
from hocket.drivers.record import Recorder
from hocket.drivers.sockets import SocketDriver
from hocket.errors import HocketError, WorkerLost
from hocket.programs.account import Account, entry_of
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.programs.server.requests import WorkerConfig
from hocket.programs.server.wire import WORKER_MARK, link_bytes
from hocket.programs.server.worker import ServerWorker
from hocket.transport import Caller, Keys

STATUS_S = 5.0
"""A shard has so long to say where it stands."""
_REDIAL_S = 3.0
"""A connection that acknowledges nothing for so long is made anew."""


class ServerRuntime:
    """The worker that ``config`` says, on the shards at ``addresses``; ``record``: a file for all that happens to it."""

    def __init__(
        self, addresses: Sequence[str], job: bytes, config: WorkerConfig, keys: Keys | None = None, record: Path | None = None
    ) -> None:
        self.program = ServerWorker(config)
        shards = len(self.program.links)
        if len(addresses) != shards:
            raise HocketError(f"{config.strategy} has {shards} shards, but {len(addresses)} addresses are given.")
        self.config, self.addresses = config, list(addresses)
        self._job, self._keys, self._bytes = job, keys, link_bytes(config.strategy, config.layout)
        token = secrets.token_bytes(8)
        identity = WORKER_MARK + token
        self._recorder = None if record is None else Recorder(record)
        if self._recorder is not None:
            self._recorder.start(**_described(config), identity=identity.hex())
        callers = {
            place: Caller(address, job, keys, identity, self._bytes, redial_s=_REDIAL_S) for place, address in enumerate(addresses)
        }
        beats = [Caller(address, job, keys, b"b" + token, high_water=2, redial_s=_REDIAL_S) for address in addresses]
        self.driver = SocketDriver(self.program, callers=callers, recorder=self._recorder)
        self._heartbeats = Heartbeats(config.worker, beats)
        self._accounts: dict[str, dict[str, Any]] = {}
        self._staleness: dict[str, int] = {}
        self._lost: dict[int, int] = {}
        self.attached = False

    # --- training ------------------------------------------------------------------------------------------------------------

    def join(self, rows: Sequence[Tensor], optimizer: OptimizerSpec) -> None:
        """Join the shards with these weights ``[1, values]`` per bucket, which the first worker brings, and fetch the shards'."""
        self._heartbeats.start()  # the first weights may be held back for long
        try:
            self.driver.call(self.program.join, rows, optimizer)
        except BaseException:
            self.close(0)
            raise
        self.attached = True
        self._time(self.account.begin)

    @property
    def step(self) -> int:
        """Steps done; a worker that was away goes on with the others."""
        return self.program.step

    @property
    def steps_locally(self) -> bool:
        """Whether the worker's own optimiser makes the step under way."""
        return self.program.steps_locally

    @property
    def account(self) -> Account:
        """This worker's own figures."""
        return self.program.account

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self.config.worker

    def figures(self) -> dict[str, Any]:
        """This worker's own figures by now, as plain data."""
        return self.account.describe(self.driver.clock())

    def before_update(self, gradients: Sequence[Tensor]) -> None:
        """This step's gradients, flat, one per bucket; the caller must not write to them any more."""
        self.driver.call(self.program.before_update, gradients)

    def after_update(self, lrs: Sequence[float], buffers: Tensor | None) -> None:
        """The step is done, with these learning rates; ``buffers`` are the worker's floating-point buffers, flat."""
        self.driver.call(self.program.after_update, list(lrs), buffers)

    def next_batch(self) -> int | None:
        """The number of the next mini-batch that shard 0 hands out; None when there is none left."""
        if not self.program.batch_ids:
            self.driver.call(self.program.take_batch)
        return self.record_batch(self.program.next_batch())

    def record_batch(self, number: int | None) -> int | None:
        """The number of a mini-batch that this worker takes for its next step, into the recording if there is one."""
        if self._recorder is not None:
            self._recorder.batch(number)
        return number

    def flush(self) -> None:
        """Apply what was requested, and push what has not been pushed yet."""
        self.driver.call(self.program.flush)

    def finish(self) -> Tensor | None:
        """Flush, and wait for the final weights, the same on all workers; all workers' mean buffers."""
        self.driver.call(self.program.finish)
        self.refresh()  # all have ended by now, and the shards stay until this worker leaves too
        return self.program.final_buffers

    def leave(self) -> None:
        """Say goodbye, also in the middle of a wait that was interrupted."""
        self._time(self.account.pause)
        self._heartbeats.stop()
        self.driver.begin(self.program.leave)
        self.close()

    def close(self, linger_s: float = 1.0) -> None:
        """Close the links without a word; the shards notice it by the silence."""
        self.attached = False
        self._heartbeats.stop()
        self.driver.close(linger_s)

    # --- state ---------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All strategy state of this worker: residuals, sums that are not pushed yet, the step. The weights are on the shards."""
        return {**self._identity(), **self.program.strategy_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, before the first step on these shards."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise HocketError(
                    f"The checkpoint's {name} is {state.get(name)}, this job's is {value}; resume with what it was saved with."
                )
        if self.step:
            raise HocketError(f"load_state_dict after {self.step} steps: load it before the first step of this job.")
        self.driver.call(self.program.resume, {k: v for k, v in state.items() if k not in self._identity()})

    def _identity(self) -> dict[str, Any]:
        config = self.config
        workers = [config.worker, config.worker + 1, config.world]
        return {"strategy": str(config.strategy), "layout": config.layout.digest(), "workers": workers, "seed": config.seed}

    # --- figures and global weights ------------------------------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time does not count: something is done beside the training."""
        if self.account.paused is not None:  # inside another pause, or after the end
            yield
            return
        self._time(self.account.pause)
        try:
            yield
        finally:
            self._time(self.account.resume)

    def _time(self, method: Callable[[float], None]) -> None:
        """Call a method of the account with the time, also in the recording."""
        now = self.driver.clock()
        if self._recorder is not None:
            self._recorder.call(f"account.{method.__name__}", (), now)
        method(now)

    def observer(self) -> Observer:
        """An observer of the same shards; close it."""
        return self._observer(self.addresses)

    def global_weights(self) -> tuple[list[Tensor], Tensor | None]:
        """The weights ``[1, values]`` per bucket as the shards have them now, and the mean buffers; any worker may ask alone."""
        observer = self.observer()
        try:
            observer.request_weights(0)
            first = observer.receive_weights(self.config.give_up_s)
            found = None if first is None else observer.global_weights(first, 0)
        finally:
            observer.close()
        if found is None:
            raise WorkerLost("A shard does not answer, so the global weights cannot be fetched.")
        return found

    def summary(self) -> dict[str, Any]:
        """Everything so far: seconds are means over workers, ``bytes_sent`` is the sum over workers, in both directions.

        ``staleness`` counts the pushes that are in the first shard's weights (under ``stale`` there are none). ``lost`` counts
        mini-batches on the shard that has lost most: those of workers that died, those of pushes that a restarted shard does not
        remember, and under ``bulk`` and ``ssp`` the steps that a worker missed while away.
        """
        entry = self.total()
        return {**vars(entry), "lost": max(self._lost.values(), default=0), "staleness": dict(self._staleness)}

    def total(self) -> Entry:
        """Seconds, bytes and exchanges of all workers so far."""
        self.refresh()
        return entry_of(self._accounts)[0]

    def refresh(self) -> None:
        """Ask all shards, as long as this worker is attached; a shard that does not answer keeps its last figures."""
        if self.attached:
            with self.paused():
                statuses = self._statuses()
            if statuses[0] is not None:
                self._accounts, self._staleness = dict(statuses[0]["workers"]), dict(statuses[0]["staleness"])
            self._lost |= {place: int(status["lost"]) for place, status in enumerate(statuses) if status is not None}
        self._accounts[str(self.config.worker)] = self.figures()

    def _statuses(self) -> list[dict[str, Any] | None]:
        """Where the job stands, as each shard sees it; None where one does not answer in time."""
        observers = [self._observer([address]) for address in self.addresses]
        deadline = time.monotonic() + STATUS_S
        try:
            for observer in observers:
                observer.request_status()
            return [observer.receive_status(max(deadline - time.monotonic(), 0.01)) for observer in observers]
        finally:
            for observer in observers:
                observer.close()

    def _observer(self, addresses: Sequence[str]) -> Observer:
        return Observer(addresses, self._job, self.config.layout, self.program.slices, self._bytes, self._keys)


def _described(config: WorkerConfig) -> dict[str, Any]:
    """What a replay needs to build the same worker."""
    names = ("worker", "world", "seed", "liveness_timeout_s", "give_up_s", "total", "per_epoch", "replaces")
    plain = {name: getattr(config, name) for name in names}
    return {"strategy": str(config.strategy), "layout": config.layout.digest(), **plain}
