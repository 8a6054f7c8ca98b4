"""The training loop of a worker of an elastic run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from hocket.cluster.elastic import ElasticCluster
from hocket.cluster.ledger import Entry
from hocket.cluster.replica import ReplicaLost
from hocket.data.base import DataSet
from hocket.data.elastic_stream import SampleStream
from hocket.data.partition import Round
from hocket.noise import step_keys
from hocket.train.evaluate import Evaluation, Tally
from hocket.train.loop import Training, TrainingPlan, Watch
from hocket.train.replicas import LiveReplica, Loss
from hocket.train.runtimes.elastic import ElasticRuntime
from hocket.train.runtimes.elastic_replica import ReplicaRuntime
from hocket.train.runtimes.elastic_view import Rejoined
from hocket.train.split_replicas import MeshReplica


class ElasticTraining(Training):
    """Epochs over samples that are dealt to whoever is there; the learning-rate schedule follows the samples, not the steps."""

    cluster: ElasticCluster

    def __init__(self, replica: LiveReplica | MeshReplica, data: DataSet, loss: Loss, plan: TrainingPlan) -> None:
        runtime = replica.job.runtime
        assert isinstance(runtime, ElasticRuntime)
        self.runtime, self.stream = runtime, runtime.stream
        super().__init__(replica, runtime.cluster, data, loss, plan)
        factor, per_epoch = plan.lr_factor(self.batches), len(self.batches.partition)
        self.scheduler = LambdaLR(
            replica.optimizer, lambda _: factor(round((self.epoch + self.stream.progress) * per_epoch)), self.scheduler.last_epoch
        )
        self._told = 0
        self._lost = self._lost_total = 0  # losses that the lines so far include, and those of the next one
        runtime.share("training", Progress(self))

    @property
    def over(self) -> bool:
        return self.epoch >= self.plan.epochs or (self.plan.max_steps is not None and self.step >= self.plan.max_steps)

    def run(self, watch: Watch = lambda _: None) -> Iterator[dict[str, Any]]:
        while True:
            try:
                yield from super().run(watch)
                break
            except ReplicaLost:
                self.rejoin()
            except Rejoined:  # it was away while the others summed up an epoch; it has their state, and goes on with their epoch
                continue
        self.runtime.end()

    def _train_epoch(self, watch: Watch) -> tuple[Entry, float]:
        losses: list[Tensor] = []
        self.cluster.ledger.resume()
        self.stream.begin(self.batches.partition)
        while not self.over and (round_ := self.stream.next()) is not None:
            loss = self._deal(round_, self.stream)
            losses += [loss] * bool(loss.numel())
            self._watch_step(watch)
        self.cluster.ledger.pause()
        entry = self.ledger.close_epoch()
        self.stream.end()
        self.epoch = self.stream.epoch
        self.replicas.audit()
        return entry, self._mean_loss(losses)

    def _deal(self, round_: Round, stream: SampleStream) -> Tensor:
        plan, slot = self.plan, stream.worker
        own = round_.indices[slot]
        stands_in = not len(own)  # fewer samples than workers are left: one of another worker's, which counts for nothing
        x, y = self._train[torch.cat(round_.indices)[:1] if stands_in else own]
        key = step_keys(plan.seed, self.step, stream.workers)[slot : slot + 1]
        inputs = [plan.prepared(x.unsqueeze(0), key, self.data)[0]]
        weight = 1.0 if round_.even else round_.weights[slot]
        loss = self.replicas.step(inputs, [y], key, [weight], always=stands_in)
        self.step = self.runtime.step
        self.scheduler.step()
        return loss[:0] if stands_in else loss

    def _mean_loss(self, losses: list[Tensor]) -> float:
        own = [math.fsum(t.item() for t in losses) / max(len(losses), 1), float(self.runtime.member.lost)]
        everyone = self.cluster.all_gather_metrics(torch.tensor([own], dtype=torch.float64))
        self._lost_total = int(everyone[:, 1].max())  # the same on all: the line is that of whichever worker writes it
        return float(everyone[:, 0].mean())

    def _evaluate(self) -> Evaluation:
        """Every worker looks at a part of the test set; again, if one was lost meanwhile. All decide it by the same figures."""
        if self._test is None:
            return Evaluation()
        if self.cluster.parts > 1:  # each replica looks at all of it: its processes may not know of the same generation
            with self.averaged() as model:
                return self.evaluator.evaluation(self.evaluator.tally(model, self._test))
        while True:
            (x, y), rank, size = self._test, self.cluster.rank, self.cluster.size
            part = slice(rank * len(x) // size, (rank + 1) * len(x) // size)
            with self.averaged() as model:
                own = self.evaluator.tally(model, (x[part], y[part]))
            rows = torch.tensor([[*vars(own).values(), float(len(x[part]))]], dtype=torch.float64)
            *sums, seen = [math.fsum(column) for column in self.cluster.all_gather_metrics(rows).T.tolist()]
            if seen == len(x):
                return self.evaluator.evaluation(Tally(*sums))

    def _further_metrics(self, accuracy: float | None) -> dict[str, Any]:
        new, self._told = self.runtime.events[self._told :], len(self.runtime.events)
        figures = {"lost": self._lost_total - self._lost, "lost_total": self._lost_total}
        figures |= {name: sum(event[name] for event in new) for name in ("left", "joined")}
        self._lost = self._lost_total
        seconds = sum(event["seconds"] for event in new)
        further = super()._further_metrics(accuracy)
        return {**further, "workers": self.cluster.size, **figures, "regroup_s": seconds, "dealt_again": self.stream.dealt_again}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "step": self.runtime.step}  # also in the middle of a step

    def go_on_after(self, states: Sequence[dict[str, Any]]) -> None:
        """Of an epoch that was under way the samples go on behind the last one that was computed."""
        jobs = [(state["replicas"] or {}).get("job", {}) for state in states]
        epoch = {"epoch": states[0]["epoch"], "history": [], "taken": 0, "sound": 0, "workers": 1, "worker": 0, "members": []}
        self.stream.go_on([job["samples"] for job in jobs] if all("samples" in job for job in jobs) else [epoch])
        self.stream.begin(self.batches.partition)
        self.epoch, self.step, self.metrics = states[0]["epoch"], self.runtime.step, list(states[0]["metrics"])
        told = self.metrics[-1].get("lost_total", 0) if self.metrics else 0
        self._lost = min(told, self.runtime.member.lost)  # a rendezvous that was started for this run begins to count anew
        self.scheduler.last_epoch = self.step
        self.set_rates()

    def load_full_state(self, state: dict[str, Any]) -> None:
        """What strategies remember starts anew; rates follow the number of workers, not what was saved."""
        self.replicas.load_full_state(state)
        self.runtime.program.step = state["step"]

    def rejoin(self) -> None:
        """Another process of this one's replica is lost: join the others again."""
        assert isinstance(self.runtime, ReplicaRuntime)
        self.runtime.rejoin()

    def set_rates(self) -> None:
        """The rates are those of the schedule here."""
        for group, base in zip(self.replicas.optimizer.param_groups, self.scheduler.base_lrs, strict=True):
            group["lr"] = base * self.scheduler.lr_lambdas[0](0)


class Progress:
    """Where a training stands, for a worker that joins."""

    def __init__(self, training: ElasticTraining) -> None:
        self._training = training

    @property
    def base_lrs(self) -> list[float]:
        """Of the schedule."""
        return [float(rate) for rate in self._training.scheduler.base_lrs]

    @base_lrs.setter
    def base_lrs(self, rates: list[float]) -> None:
        self._training.scheduler.base_lrs = list(rates)

    def state_dict(self) -> dict[str, Any]:
        scheduler = {"base_lrs": self.base_lrs, "last_epoch": self._training.scheduler.last_epoch}
        return {**self._training._progress(), "scheduler": scheduler, "lost": self._training._lost}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        training, scheduler = self._training, self._training.scheduler
        training._load_progress(state)
        training._lost = state["lost"]
        self.base_lrs, scheduler.last_epoch = state["scheduler"]["base_lrs"], state["scheduler"]["last_epoch"]
        training.set_rates()
