"""A run with servers: shards and workers are processes, and this one observes them.

A shard that dies is started again from its snapshot. After every epoch this process fetches the global weights, evaluates and
records them.
"""

from __future__ import annotations

import time
from typing import Any

from hocket.drivers.observer import Observer
from hocket.drivers.start import Child, address_of, start_shard
from hocket.errors import HocketError
from hocket.programs.server.slices import Slices
from hocket.supervisor.processes import Role, error_told, say
from hocket.supervisor.run import WORKER, OnEpoch, SupervisedRun, Watch
from hocket.train.loop import Progress
from hocket.train.watch import check_weights
from hocket.transport import Envelope

SHARD = "shard"
_GRACE_S = 5.0
"""A shard that records writes how it ended."""


class ServerRun(SupervisedRun):
    """Shards and workers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._observer: Observer | None = None

    @property
    def slices(self) -> Slices:
        """Which part of the weights each shard has."""
        return Slices.of(self.strategy, self.layout, self.settings.workers.count)

    @property
    def description(self) -> str:
        shards = self.slices.shards
        return f"{super().description} and {'1 shard' if shards == 1 else f'{shards} shards'}"

    def server_roles(self) -> list[Role]:
        return [Role(SHARD, self.slices.shards, self._start_shard, grace_s=0.0 if self.policy.record is None else _GRACE_S)]

    # --- processes -----------------------------------------------------------------------------------------------------------

    def _start_shard(self, place: int, incarnation: int) -> Child:
        policy = self.policy
        return start_shard(
            place,
            self.job,
            "tcp://127.0.0.1:0" if incarnation == 0 else self.addresses[place],
            policy.keys,
            policy.liveness_timeout_s,
            self.supervisor.folder,
            policy.snapshot_s,
            self.max_bytes,
            stays=True,
            record=policy.record_of(f"shard-{place}"),
        )

    def _start(self) -> None:
        self.supervisor.start(SHARD)  # all at once: what takes long is importing torch
        self.supervisor.start(WORKER)
        self.addresses = [address_of(self.supervisor.process(SHARD, place)) for place in range(self.slices.shards)]
        for worker in range(self.settings.workers.count):
            self.assign(worker)

    def _worker_gone(self, worker: int) -> None:
        assert self._observer is not None
        self._observer.tell(gone=worker)

    def _check_shards(self) -> bool:
        """Start shards that have ended again; whether there were some."""
        ended = self.supervisor.ended(SHARD)
        for place in ended:
            self._restart_shard(place)
        return bool(ended)

    def _restart_shard(self, place: int) -> None:
        told = error_told(self.supervisor.process(SHARD, place))
        if told is not None:
            raise HocketError(told["error"])
        self.supervisor.restart(SHARD, place)
        fresh = self.supervisor.process(SHARD, place)
        try:
            address_of(fresh)
        except HocketError:
            if (fresh.returncode or 0) < 0:
                return  # killed again: the next check starts another
            raise
        found = "its snapshot" if self.policy.snapshot_s > 0 else "what a worker has, for it had no snapshot"
        say(f"shard {place} died and is back from {found}")

    # --- observing -----------------------------------------------------------------------------------------------------------

    def _train(self, watch: Watch, on_epoch: OnEpoch) -> None:
        self._start()
        self._observer = Observer(self.addresses, self.job, self.layout, self.slices, self.max_bytes, self.keys)
        try:
            self._observe(self._observer, watch, on_epoch)
        finally:
            self._observer.close()

    def _observe(self, observer: Observer, watch: Watch, on_epoch: OnEpoch) -> None:
        epoch, looked = 1, time.monotonic()
        observer.request_weights(epoch)
        while epoch <= self.epochs:
            over = None not in self.supervisor.codes(WORKER).values()
            first = observer.receive_weights(3.0 if over else 0.1)
            self.check_workers()
            again = self._check_shards()
            if first is None:
                if again or over:  # with all workers gone there is only what there is
                    observer.request_weights(epoch, waits=again)
                elif time.monotonic() - looked > 1.0:
                    looked = time.monotonic()
                    for worker in self.dead:  # a shard may have started, or started again, since it died
                        observer.tell(gone=worker, unseen=True)
                    self._progress(observer, epoch, watch)
                continue
            if self._epoch_ends(observer, first, epoch, on_epoch):
                epoch += 1
            if epoch <= self.epochs:
                observer.request_weights(epoch)

    def _progress(self, observer: Observer, epoch: int, watch: Watch) -> None:
        status = observer.status(0.2)
        if status is not None:
            watch(Progress(epoch - 1, self.epochs, int(status["progress"]) // self.settings.workers.count, self.sequence.steps))

    def _epoch_ends(self, observer: Observer, first: Envelope, epoch: int, on_epoch: OnEpoch) -> bool:
        """Evaluate and record an epoch; False when a shard did not answer."""
        found = observer.global_weights(first, epoch)
        if found is None:
            return False
        check_weights(self.layout, found[0], epoch)
        accuracy = self.evaluate(*found)
        on_epoch(self.metrics.add(epoch, accuracy, first.metadata["figures"], {"lost": observer.lost}))
        return True
