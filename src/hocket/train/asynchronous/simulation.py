"""A training of virtual workers that do not step together, on a virtual clock.

Each worker computes at its own speed; what it sends arrives when the links have carried it; the programs of real processes decide
the rest. The same seed gives the same run, bit for bit. An epoch ends when as many mini-batches as it has have had their effect,
whoever computed them.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.ledger import Entry
from hocket.cluster.spec import ClusterSpec
from hocket.data.base import DataSet
from hocket.data.batches import MiniBatch
from hocket.drivers.simulation import Alarm, Call, Delivery, Key
from hocket.programs.account import steps_of
from hocket.programs.base import from_plain, to_plain
from hocket.train.asynchronous.cores import SharedCores
from hocket.train.asynchronous.gossip import GossipProtocol
from hocket.train.asynchronous.replicas import AsyncReplicas
from hocket.train.asynchronous.servers import ServerProtocol
from hocket.train.evaluate import Metric
from hocket.train.loop import EpochLoop, TrainingPlan, Watch
from hocket.train.replicas import Loss
from hocket.train.watch import check_weights

DEFAULT_CLUSTER = "1gbit"
"""The cluster of asynchronous virtual workers if none is described: without a clock their steps have no order."""
_COMPUTED = "computed"
BATCH, COMPUTING, BEFORE, AFTER, ENDING, LEFT = "batch", "computing", "before", "after", "ending", "left"
"""Where a worker stands in its step."""


PROTOCOLS: dict[str, type[ServerProtocol | GossipProtocol]] = {"server": ServerProtocol, "peers": GossipProtocol}
"""By a strategy's runtime: the programs that it needs."""


class AsyncSimulation(EpochLoop):
    """Workers that do not step together."""

    replicas: AsyncReplicas
    taken_over = ""  # a sentence on what other workers left

    def __init__(
        self,
        replicas: AsyncReplicas,
        cluster: Cluster,
        data: DataSet,
        loss: Loss,
        plan: TrainingPlan,
        metric: Metric | None = None,
    ) -> None:
        super().__init__(replicas, cluster, data, loss, plan, metric)
        size = cluster.size
        self._factor = plan.lr_factor(self.batches)
        self._base_lrs = [float(g["lr"]) for g in replicas.optimizer.param_groups]
        self.spec: ClusterSpec = ClusterSpec.parse(DEFAULT_CLUSTER) if cluster.clock is None else cluster.clock.spec
        self.step_s = plan.step_s(self.spec, replicas.model, loss, data)
        if cluster.clock is not None:
            cluster.clock.step_s = self.step_s
        self._slowdown = self.spec.factors(size).tolist()
        self._disturbances = lru_cache(1000)(lambda step: self.spec.disturbance(size, step, plan.seed).tolist())
        self._start()

    def _start(self) -> None:
        """All workers join with the weights that the replicas have, and take the first mini-batches of the sequence."""
        size, replicas = self.cluster.size, self.replicas
        self.phases = [BATCH] * size
        self._begun = [0] * size  # per worker: mini-batches that it has begun
        self._numbers = [-1] * size
        self._computing: list[float | None] = [None] * size
        self._compute_s = [0.0] * size  # in this epoch
        self._epoch_begun = 0.0
        self._losses: list[Tensor] = []
        self._before: dict[str, Any] = {"wait": 0.0, "hidden": 0.0, "sent": 0, "exchanges": 0, "staleness": {}}
        self.protocol = PROTOCOLS[replicas.strategy.runtime](replicas, self.spec, self.plan.seed, self.batches)
        self.simulation = self.protocol.simulation
        self.cores = SharedCores(self.spec, size, self.simulation, _COMPUTED)
        self.simulation.on_call = self._computed
        self.protocol.start()
        self.simulation.on_idle = self._idle
        for worker in range(size):
            self._advance(worker)

    @property
    def step(self) -> int:
        return self.batches.begun + self.protocol.progress // self.cluster.size

    @property
    def _epochs_here(self) -> int:
        """Epochs that these workers have ended; others may have ended some before."""
        return self.epoch - self.batches.begun // len(self.batches.partition)

    # --- a worker's step -----------------------------------------------------------------------------------------------------

    def _idle(self, key: Key) -> None:
        if isinstance(key, tuple) and key[0] == "worker":
            self._advance(key[1])

    def _advance(self, worker: int) -> None:
        """Run a worker until its program has to wait."""
        protocol, program = self.protocol, self.protocol.workers[worker]
        while not program.busy:
            phase = self.phases[worker]
            if phase == BATCH:
                number, effects = protocol.next_batch(worker)
                if number is not None:
                    self._begin(worker, number)
                elif effects or program.busy:
                    self.protocol.carry_out(worker, effects)
                    if not program.busy:
                        continue
                else:
                    self.phases[worker] = ENDING
                    self.protocol.carry_out(worker, protocol.end(worker))
            elif phase == BEFORE:
                lrs = self.lrs(worker)
                if protocol.steps_locally(worker):
                    self.replicas.local_step(worker, lrs)
                self.phases[worker] = AFTER
                self.protocol.carry_out(worker, protocol.after_update(worker, lrs))
            elif phase == AFTER:
                self.phases[worker] = BATCH
            elif phase == ENDING:
                self.phases[worker] = LEFT
                self.protocol.carry_out(worker, protocol.leave(worker))
            else:
                return

    def _begin(self, worker: int, number: int) -> None:
        """A worker computes the gradient of mini-batch ``number``."""
        now, batch = self.simulation.now, self.batches.minibatch(number)
        self._numbers[worker], self.phases[worker] = number, COMPUTING
        self.replicas.begin(worker, batch)
        share = len(batch.indices) / self.plan.batch_size
        seconds = self.step_s * share * self._slowdown[worker] * self._disturbances(self._begun[worker])[worker]
        seconds += self.protocol.beside_s(worker, share) * self._slowdown[worker]
        self._begun[worker] += 1
        self._computing[worker] = now
        self.cores.begin(worker, seconds)

    def _computed(self, call: Call) -> None:
        """A worker's gradient is there."""
        worker = call.node
        assert isinstance(worker, int)
        if not self.cores.ended(worker):
            return
        self._compute_s[worker] += self.simulation.now - max(self._computing[worker] or 0.0, self._epoch_begun)
        self._computing[worker] = None
        self.compute(worker)
        self._losses.append(self.replicas.losses[worker].clone())
        self.phases[worker] = BEFORE
        self.protocol.carry_out(worker, self.protocol.before_update(worker, self.batch(worker).weight))
        self._advance(worker)

    def compute(self, worker: int) -> None:
        """Compute a worker's gradient, along with those of all others that are pending."""
        workers = self.cluster.size
        self.replicas.compute(worker, lambda minibatch: self.plan.samples(minibatch, self.data, self._train, workers))

    def batch(self, worker: int) -> MiniBatch:
        """The mini-batch that a worker took last."""
        return self.batches.minibatch(self._numbers[worker])

    def lrs(self, worker: int) -> list[float]:
        """The learning rates of the optimiser's groups at the mini-batch that a worker took last."""
        at = self._factor(self.batch(worker).step)
        return [lr * at for lr in self._base_lrs]

    # --- epochs --------------------------------------------------------------------------------------------------------------

    def _train_epoch(self, watch: Watch) -> tuple[Entry, float]:
        seen, progress = self.step, self.protocol.progress
        before = self._epochs_here * self.batches.per_epoch
        enough = min(before + self.batches.per_epoch, len(self.batches))
        while progress < enough:
            if not self.simulation.step():
                raise RuntimeError("No worker has anything left to do before the end of the training: please report this.")
            progress = self.protocol.progress
            if (step := self.batches.begun + progress // self.cluster.size) > seen:
                seen = step
                self._watch_step(watch)
        entry = self._close()
        # The losses of as many mini-batches as the epoch has, in order of computing; on slow links some were computed long before.
        own = enough - before
        mean_loss = math.fsum(torch.stack(self._losses[:own]).tolist()) / own
        self._losses, self.epoch = self._losses[own:], self.epoch + 1
        check_weights(self.replicas.layout, self.protocol.global_weights(self._epochs_here)[0], self.epoch)
        return entry, mean_loss

    def _further_metrics(self, accuracy: float | None) -> dict[str, Any]:
        accounts = {str(k): worker.account.describe(self.simulation.now) for k, worker in enumerate(self.protocol.workers)}
        steps = {"step_times": steps_of(accounts)}
        if (staleness := self.protocol.staleness()) is None:
            return steps
        before, self._before["staleness"] = self._before["staleness"], staleness
        fresh = {str(age): count - before.get(age, 0) for age, count in sorted(staleness.items())}
        return {**steps, "staleness": {age: count for age, count in fresh.items() if count}}

    def _close(self) -> Entry:
        """The epoch's figures: what is neither computing nor waiting is transfer, so that they add up."""
        now, workers = self.simulation.now, self.cluster.size
        seconds = now - self._epoch_begun
        for worker, begun in enumerate(self._computing):  # a worker that is computing has done part of it in this epoch
            if begun is not None:
                self._compute_s[worker] += now - max(begun, self._epoch_begun)
        accounts, before = [worker.account for worker in self.protocol.workers], self._before
        names = {"wait": "wait_s", "hidden": "hidden_s", "sent": "bytes_sent", "exchanges": "exchanges"}
        totals = {name: sum(getattr(account, of) for account in accounts) for name, of in names.items()}
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

    def averaged(self) -> AbstractContextManager[nn.Module]:
        return self.replicas.with_weights(*self.protocol.global_weights(self._epochs_here))

    def go_on_at(self, state: dict[str, Any]) -> None:
        self.epoch, self.metrics = state["epoch"], list(state["metrics"])
        self.batches = self.plan.sequence(self.data, self.cluster.size, self.epoch)
        self._start()

    # --- state ---------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume from, after an epoch: messages under way included."""
        for worker in range(self.cluster.size):
            self.compute(worker)
        return {
            "epoch": self.epoch,
            "step": self.step,
            "batches": len(self.batches),
            "epochs_before": self.epoch - self._epochs_here,
            "metrics": list(self.metrics),
            "replicas": self.replicas.state_dict(),
            "protocol": self.protocol.state_dict(),
            "links": self.protocol.links.state_dict(),
            "queue": [[when, number, _plain_event(event)] for when, number, event in sorted(self.simulation.queue)],
            "clock": [self.simulation.now, self.simulation.order, self._epoch_begun],
            "phases": list(self.phases),
            "begun": list(self._begun),
            "numbers": list(self._numbers),
            "computing": list(self._computing),
            "cores": self.cores.state_dict(),
            "compute_s": list(self._compute_s),
            "losses": list(self._losses),
            "before": dict(self._before),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume; the training goes on as if it had never stopped, also one that was over and has been made longer."""
        if state["epochs_before"] != self.epoch - self._epochs_here:
            self.go_on_at({"epoch": state["epochs_before"], "metrics": []})
        self.epoch, self.metrics = state["epoch"], list(state["metrics"])
        self.replicas.load_state_dict(state["replicas"])
        self.simulation.now, self.simulation.order, self._epoch_begun = state["clock"]
        self.protocol.load_state_dict(state["protocol"])
        self.protocol.links.load_state_dict(state["links"])
        self.simulation.resume([(float(when), int(number), _event(plain)) for when, number, plain in state["queue"]])
        self.phases, self._begun, self._numbers = list(state["phases"]), list(state["begun"]), list(state["numbers"])
        self._computing, self._compute_s = list(state["computing"]), list(state["compute_s"])
        self._losses, self._before = list(state["losses"]), dict(state["before"])
        self.cores.load_state_dict(state["cores"])
        if len(self.batches) <= state["batches"]:
            return
        for worker, phase in enumerate(self.phases):  # the training was made longer: those who had ended go on
            if phase in (ENDING, LEFT):
                self.phases[worker] = BATCH
            if phase == LEFT:
                self.protocol.carry_out(worker, self.protocol.rejoin(worker))
                self._advance(worker)


def _plain_event(event: Delivery | Alarm | Call) -> list[Any]:
    if isinstance(event, Call):
        return ["call", event.name, event.node]
    if isinstance(event, Alarm):
        return ["alarm", list(event.node), event.identity.hex(), event.name, event.number]
    sender = event.sender.hex() if isinstance(event.sender, bytes) else event.sender
    ends = [list(event.source), event.source_identity.hex(), list(event.target), event.target_identity.hex()]
    return ["delivery", *ends, sender, to_plain(event.message)]


def _event(plain: list[Any]) -> Delivery | Alarm | Call:
    if plain[0] == "call":
        return Call(plain[1], plain[2])
    if plain[0] == "alarm":
        return Alarm(tuple(plain[1]), bytes.fromhex(plain[2]), plain[3], plain[4])
    _, source, source_identity, target, target_identity, sender, message = plain
    envelope = from_plain(message)
    assert envelope is not None
    peer = bytes.fromhex(sender) if isinstance(sender, str) else sender
    return Delivery(tuple(source), bytes.fromhex(source_identity), tuple(target), bytes.fromhex(target_identity), peer, envelope)
