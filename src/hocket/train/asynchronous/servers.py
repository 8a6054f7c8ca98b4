"""Virtual workers that push to servers and fetch from them, or meet at servers to average: the programs of real processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.spec import ClusterSpec
from hocket.data.batches import BatchSequence
from hocket.programs.base import Effects
from hocket.programs.server.membership import GRACE
from hocket.programs.server.optimizer_spec import shard_optimizer
from hocket.programs.server.requests import WorkerConfig
from hocket.programs.server.shard_server import ShardServer
from hocket.programs.server.worker import ServerWorker
from hocket.train.asynchronous.protocol import AsyncProtocol
from hocket.train.asynchronous.replicas import AsyncReplicas


class ServerProtocol(AsyncProtocol):
    """Shards on links of their own where servers are named, unless the cluster has them on workers' machines; without servers every
    worker's machine hosts one."""

    def __init__(self, replicas: AsyncReplicas, spec: ClusterSpec, seed: int, batches: BatchSequence) -> None:
        strategy, workers = replicas.strategy, replicas.rows
        self.strategy, self.sync = strategy, strategy.sync
        shards = strategy.topology.num_shards(workers)
        own_links = strategy.topology.has_servers and not spec.servers_on_workers
        super().__init__(replicas, spec, batches, workers + shards * own_links)
        self.simulation.timers = (GRACE,)
        self.optimizer = shard_optimizer(strategy, replicas.optimizer)
        self.servers = [ShardServer(s) for s in range(shards)]
        options: dict[str, Any] = {"give_up_s": float("inf"), "total": len(batches), "per_epoch": batches.per_epoch}
        configs = [WorkerConfig(strategy, replicas.layout, w, workers, seed, **options) for w in range(workers)]
        self.workers = [ServerWorker(config) for config in configs]
        self.network.ends = self.ends(workers)
        self.network.ends |= {("shard", s): workers + s if own_links else s % workers for s in range(shards)}
        for s, server in enumerate(self.servers):
            self.simulation.add(("shard", s), server, b"s" + s.to_bytes(4, "big"), {})
        routes = {s: ("shard", s) for s in range(shards)}
        for w, worker in enumerate(self.workers):
            self.simulation.add(("worker", w), worker, b"w" + w.to_bytes(4, "big"), routes)

    def start(self) -> None:
        self.network.free = True
        for s, server in enumerate(self.servers):
            self.simulation.carry_out(("shard", s), server.start(0.0))
        for w in range(len(self.workers)):
            self.carry_out(w, self.rejoin(w))
            while self.simulation.step():
                pass
        self.network.free = False
        for worker in self.workers:
            worker.account.begin(0.0)

    def next_batch(self, worker: int) -> tuple[int | None, Effects]:
        own = self.workers[worker]
        if self.sync.static_partition:
            number = own.step * len(self.workers) + worker
            return (number if number < len(self.batches) else None), []
        ready, dispatcher = own.next_batch(), self.servers[0].dispatcher
        assert dispatcher is not None
        if own.over and not dispatcher.empty:
            own.over = False  # the training was made longer after this worker was told so
        wait = ready is None and own.may_get_batch
        return ready, own.take_batch(self.simulation.now) if wait else []

    def before_update(self, worker: int, weight: float) -> Effects:
        together = self.sync.max_staleness == 0
        gradients = [] if self.sync.averages_weights else self.replicas.gradient_of(worker, weight if together else 1.0)
        return self.workers[worker].before_update(gradients, self.simulation.now)

    def beside_s(self, worker: int, share: float) -> float:
        spec, values = self.spec, self.values
        action, compression = self.sync.server_action(self.workers[worker].step + 1), self.strategy.compression
        coding_s = spec.coding_s(compression.methods, values) if compression.compresses else 0.0
        pushing_s = (coding_s + spec.coding_s(["server"], values) + spec.exchange_s) if action.push else 0.0
        return spec.load_s * share + pushing_s + (spec.update_s * values if action.local else 0.0)

    def steps_locally(self, worker: int) -> bool:
        return self.workers[worker].steps_locally

    def after_update(self, worker: int, lrs: Sequence[float]) -> Effects:
        return self.workers[worker].after_update(lrs, self.replicas.buffers_of(worker), self.simulation.now)

    def end(self, worker: int) -> Effects:
        return self.workers[worker].flush(self.simulation.now)

    def leave(self, worker: int) -> Effects:
        return self.workers[worker].leave(self.simulation.now)

    def rejoin(self, worker: int) -> Effects:
        return self.workers[worker].join(self.replicas.rows_of(worker), self.optimizer, self.simulation.now)

    @property
    def progress(self) -> int:
        return min(server.progress for server in self.servers)

    def global_weights(self, epoch: int) -> tuple[list[Tensor], Tensor | None]:
        rows = [torch.empty_like(g[:1]) for g in self.replicas.grads]
        buffers = None
        for s, server in enumerate(self.servers):
            found = server.epochs.show(epoch) or server.snapshot()
            buffers = found.buffers if s == 0 else buffers
            for b, part in enumerate(found.weights):
                self.workers[0].slices.put(b, s, part, rows[b][0])
        return rows, buffers

    def staleness(self) -> dict[int, int] | None:
        first = self.servers[0].shard
        return None if self.sync.averages_weights or first is None else dict(first.staleness)

    def state_dict(self) -> dict[str, Any]:
        return {"servers": [s.state_dict() for s in self.servers], "workers": [w.state_dict() for w in self.workers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for server, saved in zip(self.servers, state["servers"], strict=True):
            server.load_state_dict(saved)
        for w, (worker, saved) in enumerate(zip(self.workers, state["workers"], strict=True)):
            worker.attach(self.replicas.rows_of(w), self.optimizer)
            worker.load_state_dict(saved)
        for server in self.servers:
            server.extend(len(self.batches))
