"""A training of virtual workers that do not go in step: events in the order of a virtual clock.

Each worker computes at its own speed; what it sends arrives when the links have carried it; a scheme says what happens then. Events
at the same moment keep the order in which they were made, so the same seed gives the same run, bit for bit. An epoch ends when as
many mini-batches as it has have had their effect, whoever computed them.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.base import Cluster
from hocket.cluster.ledger import Entry
from hocket.cluster.spec import PRESETS, ClusterSpec
from hocket.data.base import DataSet
from hocket.data.batches import BatchSequence, MiniBatch
from hocket.data.partition import Partition
from hocket.errors import HocketError
from hocket.strategy import Strategy
from hocket.sync import Stale
from hocket.topology import Gossip, Server
from hocket.train.flops import step_flops
from hocket.train.free.crowd import Crowd
from hocket.train.free.links import Links
from hocket.train.free.pairs import Pairs
from hocket.train.free.pushsum import PushSum
from hocket.train.free.scheme import Payload, Scheme
from hocket.train.free.servers import ServerScheme
from hocket.train.free.stale import Meeting
from hocket.train.ledger_view import LedgerView
from hocket.train.loop import Progress, TrainingPlan, accuracy_of
from hocket.train.lr_schedule import factor
from hocket.train.replicas import Loss
from hocket.train.watch import check_weights

DEFAULT_CLUSTER = "1gbit"
"""Where workers that do not go in step are thought to run unless a cluster is described: without a clock they have no order."""


def scheme_of(strategy: Strategy) -> type[Scheme]:
    """What runs a strategy whose workers do not go in step."""
    if isinstance(strategy.sync, Stale):
        return Meeting
    if isinstance(strategy.topology, Gossip):
        return PushSum if strategy.topology.kind == "pushsum" else Pairs
    return ServerScheme


class FreeTraining:
    """The counterpart of :class:`hocket.train.loop.Training`."""

    def __init__(self, replicas: Crowd, cluster: Cluster, data: DataSet, loss: Loss, plan: TrainingPlan) -> None:
        self.replicas, self.cluster, self.data, self.loss, self.plan = replicas, cluster, data, loss, plan
        self.strategy = replicas.strategy
        self.metrics: list[dict[str, Any]] = []
        self.epoch = 0
        samples, size = len(data.train[0]), cluster.size
        partition = Partition(samples, size, plan.batch_size, plan.seed, plan.rounds)
        if not len(partition):
            raise HocketError(f"{samples} samples give no round for {size} workers; use fewer workers or more data.")
        total = len(partition) * plan.epochs
        self.steps = total if plan.max_steps is None else min(total, plan.max_steps)
        self.sequence = BatchSequence(partition, self.steps)
        self._factor = factor(plan.lr_schedule, self.steps, round(plan.warmup_epochs * len(partition)))
        self._base = [float(g["lr"]) for g in replicas.optimizer.param_groups]
        self._train = tuple(t.to(cluster.device) for t in data.train)
        self._test = tuple(t.to(cluster.device) for t in data.test)
        clock = cluster.clock
        self.spec: ClusterSpec = PRESETS[DEFAULT_CLUSTER] if clock is None else clock.spec
        flops = 0.0
        if self.spec.step_s is None:
            x, y = (t[:2] for t in data.train)
            flops = step_flops(replicas.model, loss, data.prepare(x), y, plan.batch_size)
        self.step_s = self.spec.seconds(flops)
        if clock is not None:
            clock.step_s = self.step_s
        self._slow = self.spec.factors(size).tolist()
        self._disturbed: dict[int, list[float]] = {}
        servers = self.strategy.topology.shards if isinstance(self.strategy.topology, Server) else 0
        self.links = Links(self.spec, size + servers)
        self._queue: list[tuple[float, int, str, int, int, Payload]] = []
        self._order = 0
        self._next = 0
        self._begun = [0] * size
        self._numbers = [-1] * size
        self._computing: list[float | None] = [None] * size
        self._over: set[int] = set()
        """Who found no further mini-batch."""
        self._spent = torch.zeros(3, size, dtype=torch.float64)  # compute, wait, hidden transfer of each worker in this epoch
        self._now = self._epoch_begun = 0.0
        self._losses: list[Tensor] = []
        self._sent = self._exchanges = 0
        self.ledger = LedgerView(cluster)
        self.scheme = scheme_of(self.strategy)(self)
        self.scheme.start()

    @property
    def step(self) -> int:
        """Rounds' worth of mini-batches that have had their effect."""
        return self.scheme.counted() // self.cluster.size

    # --- for schemes ---------------------------------------------------------------------------------------------------------

    def begin(self, worker: int, now: float) -> bool:
        """A worker takes its next mini-batch and computes; it stops where there is none (False)."""
        number = self.sequence.own(worker, self._begun[worker]) if self.strategy.sync.static_partition else self._next
        if number >= len(self.sequence):
            self._over.add(worker)
            self.scheme.over(worker, now)
            return False
        self._over.discard(worker)
        self._next += 1
        self._numbers[worker] = number
        minibatch = self.sequence.minibatch(number)
        self.replicas.begin(worker, minibatch)
        share = len(minibatch.indices) / self.plan.batch_size
        seconds = self.step_s * share * self._slow[worker] * self._disturbance(worker, self._begun[worker])
        self._begun[worker] += 1
        self._computing[worker] = now
        self._put(now + seconds, "computed", worker, 0, None)
        return True

    def minibatch(self, worker: int) -> MiniBatch:
        """The mini-batch that a worker took last."""
        return self.sequence.minibatch(self._numbers[worker])

    def rates(self, worker: int) -> list[float]:
        """The rates of the optimiser's groups at the mini-batch that a worker took last."""
        at = self._factor(self.minibatch(worker).step)
        return [rate * at for rate in self._base]

    def send(
        self, kind: str, worker: int, end: int, target: int, size: int, payload: Payload, now: float, source: int | None = None
    ) -> None:
        """Send ``size`` bytes from ``source`` (the worker unless told) to ``target``; the scheme hears when they have arrived."""
        self._put(self.links.send(now, worker if source is None else source, target, size), kind, worker, end, payload)

    def later(self, when: float, kind: str, worker: int, payload: Payload = None) -> None:
        """The scheme hears of this at a later moment."""
        self._put(when, kind, worker, 0, payload)

    def stood(self, worker: int, exposed: float, wait: float, hidden: float) -> None:
        """A worker stood still for ``exposed`` seconds, of which it waited ``wait`` for others; ``hidden`` moved meanwhile."""
        self._spent[1, worker] += wait
        self._spent[2, worker] += hidden
        self._exchanges += 1

    def settle(self, worker: int) -> None:
        """A worker's weights are about to change: its gradient, if it is computing one, belongs to those it has now."""
        self.replicas.settle(worker, self.data, self._train, self.sequence, self.plan.seed, self.plan.augment)

    # --- time ----------------------------------------------------------------------------------------------------------------

    def run(self, watch: Callable[[Progress], None] = lambda _: None) -> Iterator[dict[str, Any]]:
        """Train on; yields each epoch's metrics as it ends."""
        while self.epoch < self.plan.epochs and self.scheme.counted() < len(self.sequence):
            yield self._run_epoch(watch)

    def _run_epoch(self, watch: Callable[[Progress], None]) -> dict[str, Any]:
        begun, seen = time.perf_counter(), self.step
        enough = min((self.epoch + 1) * self.sequence.per_epoch, len(self.sequence))
        while self.scheme.counted() < enough:
            if not self._queue:
                raise RuntimeError("No worker has anything left to do before the end of the training: please report this.")
            self._turn(heapq.heappop(self._queue))
            if self.step > seen:
                seen = self.step
                watch(Progress(self.epoch, self.plan.epochs, self.step, self.steps))
        entry = self._close()
        self.epoch += 1
        check_weights(self.replicas.layout, self.scheme.truth(), self.epoch)
        # Of as many mini-batches as the epoch has, in the order they were computed; where links are slow, some were long before.
        own = enough - (self.epoch - 1) * self.sequence.per_epoch
        mean_loss = math.fsum(torch.stack(self._losses[:own]).tolist()) / own
        self._losses = self._losses[own:]
        wall = time.perf_counter() - begun
        over = self.scheme.counted() >= len(self.sequence)
        accuracy = self._evaluate() if self.plan.evaluate or over else None
        metrics = {"epoch": self.epoch, "accuracy": accuracy, "loss": mean_loss, **vars(entry), "wall_s": wall}
        if (ages := self.scheme.ages()) is not None:
            metrics["staleness"] = {str(age): count for age, count in sorted(ages.items())}
        self.metrics.append(metrics)
        return metrics

    def _turn(self, event: tuple[float, int, str, int, int, Payload]) -> None:
        self._now, _, kind, worker, end, payload = event
        if kind != "computed":
            self.scheme.arrived(kind, worker, end, payload, self._now)
            return
        self.settle(worker)
        self._spent[0, worker] += self._now - self._started(worker)
        self._computing[worker] = None
        self._losses.append(self.replicas.losses[worker].clone())
        self.scheme.computed(worker, self._now)

    def _started(self, worker: int) -> float:
        started = self._computing[worker]
        assert started is not None
        return max(started, self._epoch_begun)

    def _put(self, when: float, kind: str, worker: int, end: int, payload: Payload) -> None:
        heapq.heappush(self._queue, (when, self._order, kind, worker, end, payload))
        self._order += 1

    def _disturbance(self, worker: int, step: int) -> float:
        if step not in self._disturbed:
            if len(self._disturbed) > 1000:
                self._disturbed.clear()
            self._disturbed[step] = self.spec.disturbance(self.cluster.size, step, self.plan.seed).tolist()
        return self._disturbed[step][worker]

    def _close(self) -> Entry:
        """The epoch's figures: what is neither computing nor waiting is transfer, so that they add up."""
        seconds = self._now - self._epoch_begun
        for worker in range(self.cluster.size):  # who is computing now has done part of it in this epoch
            if self._computing[worker] is not None:
                self._spent[0, worker] += self._now - self._started(worker)
        compute, wait, hidden = self._spent.mean(1).tolist()
        wait = min(wait, max(seconds - compute, 0.0))
        sent = sum(self.links.sent)
        entry = Entry(
            seconds=seconds,
            compute_s=compute,
            wait_s=wait,
            transfer_s=max(seconds - compute - wait, 0.0),
            transfer_hidden_s=hidden,
            bytes_sent=sent - self._sent,
            exchanges=self._exchanges,
            nonfinite=self.cluster.ledger.nonfinite,
        )
        self.cluster.ledger.nonfinite = 0
        self.cluster.ledger.entries.append(entry)
        self._sent, self._exchanges, self._epoch_begun = sent, 0, self._now
        self._spent.zero_()
        return entry

    # --- evaluation ----------------------------------------------------------------------------------------------------------

    def averaged(self) -> Any:
        """Context manager with the model to evaluate: the servers' truth, or the mean of all workers."""
        return self.replicas.swapped_weights(self.scheme.truth())

    def _evaluate(self) -> float | None:
        with self.averaged() as model:
            right, seen = accuracy_of(model, (self._test[0], self._test[1]), self.data)
        return right / seen if seen else None

    # --- state ---------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume from, after an epoch: what is on its way included."""
        for worker in range(self.cluster.size):
            self.settle(worker)
        return {
            "epoch": self.epoch,
            "step": self.step,
            "metrics": list(self.metrics),
            "replicas": self.replicas.state_dict(),
            "scheme": self.scheme.state_dict(),
            "links": self.links.state_dict(),
            "queue": [list(event) for event in sorted(self._queue, key=lambda e: e[:2])],
            "counters": [self._order, self._next, self._sent, self._exchanges],
            "begun": list(self._begun),
            "numbers": list(self._numbers),
            "computing": list(self._computing),
            "over": sorted(self._over),
            "times": [self._now, self._epoch_begun],
            "spent": self._spent.clone(),
            "losses": list(self._losses),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume; the training goes on as if it had never stopped, also one that was over and has been made longer."""
        self.epoch, self.metrics = state["epoch"], list(state["metrics"])
        self.replicas.load_state_dict(state["replicas"])
        self.scheme.load_state_dict(state["scheme"])
        self.links.load_state_dict(state["links"])
        self._queue = [(float(e[0]), int(e[1]), str(e[2]), int(e[3]), int(e[4]), e[5]) for e in state["queue"]]
        self._order, self._next, self._sent, self._exchanges = state["counters"]
        self._begun, self._numbers, self._computing = list(state["begun"]), list(state["numbers"]), list(state["computing"])
        self._now, self._epoch_begun = state["times"]
        self._spent, self._losses = state["spent"], list(state["losses"])
        self._over = set(state["over"])
        if self.scheme.counted() < len(self.sequence):
            for worker in sorted(self._over):
                self.scheme.again(worker, self._now)
