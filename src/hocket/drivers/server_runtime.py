"""A worker of a parameter server, :class:`~hocket.programs.server.worker.ServerWorker`, and an observer of shards, on sockets."""

import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from hocket.cluster.layout import Layout
from hocket.cluster.progress import Progress, doing
from hocket.drivers.sockets import SocketDriver
from hocket.drivers.worker_runtime import REDIAL_S, WorkerRuntime
from hocket.errors import HocketError, WorkerLost
from hocket.programs.base import Effects
from hocket.programs.server.observer import GlobalWeights, ShardObserver
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.programs.server.push_encoder import Slices
from hocket.programs.server.requests import WorkerConfig
from hocket.programs.server.wire import WORKER_MARK, link_bytes
from hocket.programs.server.worker import ServerWorker
from hocket.transport import Caller, Envelope, Keys, Kind

STATUS_S = 5.0
"""The seconds in which a shard must answer a request for its status."""
_BEAT_S = 1.0


class Observer(SocketDriver):
    """A :class:`~hocket.programs.server.observer.ShardObserver` on links to the shards at ``addresses``."""

    program: ShardObserver

    def __init__(
        self, addresses: Sequence[str], job: bytes, layout: Layout, slices: Slices, most_bytes: int, keys: Keys | None
    ) -> None:
        identity = b"o" + secrets.token_bytes(8)
        callers = {place: Caller(address, job, keys, identity, most_bytes) for place, address in enumerate(addresses)}
        super().__init__(ShardObserver(layout, slices), callers=callers)
        self._answered = set(callers)  # a handshake also fails where a shard dies, and that one comes back

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(0)

    def statuses(self, timeout_s: float) -> dict[int, dict[str, Any] | None]:
        """The state of the job as reported by each shard that answers in time."""
        self.begin(self.program.ask_status)
        self.wait(lambda: len(self.program.statuses) == len(self.callers), timeout_s)
        return self.program.statuses

    def global_weights(self, timeout_s: float) -> GlobalWeights | None:
        """The weights as they are now; None where a shard does not answer in time."""
        self.call(self.program.fetch, 0, timeout_s=timeout_s)
        return self.program.found


class ServerRuntime(WorkerRuntime):
    """The worker that ``config`` describes, on the shards at ``addresses``; ``record``: a file for its events."""

    program: ServerWorker

    def __init__(
        self, addresses: Sequence[str], job: bytes, config: WorkerConfig, keys: Keys | None = None, record: Path | None = None
    ) -> None:
        self.program = ServerWorker(config)
        shards = len(self.program.links)
        if len(addresses) != shards:
            raise HocketError(
                f"{config.strategy} has {shards} shards, but {len(addresses)} addresses are given; give one address per shard."
            )
        super().__init__(config.worker, record)
        self.config, self.addresses = config, list(addresses)
        self._job, self._keys, self._bytes = job, keys, link_bytes(config.strategy, config.layout)
        token = secrets.token_bytes(8)
        identity = WORKER_MARK + token
        self._recorder.start(**_described(config), identity=identity.hex())
        callers = {
            place: Caller(address, job, keys, identity, self._bytes, redial_s=REDIAL_S) for place, address in enumerate(addresses)
        }
        beats = [Caller(address, job, keys, b"b" + token, high_water=2, redial_s=REDIAL_S) for address in addresses]
        self.driver = SocketDriver(self.program, callers=callers, recorder=self._recorder)
        self._heartbeats = _Heartbeats(config.worker, beats)
        self._track = self._heartbeats.progress.track("shards", [])
        self._accounts: dict[str, dict[str, Any]] = {}
        self._staleness: dict[str, int] = {}
        self._lost: dict[int, int] = {}
        self._options: list[dict[str, Any]] = []

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

    def before_update(self, gradients: Sequence[Tensor]) -> None:
        self._call(self.program.before_update, gradients)

    def set_options(self, options: list[dict[str, Any]]) -> None:
        if options != self._options:
            self._options = options
            self.driver.call(self.program.set_options, options)

    def after_update(self, lrs: Sequence[float], buffers: Tensor | None) -> None:
        self._call(self.program.after_update, list(lrs), buffers)

    def _call(self, method: Callable[..., Effects], *arguments: Any) -> None:
        """Call the program as part of a step: while it waits, so does the training."""
        self._track.wait(partial(self.driver.call, method, *arguments), 0, "an answer of a shard")

    def next_batch(self) -> int | None:
        if not self.program.batch_ids:
            self.driver.call(self.program.take_batch)
        return self.record_batch(self.program.next_batch())

    def flush(self) -> None:
        """Apply the requested weights, and push the remaining sums."""
        self.driver.call(self.program.flush)

    def finish(self) -> Tensor | None:
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
        """Close the links without a GOODBYE; the shards notice the silence."""
        self.attached = False
        self._heartbeats.stop()
        self.driver.close(linger_s)

    # --- state ---------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Residuals, sums that are not pushed yet, the step. The weights are on the shards."""
        return {**self._identity(), **self.program.strategy_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise HocketError(
                    f"The checkpoint's {name} is {state.get(name)}, this job's is {value}; resume with what it was saved with."
                )
        self._refuse_late_load()
        self.driver.call(self.program.resume, {k: v for k, v in state.items() if k not in self._identity()})

    def residuals(self) -> list[Tensor | None] | None:
        with self.driver.lock:
            return self.program.residuals()

    def begin_with(self, residuals: list[Tensor | None]) -> None:
        with self.driver.lock:
            self.program.begin_with(residuals)

    def _identity(self) -> dict[str, Any]:
        config = self.config
        workers = [config.worker, config.worker + 1, config.world]
        return {"strategy": str(config.strategy), "layout": config.layout.digest(), "workers": workers, "seed": config.seed}

    # --- figures and global weights ------------------------------------------------------------------------------------------

    def observer(self) -> Observer:
        """An observer of the same shards."""
        return Observer(self.addresses, self._job, self.config.layout, self.program.slices, self._bytes, self._keys)

    def global_weights(self) -> tuple[list[Tensor], Tensor | None]:
        with self.observer() as observer:
            found = observer.global_weights(self.config.give_up_s)
        if found is None:
            raise WorkerLost("A shard does not answer, so the global weights cannot be fetched.")
        return found.rows, found.buffers

    def refresh(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """``staleness`` counts the pushes that are in the first shard's weights (under ``stale`` there are none). ``lost`` counts
        mini-batches on the shard that has lost most: those of workers that died, those of pushes that a restarted shard does not
        remember, and under ``bulk`` and ``ssp`` the steps that a worker missed while away.
        """
        if self.attached:
            with self.paused(), self.observer() as observer:
                statuses = {place: status for place, status in observer.statuses(STATUS_S).items() if status is not None}
            if 0 in statuses:
                self._accounts, self._staleness = dict(statuses[0]["workers"]), dict(statuses[0]["staleness"])
            self._lost |= {place: int(status["lost"]) for place, status in statuses.items()}
        self._accounts[str(self.worker)] = self.figures()
        return self._accounts, {"lost": max(self._lost.values(), default=0), "staleness": dict(self._staleness)}


class _Heartbeats:
    """Signs of life: BEAT to every shard once a second, from a thread with ``callers`` of its own, for the worker may compute for
    long."""

    def __init__(self, worker: int, callers: Sequence[Caller]) -> None:
        self._worker, self._callers, self._stopped = worker, callers, threading.Event()
        self.progress = Progress()
        """Where the training thread stands."""
        self._thread = threading.Thread(target=self._beat, name="hocket-heartbeats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop sending, and close the links."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
        for caller in self._callers:
            caller.close(0)

    def _beat(self) -> None:
        while not self._stopped.wait(_BEAT_S):
            activity = doing(self.progress.describe())
            for caller in self._callers:
                caller.send(Envelope(Kind.BEAT, self._worker, metadata={"doing": activity} if activity else {}), 0.0)
                caller.receive(0.0)  # read and dropped, so that the queue never fills up


def _described(config: WorkerConfig) -> dict[str, Any]:
    """The description from which a replay builds the same worker."""
    names = ("worker", "world", "seed", "liveness_timeout_s", "give_up_s", "total", "per_epoch", "replaces")
    plain = {name: getattr(config, name) for name in names}
    return {"strategy": str(config.strategy), "layout": config.layout.digest(), **plain}
