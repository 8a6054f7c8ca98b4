"""A run with servers: shards and workers are processes, and this one observes them.

A shard that dies is started again from its snapshot. After every epoch this process fetches the global weights, evaluates and
records them.
"""

import time
from collections import defaultdict
from functools import partial
from typing import Any

from hocket.drivers.processes import SHARD, Role, reported_error, say
from hocket.drivers.server_runtime import Observer
from hocket.drivers.start import address_of, start_shard
from hocket.errors import HocketError
from hocket.programs.server.observer import GlobalWeights
from hocket.programs.server.push_encoder import Slices
from hocket.supervisor.run import WORKER, OnEpoch, SupervisedRun, Watch
from hocket.train.loop import Progress

_GRACE_S = 5.0
"""The seconds that a recording shard has at the end to write its recording."""
_SILENCE_S = 20.0
"""A shard that has not answered for these seconds, or for two liveness timeouts, is replaced; workers wait a minute for a shard."""
_LOOK_S = 1.0


class ServerRun(SupervisedRun):
    """Shards and workers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._observer: Observer | None = None
        self._quiet_s: defaultdict[int, float] = defaultdict(float)
        """For how long each shard has not answered."""

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

    def _start_shard(self, place: int, incarnation: int) -> Any:
        where = self.machines.of_shard(place)
        policy, bind = self.policy, self._bind(place) if incarnation == 0 else self.addresses[place]
        folder = self.machines.places[where].folder or self.supervisor.folder
        kept: dict[str, Any] = {"snapshots": folder, "snapshot": policy.snapshot_s, "most_bytes": self.max_bytes}
        kept["start"] = partial(self.machines.start, where)
        record = policy.record_of(f"shard-{place}")
        return start_shard(place, self.job, bind, policy.keys, policy.liveness_timeout_s, stays=True, record=record, **kept)

    def _bind(self, place: int) -> str:
        """The address at which a shard listens."""
        return self.machines.bind(self.machines.of_shard(place))

    def _worker_gone(self, worker: int) -> None:
        assert self._observer is not None
        self._observer.begin(self._observer.program.tell, gone=worker)

    def _end_silent(self, heard: set[int], gap_s: float) -> None:
        """A shard that runs but does not answer (stopped, or hanging) is ended, so that another takes its place.

        Of the time since the last look only a little counts: this process may have been stopped itself.
        """
        for place in range(self.slices.shards):
            self._quiet_s[place] = 0.0 if place in heard else self._quiet_s[place] + min(gap_s, 1.5 * _LOOK_S)
            if self._quiet_s[place] > max(_SILENCE_S, 2 * self.policy.liveness_timeout_s):
                say(f"shard {place} has not answered for {self._quiet_s[place]:.0f} s and is ended")
                self.supervisor.process(SHARD, place).kill()
                self.supervisor.process(SHARD, place).wait()
                self._quiet_s[place] = 0.0
        heard.clear()

    def _restart_shard(self, place: int) -> None:
        if failure := reported_error(self.supervisor.process(SHARD, place)):
            raise HocketError(failure["error"])
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

    def _train(self, watch: Watch, on_epoch: OnEpoch) -> None:
        self.supervisor.start(SHARD)  # all at once, since importing torch takes long
        self.supervisor.start(WORKER)
        self.addresses = [address_of(self.supervisor.process(SHARD, place)) for place in range(self.slices.shards)]
        for worker in range(self.settings.workers.count):
            self.assign(worker)
        with Observer(self.addresses, self.job, self.layout, self.slices, self.max_bytes, self.keys) as self._observer:
            self._observe(self._observer, watch, on_epoch)

    def _observe(self, observer: Observer, watch: Watch, on_epoch: OnEpoch) -> None:
        program = observer.program
        epoch, looked = 1, time.monotonic()
        observer.begin(program.fetch, epoch)
        while epoch <= self.epochs:
            over = None not in self.supervisor.codes(WORKER).values()
            ended = observer.wait(lambda: not program.busy, 3.0 if over else 0.1)
            self.check_workers()
            again = self.supervisor.ended(SHARD)
            for place in again:
                self._restart_shard(place)
            if time.monotonic() - looked > _LOOK_S and not again:
                gap_s, looked = time.monotonic() - looked, time.monotonic()
                self._look(observer, epoch, gap_s, watch)
            if not ended:
                if again or over:  # with all workers gone no better weights will come
                    observer.begin(program.fetch, epoch, waits=bool(again))
                continue
            if program.found is not None:
                self._epoch_ends(program.found, epoch, on_epoch)
                epoch += 1
            if epoch <= self.epochs:
                observer.begin(program.fetch, epoch)

    def _look(self, observer: Observer, epoch: int, gap_s: float, watch: Watch) -> None:
        program = observer.program
        for worker in self.dead:  # a shard may have started, or started again, since it died
            observer.begin(program.tell, gone=worker, unseen=True)
        statuses = observer.statuses(0.2)
        self._end_silent(program.heard, gap_s)
        if status := statuses.get(0):
            done = int(status["progress"]) // self.settings.workers.count
            watch(Progress(epoch - 1, self.epochs, done, self.sequence.steps))

    def _epoch_ends(self, found: GlobalWeights, epoch: int, on_epoch: OnEpoch) -> None:
        on_epoch(self.close_epoch(epoch, found.rows, found.buffers, found.figures, {"lost": found.lost}))
