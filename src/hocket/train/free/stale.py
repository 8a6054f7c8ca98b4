"""``stale(s)``: workers run freely until the first has used its ``s`` steps up; then all meet and take the weighted mean.

The others finish the step in hand. The mean travels as an all-reduce, ``2(N−1)`` steps in a ring, or over the servers, which are
the bottleneck there: ``max(M, N·M/n)`` bytes through a link of theirs, in and out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.cluster.message import framed, ring_bytes
from hocket.topology import Server
from hocket.train.free.scheme import Payload, Scheme

if TYPE_CHECKING:
    from hocket.train.free.training import FreeTraining


class Meeting(Scheme):
    """Steps since the last meeting, and who waits for the next."""

    def __init__(self, training: FreeTraining) -> None:
        super().__init__(training)
        self.most = training.strategy.sync.period
        self.since = [0] * self.crowd.rows
        self.waiting: dict[int, float] = {}
        self.called = False
        self.gone: set[int] = set()
        self.done = 0

    def computed(self, worker: int, now: float) -> None:
        self.crowd.step_alone(worker, self.training.rates(worker))
        self.done += 1
        self.since[worker] += 1
        self.called = self.called or self.since[worker] == self.most
        if not self.called:
            self.training.begin(worker, now)
            return
        self.waiting[worker] = now
        self._meet(now)

    def over(self, worker: int, now: float) -> None:
        """Nothing is left for it to do: it is there for the last meeting."""
        self.gone.add(worker)
        self.called = True
        self.waiting[worker] = now
        self._meet(now)

    def again(self, worker: int, now: float) -> None:
        """It takes part in the meeting that is called, and goes on after that."""

    def _meet(self, now: float) -> None:
        if len(self.waiting) < self.crowd.rows:
            return
        if not any(self.since):
            return
        for rows, mean in self._means():
            assert mean is not None
            rows.copy_(mean.expand_as(rows))
        moving = self._seconds()
        for worker, since in self.waiting.items():
            self.training.stood(worker, now + moving - since, now - since, 0.0)
        self.waiting, self.called, self.since = {}, False, [0] * self.crowd.rows
        for worker in range(self.crowd.rows):
            self.training.later(now + moving, "go", worker)

    def _means(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Each bucket's rows and their mean, weighted by steps since the last meeting (None: there were none)."""
        shares = torch.tensor(self.since, dtype=torch.float64)
        for rows in self.crowd.weights:
            weights = (shares / shares.sum()).to(rows.device, rows.dtype).unsqueeze(1)
            yield rows, (rows * weights).sum(0) if any(self.since) else None

    def _seconds(self) -> float:
        """How long the mean takes; its bytes are counted."""
        spec, workers, size = self.links.spec, self.crowd.rows, self.crowd.layout.bytes
        topology = self.training.strategy.topology
        if not isinstance(topology, Server):
            sent = sum(ring_bytes(b.size * b.dtype.itemsize, workers) for b in self.crowd.layout.buckets)
            for worker in range(workers):
                self.links.sent[worker] += sent
            return 2 * (workers - 1) * spec.latency_s + sent / spec.bandwidth
        for end in range(workers + topology.shards):
            self.links.sent[end] += framed(size) if end < workers else framed(workers * size // topology.shards)
        return 2 * spec.latency_s + max(framed(size), framed(workers * size // topology.shards)) / spec.bandwidth

    def arrived(self, kind: str, worker: int, end: int, payload: Payload, now: float) -> None:
        self.training.begin(worker, now)

    def counted(self) -> int:
        return self.done

    def truth(self) -> list[Tensor]:
        return [rows[:1].clone() if mean is None else mean.unsqueeze(0) for rows, mean in self._means()]

    def state_dict(self) -> dict[str, Any]:
        return {
            "since": list(self.since),
            "waiting": dict(self.waiting),
            "called": self.called,
            "gone": sorted(self.gone),
            "done": self.done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.since, self.waiting = list(state["since"]), dict(state["waiting"])
        self.called, self.gone, self.done = state["called"], set(state["gone"]), state["done"]
