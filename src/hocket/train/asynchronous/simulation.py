"""A training of virtual workers that do not step together, on a virtual clock.

Each worker computes at its own speed; what it sends arrives when the links have carried it; the programs of real processes decide
the rest. The same seed gives the same run, bit for bit. An epoch ends when as many mini-batches as it has have had their effect,
whoever computed them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.ledger import Entry
from hocket.cluster.spec import PRESETS, ClusterSpec
from hocket.data.base import DataSet
from hocket.data.batches import BatchSequence, MiniBatch
from hocket.data.partition import Partition
from hocket.drivers.simulation import Alarm, Call, Delivery, Key
from hocket.errors import HocketError
from hocket.programs.base import Effects, from_plain, to_plain
from hocket.train.asynchronous.protocol import AsyncProtocol, Setup
from hocket.train.asynchronous.replicas import AsyncReplicas
from hocket.train.flops import step_flops
from hocket.train.ledger_view import ClusterLedger
from hocket.train.loop import Progress, TrainingPlan, accuracy_of
from hocket.train.lr_schedule import factor
from hocket.train.replicas import Loss
from hocket.train.watch import check_weights

DEFAULT_CLUSTER = "1gbit"
"""Where asynchronous virtual workers are thought to run unless a cluster is described: without a clock they have no order."""
_COMPUTED = "computed"
BATCH, COMPUTING, BEFORE, AFTER, ENDING, LEFT = "batch", "computing", "before", "after", "ending", "left"
"""Where a worker stands in its step."""


def protocol_of(setup: Setup) -> AsyncProtocol:
    """The programs that a strategy needs."""
    from hocket.train.asynchronous.gossip import GossipProtocol
    from hocket.train.asynchronous.servers import ServerProtocol

    runtime = setup.replicas.strategy.runtime
    return {"server": ServerProtocol, "peers": GossipProtocol}[runtime](setup)


class AsyncSimulation:
    """The counterpart of :class:`hocket.train.loop.Training`."""

    def __init__(self, replicas: AsyncReplicas, cluster: Cluster, data: DataSet, loss: Loss, plan: TrainingPlan) -> None:
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
        self.batches = BatchSequence(partition, self.steps)
        self._factor = factor(plan.lr_schedule, self.steps, round(plan.warmup_epochs * len(partition)))
        self._base_lrs = [float(g["lr"]) for g in replicas.optimizer.param_groups]
        self._train = tuple(t.to(cluster.device) for t in data.train)
        self._test = tuple(t.to(cluster.device) for t in data.test)
        self.spec: ClusterSpec = PRESETS[DEFAULT_CLUSTER] if cluster.clock is None else cluster.clock.spec
        self.step_s = _step_seconds(self.spec, replicas.model, loss, data, plan.batch_size)
        if cluster.clock is not None:
            cluster.clock.step_s = self.step_s
        self._slowdown = self.spec.factors(size).tolist()
        self._disturbances = _Disturbances(self.spec, size, plan.seed)
        self.phases = [BATCH] * size
        self._begun = [0] * size  # mini-batches that each worker has begun
        self._numbers = [-1] * size
        self._computing: list[float | None] = [None] * size
        self._compute_s = [0.0] * size  # in this epoch
        self._epoch_begun = 0.0
        self._losses: list[Tensor] = []
        self._before: dict[str, Any] = {"wait": 0.0, "hidden": 0.0, "sent": 0, "exchanges": 0, "staleness": {}}
        self.ledger = ClusterLedger(cluster)
        self.protocol = protocol_of(Setup(replicas, self.spec, plan.seed, len(self.batches), self.batches.per_epoch))
        self.simulation = self.protocol.simulation
        self.simulation.on_call = self._computed
        self.protocol.start()
        self.simulation.on_idle = self._idle
        for worker in range(size):
            self._advance(worker)

    @property
    def step(self) -> int:
        """Rounds' worth of mini-batches that have had their effect."""
        return self.protocol.progress // self.cluster.size

    # --- a worker's step -----------------------------------------------------------------------------------------------------

    def _idle(self, key: Key) -> None:
        if isinstance(key, tuple) and key[0] == "worker":
            self._advance(key[1])

    def _advance(self, worker: int) -> None:
        """Go on with a worker as far as its program lets it."""
        program, protocol = self.protocol.program(worker), self.protocol
        while not program.busy:
            phase = self.phases[worker]
            if phase == BATCH:
                number, effects = protocol.next_batch(worker)
                if number is not None:
                    self._begin(worker, number)
                elif effects or program.busy:
                    self._do(worker, effects)
                    if not program.busy:
                        continue
                else:
                    self.phases[worker] = ENDING
                    self._do(worker, protocol.end(worker))
            elif phase == BEFORE:
                lrs = self.lrs(worker)
                if protocol.steps_locally(worker):
                    self.replicas.local_step(worker, lrs)
                self.phases[worker] = AFTER
                self._do(worker, protocol.after_update(worker, lrs))
            elif phase == AFTER:
                self.phases[worker] = BATCH
            elif phase == ENDING:
                self.phases[worker] = LEFT
                self._do(worker, protocol.leave(worker))
            else:
                return

    def _do(self, worker: int, effects: Effects) -> None:
        self.simulation.carry_out(("worker", worker), effects)

    def _begin(self, worker: int, number: int) -> None:
        """A worker computes the gradient of mini-batch ``number``."""
        now, batch = self.simulation.now, self.batches.minibatch(number)
        self._numbers[worker], self.phases[worker] = number, COMPUTING
        self.replicas.begin(worker, batch)
        share = len(batch.indices) / self.plan.batch_size
        seconds = self.step_s * share * self._slowdown[worker] * self._disturbances.of(worker, self._begun[worker])
        self._begun[worker] += 1
        self._computing[worker] = now
        self.simulation.put(now + seconds, Call(_COMPUTED, worker))

    def _computed(self, call: Call) -> None:
        """A worker's gradient is there."""
        worker = call.node
        assert isinstance(worker, int)
        begun = self._computing[worker]
        assert begun is not None
        self._compute_s[worker] += self.simulation.now - max(begun, self._epoch_begun)
        self._computing[worker] = None
        self.compute(worker)
        self._losses.append(self.replicas.losses[worker].clone())
        self.phases[worker] = BEFORE
        self._do(worker, self.protocol.before_update(worker, self.batch(worker).weight))
        self._advance(worker)

    def compute(self, worker: int) -> None:
        """Compute a worker's gradient, along with those of all others that are pending."""
        self.replicas.compute(worker, self.data, self._train, self.batches, self.plan.seed, self.plan.augment)

    def batch(self, worker: int) -> MiniBatch:
        """The mini-batch that a worker took last."""
        return self.batches.minibatch(self._numbers[worker])

    def lrs(self, worker: int) -> list[float]:
        """The learning rates of the optimiser's groups at the mini-batch that a worker took last."""
        at = self._factor(self.batch(worker).step)
        return [lr * at for lr in self._base_lrs]

    # --- epochs --------------------------------------------------------------------------------------------------------------

    def run(self, watch: Callable[[Progress], None] = lambda _: None) -> Iterator[dict[str, Any]]:
        """Train on; yields each epoch's metrics as it ends."""
        while self.epoch < self.plan.epochs and self.epoch * self.batches.per_epoch < len(self.batches):
            yield self._run_epoch(watch)

    def _run_epoch(self, watch: Callable[[Progress], None]) -> dict[str, Any]:
        begun, seen = time.perf_counter(), self.step
        enough = min((self.epoch + 1) * self.batches.per_epoch, len(self.batches))
        while self.protocol.progress < enough:
            if not self.simulation.step():
                raise RuntimeError("No worker has anything left to do before the end of the training: please report this.")
            if self.step > seen:
                seen = self.step
                watch(Progress(self.epoch, self.plan.epochs, self.step, self.steps))
        entry = self._close()
        self.epoch += 1
        weights, buffers = self.protocol.global_weights(self.epoch)
        check_weights(self.replicas.layout, weights, self.epoch)
        # Of as many mini-batches as the epoch has, in the order they were computed; where links are slow, some were long before.
        own = enough - (self.epoch - 1) * self.batches.per_epoch
        mean_loss = math.fsum(torch.stack(self._losses[:own]).tolist()) / own
        self._losses = self._losses[own:]
        wall = time.perf_counter() - begun
        over = enough == len(self.batches)
        accuracy = self._evaluate(weights, buffers) if self.plan.evaluate or over else None
        metrics = {"epoch": self.epoch, "accuracy": accuracy, "loss": mean_loss, **vars(entry), "wall_s": wall}
        if (staleness := self.protocol.staleness()) is not None:
            before = self._before["staleness"]
            fresh = {str(age): count - before.get(age, 0) for age, count in sorted(staleness.items())}
            metrics["staleness"] = {age: count for age, count in fresh.items() if count}
            self._before["staleness"] = staleness
        self.metrics.append(metrics)
        return metrics

    def _close(self) -> Entry:
        """The epoch's figures: what is neither computing nor waiting is transfer, so that they add up."""
        now, workers = self.simulation.now, self.cluster.size
        seconds = now - self._epoch_begun
        for worker, begun in enumerate(self._computing):  # a worker that is computing has done part of it in this epoch
            if begun is not None:
                self._compute_s[worker] += now - max(begun, self._epoch_begun)
        accounts, before = [self.protocol.account(w) for w in range(workers)], self._before
        totals = {
            "wait": sum(a.wait_s for a in accounts),
            "hidden": sum(a.hidden_s for a in accounts),
            "sent": sum(a.bytes_sent for a in accounts),
            "exchanges": sum(a.exchanges for a in accounts),
        }
        fresh = {name: total - before[name] for name, total in totals.items()}
        compute = sum(self._compute_s) / workers
        wait = min(fresh["wait"] / workers, max(seconds - compute, 0.0))
        entry = Entry(
            seconds=seconds,
            compute_s=compute,
            wait_s=wait,
            transfer_s=max(seconds - compute - wait, 0.0),
            transfer_hidden_s=fresh["hidden"] / workers,
            bytes_sent=int(fresh["sent"]),
            exchanges=int(fresh["exchanges"]),
            nonfinite=self.cluster.ledger.nonfinite,
        )
        self.cluster.ledger.nonfinite = 0
        self.cluster.ledger.entries.append(entry)
        self._before = {**before, **totals}
        self._epoch_begun, self._compute_s = now, [0.0] * workers
        return entry

    # --- evaluation ----------------------------------------------------------------------------------------------------------

    def averaged(self) -> Any:
        """Context manager with the model to evaluate: the servers' weights, or the mean of all workers."""
        return self.replicas.with_weights(*self.protocol.global_weights(self.epoch))

    def _evaluate(self, weights: list[Tensor], buffers: Tensor | None) -> float | None:
        with self.replicas.with_weights(weights, buffers) as model:
            right, seen = accuracy_of(model, (self._test[0], self._test[1]), self.data)
        return right / seen if seen else None

    # --- state ---------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume from, after an epoch: messages under way included."""
        for worker in range(self.cluster.size):
            self.compute(worker)
        return {
            "epoch": self.epoch,
            "step": self.step,
            "batches": len(self.batches),
            "metrics": list(self.metrics),
            "replicas": self.replicas.state_dict(),
            "protocol": self.protocol.state_dict(),
            "links": self.protocol.links.state_dict(),
            "queue": [[when, number, _plain_event(event)] for when, number, event in sorted(self.simulation.queue, key=_order)],
            "clock": [self.simulation.now, self.simulation.order, self._epoch_begun],
            "phases": list(self.phases),
            "begun": list(self._begun),
            "numbers": list(self._numbers),
            "computing": list(self._computing),
            "compute_s": list(self._compute_s),
            "losses": list(self._losses),
            "before": dict(self._before),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume; the training goes on as if it had never stopped, also one that was over and has been made longer."""
        self.epoch, self.metrics = state["epoch"], list(state["metrics"])
        self.replicas.load_state_dict(state["replicas"])
        self.simulation.now, self.simulation.order, self._epoch_begun = state["clock"]
        self.protocol.load_state_dict(state["protocol"])
        self.protocol.links.load_state_dict(state["links"])
        self.simulation.queue = [(float(when), int(number), _event(plain)) for when, number, plain in state["queue"]]
        self.phases, self._begun, self._numbers = list(state["phases"]), list(state["begun"]), list(state["numbers"])
        self._computing, self._compute_s = list(state["computing"]), list(state["compute_s"])
        self._losses, self._before = list(state["losses"]), dict(state["before"])
        if len(self.batches) <= state["batches"]:
            return
        for worker, phase in enumerate(self.phases):  # the training was made longer: those who had ended go on
            if phase in (ENDING, LEFT):
                self.phases[worker] = BATCH
            if phase == LEFT:
                self._do(worker, self.protocol.rejoin(worker))
                self._advance(worker)


class _Disturbances:
    """How many times as long each worker takes for a step; drawn once for all workers."""

    def __init__(self, spec: ClusterSpec, workers: int, seed: int) -> None:
        self._spec, self._workers, self._seed = spec, workers, seed
        self._drawn: dict[int, list[float]] = {}

    def of(self, worker: int, step: int) -> float:
        if step not in self._drawn:
            if len(self._drawn) > 1000:
                self._drawn.clear()
            self._drawn[step] = self._spec.disturbance(self._workers, step, self._seed).tolist()
        return self._drawn[step][worker]


def _step_seconds(spec: ClusterSpec, model: nn.Module, loss: Loss, data: DataSet, batch_size: int) -> float:
    """How long a worker of ordinary speed computes the gradient of a mini-batch."""
    flops = 0.0
    if spec.step_s is None:
        x, y = (t[:2] for t in data.train)
        flops = step_flops(model, loss, data.prepare(x), y, batch_size)
    return spec.seconds(flops)


def _order(entry: tuple[float, int, Any]) -> tuple[float, int]:
    return entry[:2]


def _plain_event(event: Delivery | Alarm | Call) -> list[Any]:
    if isinstance(event, Call):
        return ["call", event.name, event.node]
    assert isinstance(event, Delivery), "on a network that loses nothing no timer runs"
    sender = event.sender.hex() if isinstance(event.sender, bytes) else event.sender
    ends = [list(event.source), event.source_identity.hex(), list(event.target), event.target_identity.hex()]
    return ["delivery", *ends, sender, to_plain(event.message)]


def _event(plain: list[Any]) -> Delivery | Call:
    if plain[0] == "call":
        return Call(plain[1], plain[2])
    _, source, source_identity, target, target_identity, sender, message = plain
    envelope = from_plain(message)
    assert envelope is not None
    peer = bytes.fromhex(sender) if isinstance(sender, str) else sender
    return Delivery(tuple(source), bytes.fromhex(source_identity), tuple(target), bytes.fromhex(target_identity), peer, envelope)
