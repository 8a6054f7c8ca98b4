"""Workers of one run without servers on this machine: this process starts them, dispatches mini-batches, evaluates and records.

After every epoch it asks all workers for what they hold and evaluates the mean; after the last one, the mean that they agreed on.
Asking and evaluating go on beside dispatching, so no worker waits for them; where no worker answers, that epoch has no accuracy.
A worker that died is replaced where asked: the new one takes weights from those that live (``join`` in
``programs/gossip/agreement.py``).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from hocket.cli.crew import Crew, Told
from hocket.drivers.sockets import SocketDriver
from hocket.errors import HocketError
from hocket.messages import Caller, Listener
from hocket.programs.account import entry_of, staleness_since
from hocket.programs.coordinator import Coordinator
from hocket.programs.gossip.observer import PeerObserver
from hocket.programs.gossip.state import Mean, PeerState
from hocket.programs.server.wire import SNAPSHOT_S
from hocket.train.loop import Progress
from hocket.train.watch import check_weights

_SLOWEST_BYTES_PER_S = 10_000_000
"""So fast at least does the mean come from a worker to this process."""

OnEpoch = Callable[[dict[str, Any]], None]


class Dispatch:
    """The coordinator on its socket; it hears of workers that have died."""

    def __init__(self, listener: Listener, workers: int, total: int) -> None:
        self.coordinator = Coordinator(workers, total)
        self.driver = SocketDriver(self.coordinator, listener=listener)
        self.driver.begin(self.coordinator.start)

    def tell(self, **order: Any) -> None:
        """``gone=worker``: it has died, or is silent for good."""
        self.driver.begin(self.coordinator.worker_lost, order["gone"])


class PairsCrew(Crew):
    """As :class:`~hocket.cli.crew.Crew`, with a coordinator instead of shards."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.care.snapshot_s != SNAPSHOT_S:
            raise HocketError(f"{self.strategy} has no shards to take snapshots of; leave --snapshot out.")
        self._like = PeerState([b.empty(1).cpu() for b in self.layout.buckets])
        floating = [b for b in self.model.buffers() if b.is_floating_point()]
        self._like.buffers = torch.zeros(sum(b.numel() for b in floating)) if floating else None
        self._observer: SocketDriver | None = None
        self._epoch = 1
        self._delivered, self._heard = 0, 0.0
        self._before["lost_exchanges"] = 0

    def run(self, watch: Callable[[Progress], None], on_epoch: OnEpoch) -> list[dict[str, Any]]:
        """Train to the end; no process is left behind, whatever happens."""
        with Listener("tcp://127.0.0.1:0", self._job, self._keys, self._most_bytes) as listener, ThreadPoolExecutor(1) as pool:
            self._looks = ThreadPoolExecutor(1)
            self._addresses = [listener.address]
            dispatch = Dispatch(listener, self.settings.workers.count, len(self.sequence))
            try:
                self._write_run(self.settings.workers.count)
                for worker in range(self.settings.workers.count):
                    self._workers[worker] = self._worker()
                for worker in range(self.settings.workers.count):
                    self._post(worker)
                self._serve(dispatch, pool, watch, on_epoch)
            finally:
                self._looks.shutdown(cancel_futures=True)
                if self._observer is not None:
                    self._observer.close(0)
                self._end()
        return self.metrics

    def _serve(self, dispatch: Dispatch, pool: ThreadPoolExecutor, watch: Callable[[Progress], None], on_epoch: OnEpoch) -> None:
        coordinator = dispatch.coordinator
        looked = watched = time.monotonic()
        evaluated: list[Future[dict[str, Any]]] = []
        while not self._is_over(coordinator):
            dispatch.driver.poll(0.05)
            now = time.monotonic()
            if now - looked > 0.1:
                looked = now
                self._tend(dispatch)
            if now - watched > 1.0:
                watched = now
                done = coordinator.dispatcher.counted // self.settings.workers.count
                watch(Progress(self._epoch - 1, self.epochs, done, self.sequence.steps))
            while self._epoch < self.epochs and coordinator.dispatcher.counted >= self._epoch * self.sequence.per_epoch:
                look = self._looks.submit(self._look, coordinator.worker_addresses)
                evaluated.append(pool.submit(self._epoch_ends, look.result, self._figures(coordinator), self._epoch))
                self._epoch += 1
            while evaluated and evaluated[0].done():
                on_epoch(evaluated.pop(0).result())
        for worker in set(self._workers) - coordinator.means.keys() - coordinator.gone:
            dispatch.tell(gone=worker)  # suspended, or too slow to tell: the others have ended
        mean = coordinator.means[min(coordinator.means)]
        evaluated.append(pool.submit(self._epoch_ends, lambda: mean, self._figures(coordinator), self.epochs))
        for each in evaluated:
            on_epoch(each.result())

    def _lose(self, worker: int, process: subprocess.Popen[str], code: int, observer: Told) -> None:
        assert isinstance(observer, Dispatch)
        if not observer.coordinator.means:
            super()._lose(worker, process, code, observer)
            return
        self._dead.add(worker)  # the training is over: no replacement is needed
        observer.tell(gone=worker)

    def _is_over(self, coordinator: Coordinator) -> bool:
        """True once every live worker has reported the final mean, or after twice the timeout without a report.

        A worker that has the mean stays for one timeout while another that took part is silent.
        """
        if len(coordinator.means) != self._delivered:
            self._delivered, self._heard = len(coordinator.means), time.monotonic()
        if not coordinator.means:
            return False
        here = set(coordinator.means[min(coordinator.means)].here)
        most_s = 2 * self.care.liveness_timeout_s + self.settings.workers.count * self._like.bytes / _SLOWEST_BYTES_PER_S
        return here <= coordinator.means.keys() | coordinator.gone or time.monotonic() - self._heard > most_s

    def _look(self, addresses: list[str | None] | None) -> Mean | None:
        """The mean of what all workers that answer hold now; None where no worker does."""
        assert addresses is not None
        if self._observer is None:
            program = PeerObserver(self.settings.workers.count, self._like, self.care.liveness_timeout_s)
            self._observer = SocketDriver(program, connect=self._call_worker)
            self._observer.begin(program.start)
        observer = self._observer.program
        assert isinstance(observer, PeerObserver)
        try:
            self._observer.begin(observer.move, addresses)
            self._observer.call(observer.look)
        except HocketError:  # another process has the port of a worker that has died
            return None
        return observer.looked

    def _call_worker(self, worker: int, address: str) -> Caller:
        return Caller(address, self._job, self._keys, most_bytes=self._most_bytes)

    def _figures(self, coordinator: Coordinator) -> dict[str, Any]:
        sums = {"lost": coordinator.lost, "lost_exchanges": coordinator.lost_exchanges, "ages": coordinator.staleness}
        return {"workers": dict(coordinator.figures), **sums}

    def _epoch_ends(  # type: ignore[override]
        self, look: Callable[[], Mean | None], figures: dict[str, Any], epoch: int
    ) -> dict[str, Any]:
        """Evaluate and record an epoch."""
        mean, accuracy = look(), None
        if mean is not None:
            rows = [row.view(1, -1) for row in mean.rows]
            check_weights(self.layout, rows, epoch)
            accuracy = self._evaluate(rows, mean.buffers)
        entry, loss = entry_of(figures["workers"], self._before["workers"])
        took = max((w["seconds"] for w in figures["workers"].values()), default=0.0)
        metrics = {"epoch": epoch, "accuracy": accuracy, "loss": loss, **vars(entry), "wall_s": max(took - self._took, 0.0)}
        metrics["staleness"] = staleness_since(figures["ages"], self._before["ages"])
        for name in ("lost", "lost_exchanges"):
            metrics[name] = figures[name] - self._before[name]
        self._before, self._took = figures, took
        self.metrics.append(metrics)
        if self.record is not None:
            self.record.write_metrics(self.metrics)
        return metrics
