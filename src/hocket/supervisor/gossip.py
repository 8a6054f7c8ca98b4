"""A run without servers: workers are processes, and this one is their coordinator and observes them.

After every epoch it fetches all workers' weights and evaluates their mean; after the last one, the final mean that they agreed on.
Fetching and evaluating do not delay the dispatching of mini-batches; where no worker answers, that epoch has no accuracy. A
replacement takes weights from the workers that live (``join`` in ``programs/gossip/agreement.py``).
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from hocket.drivers.sockets import SocketDriver
from hocket.errors import HocketError
from hocket.programs.coordinator import Coordinator
from hocket.programs.gossip.observer import PeerObserver
from hocket.programs.gossip.state import Mean, PeerState
from hocket.supervisor.run import WORKER, OnEpoch, SupervisedRun, Watch
from hocket.train.loop import Progress
from hocket.transport import Caller, Listener

_MIN_BYTES_PER_S = 10_000_000
"""The least rate at which a worker sends the mean to this process; it sets how long this process waits."""


class GossipRun(SupervisedRun):
    """Workers, and the coordinator in this process."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._like = PeerState([b.empty(1).cpu() for b in self.layout.buckets])
        floating = [b for b in self.model.buffers() if b.is_floating_point()]
        self._like.buffers = torch.zeros(sum(b.numel() for b in floating)) if floating else None
        self.coordinator = Coordinator(self.settings.workers.count, len(self.sequence), self._like)
        self._dispatch: SocketDriver | None = None
        self._observer: SocketDriver | None = None
        self._epoch = 1
        self._delivered, self._delivered_at = 0, 0.0

    def _train(self, watch: Watch, on_epoch: OnEpoch) -> None:
        # One thread asks the workers, another evaluates: neither waits for the other, and the coordinator for none of them.
        asking, evaluating = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        with Listener(self.machines.bind_here(), self.job, self.keys, self.max_bytes) as listener:
            self.addresses = [listener.address]
            self._dispatch = SocketDriver(self.coordinator, listener=listener)
            self._dispatch.begin(self.coordinator.start)
            try:
                self.supervisor.start(WORKER)
                for worker in range(self.settings.workers.count):
                    self.assign(worker)
                self._coordinate(self._dispatch, asking, evaluating, watch, on_epoch)
            finally:
                asking.shutdown(cancel_futures=True)
                evaluating.shutdown(cancel_futures=True)
                self.close()

    def close(self) -> None:
        if self._observer is not None:
            self._observer.close(0)

    def _coordinate(
        self, dispatch: SocketDriver, asking: ThreadPoolExecutor, evaluating: ThreadPoolExecutor, watch: Watch, on_epoch: OnEpoch
    ) -> None:
        coordinator, evaluated = self.coordinator, list[Future[dict[str, Any]]]()
        checked = watched = time.monotonic()
        while not self.is_over():
            dispatch.poll(0.05)
            now = time.monotonic()
            if now - checked > 0.1:
                checked = now
                self.check_workers()
            if now - watched > 1.0:
                watched = now
                done = coordinator.dispatcher.counted // self.settings.workers.count
                watch(Progress(self._epoch - 1, self.epochs, done, self.sequence.steps))
            while self._epoch < self.epochs and coordinator.dispatcher.counted >= self._epoch * self.sequence.per_epoch:
                look = asking.submit(self.look, lambda: coordinator.worker_addresses)
                evaluated.append(evaluating.submit(self.epoch_ends, look.result, self._figures(), self._epoch))
                self._epoch += 1
            while evaluated and evaluated[0].done():
                on_epoch(evaluated.pop(0).result())
        for worker in set(range(self.settings.workers.count)) - coordinator.means.keys() - coordinator.gone:
            self._worker_gone(worker)  # suspended, or too slow to report: the others have ended
        mean = coordinator.means[min(coordinator.means)]
        evaluated.append(evaluating.submit(self.epoch_ends, lambda: mean, self._figures(), self.epochs))
        for each in evaluated:
            on_epoch(each.result())

    def _worker_gone(self, worker: int) -> None:
        assert self._dispatch is not None
        self._dispatch.begin(self.coordinator.worker_lost, worker)

    def _lose(self, worker: int, code: int) -> None:
        if not self.coordinator.means:
            super()._lose(worker, code)
            return
        self.dead.add(worker)  # the training is over: no replacement is needed
        self._worker_gone(worker)

    def is_over(self) -> bool:
        """True once every live worker has reported the final mean, or after twice the timeout without a report.

        A worker that has the mean stays for one timeout while another that took part is silent.
        """
        means = self.coordinator.means
        if len(means) != self._delivered:
            self._delivered, self._delivered_at = len(means), time.monotonic()
        if not means:
            return False
        here = set(means[min(means)].here)
        most_s = 2 * self.policy.liveness_timeout_s + self.settings.workers.count * self._like.bytes / _MIN_BYTES_PER_S
        return here <= means.keys() | self.coordinator.gone or time.monotonic() - self._delivered_at > most_s

    def look(self, addresses: Callable[[], list[str | None] | None]) -> Mean | None:
        """The mean of the present weights of all workers that answer; None where no worker does. ``addresses()`` gives the
        workers' addresses; it is called again while answers are awaited, so no dead worker is waited for.
        """
        if self._observer is None:
            program = PeerObserver(self.settings.workers.count, self._like, self.policy.liveness_timeout_s)
            self._observer = SocketDriver(
                program, connect=lambda _, address: Caller(address, self.job, self.keys, most_bytes=self.max_bytes)
            )
            self._observer.begin(program.start)
        observer = self._observer.program
        assert isinstance(observer, PeerObserver)
        driver, known = self._observer, list[str | None]()

        def is_ended() -> bool:
            nonlocal known
            if known != (found := addresses() or known):
                known = found
                driver.begin(observer.move, known)
            return not observer.busy

        try:
            driver.run_until(is_ended)  # an earlier call was interrupted
            driver.begin(observer.look)
            driver.run_until(is_ended)
        except HocketError:  # another process has the port of a dead worker
            return None
        return observer.looked

    def _figures(self) -> dict[str, Any]:
        """The workers' figures, as last reported to the coordinator."""
        coordinator = self.coordinator
        counts = {"lost": coordinator.lost, "lost_exchanges": coordinator.lost_exchanges}
        return {"workers": dict(coordinator.figures), "staleness": coordinator.staleness, "counts": counts}

    def epoch_ends(self, look: Callable[[], Mean | None], figures: dict[str, Any], epoch: int) -> dict[str, Any]:
        mean = look()
        if mean is None:
            return self.metrics.add(epoch, None, figures, figures["counts"])
        return self.close_epoch(epoch, [row.view(1, -1) for row in mean.rows], mean.buffers, figures, figures["counts"])
