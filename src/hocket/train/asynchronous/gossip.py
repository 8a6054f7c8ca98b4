"""Virtual workers that average among themselves, in pairs or by push-sum: the programs of real processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.spec import ClusterSpec
from hocket.data.batches import BatchSequence
from hocket.programs.base import Effects
from hocket.programs.gossip.links import PeerConfig
from hocket.programs.gossip.peer import GossipPeer
from hocket.train.asynchronous.protocol import AsyncProtocol
from hocket.train.asynchronous.replicas import AsyncReplicas


class GossipProtocol(AsyncProtocol):
    """Every worker on a link of its own; a free worker takes the next mini-batch."""

    def __init__(self, replicas: AsyncReplicas, spec: ClusterSpec, seed: int, batches: BatchSequence) -> None:
        workers = replicas.rows
        super().__init__(replicas, spec, batches, workers)
        kind = replicas.strategy.topology.partner_rule
        self.workers = [GossipPeer(PeerConfig(w, workers, kind, seed, greets=False)) for w in range(workers)]
        self.network.ends = self.ends(workers)
        for w, worker in enumerate(self.workers):
            routes = {other: ("worker", other) for other in range(workers) if other != w}
            self.simulation.add(("worker", w), worker, w.to_bytes(4, "big"), routes)
        self.following = self.done = 0
        """The next mini-batch, and how many have had their effect."""

    def start(self) -> None:
        for w, worker in enumerate(self.workers):
            self.carry_out(w, worker.start(self.replicas.rows_of(w), 0.0, self.replicas.buffers_of(w)))

    def next_batch(self, worker: int) -> tuple[int | None, Effects]:
        if self.following >= len(self.batches):
            return None, []
        self.following += 1
        return self.following - 1, []

    def before_update(self, worker: int, weight: float) -> Effects:
        return self.workers[worker].before_update(self.simulation.now)

    def after_update(self, worker: int, lrs: Sequence[float]) -> Effects:
        self.done += 1
        return self.workers[worker].after_update(self.replicas.buffers_of(worker), self.simulation.now)

    @property
    def progress(self) -> int:
        return self.done

    def global_weights(self, epoch: int) -> tuple[list[Tensor], Tensor | None]:
        states = [worker.state for worker in self.workers]
        weight = sum(state.push_sum_weight for state in states)
        rows = []
        for bucket in zip(*(state.x for state in states), strict=True):
            total = torch.stack(bucket).sum(0) if len(bucket) > 1 else bucket[0]
            rows.append((total / weight if weight != 1.0 else total).view(1, -1))
        return rows, None

    def staleness(self) -> dict[int, int] | None:
        return dict(sum((Counter(worker.account.staleness) for worker in self.workers), Counter[int]()))

    def state_dict(self) -> dict[str, Any]:
        return {"workers": [w.state_dict() for w in self.workers], "counters": [self.following, self.done]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for w, (worker, saved) in enumerate(zip(self.workers, state["workers"], strict=True)):
            worker.rows = self.replicas.rows_of(w)
            worker.load_state_dict(saved)
        self.following, self.done = state["counters"]
