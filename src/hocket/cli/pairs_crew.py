"""Workers of one run without servers on this machine: this process starts them, deals mini-batches, evaluates and records.

After every epoch it asks all workers for what they hold and evaluates the mean; after the last one, the mean that they agreed on.
Looking and evaluating go on beside dealing, so nobody waits for them; where nobody tells what it holds, that epoch has no accuracy.
A worker that died is replaced where asked: the new one takes weights from those who live (``join`` in ``server/peers.py``).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from hocket.cli.crew import Crew, Told
from hocket.errors import HocketError
from hocket.messages import Listener
from hocket.programs.server.wire import OBSERVER, SNAPSHOT_S
from hocket.server.account import ages_since, entry_of
from hocket.server.clerk import Clerk
from hocket.server.holding import Holding, Mean, mean_of
from hocket.server.peers import Peers, gather
from hocket.train.loop import Progress
from hocket.train.watch import check_weights

_SLOWEST_BYTES_PER_S = 10_000_000
"""So fast at least does the mean come from a worker to this process."""

OnEpoch = Callable[[dict[str, Any]], None]


class PairsCrew(Crew):
    """As :class:`~hocket.cli.crew.Crew`, with a clerk instead of shards."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.care.snapshot_s != SNAPSHOT_S:
            raise HocketError(f"{self.strategy} has no shards to take snapshots of; leave --snapshot out.")
        rows = [b.empty(1) for b in self.layout.buckets]
        self._like = Holding(rows)
        floating = [b for b in self.model.buffers() if b.is_floating_point()]
        self._like.buffers = torch.zeros(sum(b.numel() for b in floating)) if floating else None
        self._peers: Peers | None = None
        self._epoch = 1
        self._delivered, self._heard = 0, 0.0
        self._before["lost_exchanges"] = 0

    def run(self, watch: Callable[[Progress], None], on_epoch: OnEpoch) -> list[dict[str, Any]]:
        """Train to the end; no process is left behind, whatever happens."""
        with Listener("tcp://127.0.0.1:0", self._job, self._keys, self._most_bytes) as listener, ThreadPoolExecutor(1) as pool:
            self._looks = ThreadPoolExecutor(1)
            self._addresses = [listener.address]
            clerk = Clerk(listener, self.settings.workers.count, len(self.sequence))
            try:
                self._write_run(self.settings.workers.count)
                for worker in range(self.settings.workers.count):
                    self._workers[worker] = self._worker()
                for worker in range(self.settings.workers.count):
                    self._post(worker, replaces=False)
                self._serve(clerk, pool, watch, on_epoch)
            finally:
                self._looks.shutdown(cancel_futures=True)
                if self._peers is not None:
                    self._peers.close()
                self._end()
        return self.metrics

    def _serve(self, clerk: Clerk, pool: ThreadPoolExecutor, watch: Callable[[Progress], None], on_epoch: OnEpoch) -> None:
        looked = watched = time.monotonic()
        evaluated: list[Future[dict[str, Any]]] = []
        while not self._is_over(clerk):
            clerk.turn(0.05)
            now = time.monotonic()
            if now - looked > 0.1:
                looked = now
                self._tend(clerk)
            if now - watched > 1.0:
                watched = now
                done = clerk.dispatcher.counted // self.settings.workers.count
                watch(Progress(self._epoch - 1, self.epochs, done, self.sequence.steps))
            while self._epoch < self.epochs and clerk.dispatcher.counted >= self._epoch * self.sequence.per_epoch:
                look = self._looks.submit(self._look, clerk.addresses)
                evaluated.append(pool.submit(self._epoch_ends, look.result, self._figures(clerk), self._epoch))
                self._epoch += 1
            while evaluated and evaluated[0].done():
                on_epoch(evaluated.pop(0).result())
        for worker in set(self._workers) - clerk.means.keys() - clerk.gone:
            clerk.tell(gone=worker)  # stopped, or too slow to tell: the others have ended
        mean = clerk.means[min(clerk.means)]
        evaluated.append(pool.submit(self._epoch_ends, lambda: mean, self._figures(clerk), self.epochs))
        for each in evaluated:
            on_epoch(each.result())

    def _lose(self, worker: int, process: subprocess.Popen[str], code: int, observer: Told) -> None:
        assert isinstance(observer, Clerk)
        if not observer.means:
            super()._lose(worker, process, code, observer)
            return
        self._dead.add(worker)  # the training is over: nobody need take its place
        observer.tell(gone=worker)

    def _is_over(self, clerk: Clerk) -> bool:
        """Whether all who have agreed on the mean, and live, have told it, or nobody has for twice the patience.

        Whoever has it stays for one patience while another that took part is silent.
        """
        if len(clerk.means) != self._delivered:
            self._delivered, self._heard = len(clerk.means), time.monotonic()
        if not clerk.means:
            return False
        here = set(clerk.means[min(clerk.means)].here)
        most_s = 2 * self.care.liveness_timeout_s + self.settings.workers.count * self._like.bytes / _SLOWEST_BYTES_PER_S
        return here <= clerk.means.keys() | clerk.gone or time.monotonic() - self._heard > most_s

    def _look(self, addresses: list[str | None] | None) -> Mean | None:
        """The mean of what all who answer hold now; None where nobody does."""
        assert addresses is not None
        if self._peers is None:
            self._peers = Peers(addresses, self._job, OBSERVER, self._keys, self._most_bytes, self.care.liveness_timeout_s)
        for worker, address in enumerate(addresses):
            if address != self._peers.addresses[worker]:
                self._peers.move(worker, address)
        try:
            parts = gather(self._peers, self._like)
        except (HocketError, ValueError):  # a stranger at the door of one that has died
            return None
        return mean_of(parts) if parts else None

    def _figures(self, clerk: Clerk) -> dict[str, Any]:
        sums = {"lost": clerk.lost, "lost_exchanges": clerk.lost_exchanges, "ages": clerk.ages}
        return {"workers": dict(clerk.figures), **sums}

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
        metrics["staleness"] = ages_since(figures["ages"], self._before["ages"])
        for name in ("lost", "lost_exchanges"):
            metrics[name] = figures[name] - self._before[name]
        self._before, self._took = figures, took
        self.metrics.append(metrics)
        if self.record is not None:
            self.record.write_metrics(self.metrics)
        return metrics
