"""The training loop, in plain sight: epochs of rounds, one step each, then an evaluation of the mean model.

It serves real processes and virtual workers alike; what differs is in the replicas and in the cluster.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from hocket.cluster.base import Cluster
from hocket.cluster.ledger import Entry
from hocket.cluster.spec import ClusterSpec
from hocket.data import label_skew
from hocket.data.base import DataSet, Pair, Samples
from hocket.data.batches import BatchSequence, MiniBatch
from hocket.data.partition import Last, Partition, Round
from hocket.errors import SettingError, is_whole, nearest
from hocket.noise import step_keys
from hocket.train.balance import by_speed, check_balance, check_speeds
from hocket.train.evaluate import LEAST_SAMPLE, Evaluation, Evaluator, Metric, Tally, spread
from hocket.train.flops import step_flops
from hocket.train.hosted import Replicas
from hocket.train.ledger_view import ClusterLedger, JobLedger, read_by_all
from hocket.train.lr_schedule import factor
from hocket.train.replicas import Loss


@dataclass(frozen=True)
class TrainingPlan:
    """How long and on what mini-batches to train."""

    epochs: int = 1
    batch_size: int = 100
    seed: int = 0
    lr_schedule: str = "constant"
    warmup_epochs: float = 0.0
    max_steps: int | None = None
    augment: bool = True
    last: str = "even"
    evaluate: bool = True
    """Evaluate the mean model after every epoch, not only after the last."""
    evaluate_last: bool = True
    """Evaluate the mean model after the last epoch."""
    worst: bool = True
    """After the last epoch look for the worst replica, too, and evaluate that."""
    balance: str = "even"
    """A worker's share of a round: even, or by its speed in the epoch before."""
    partition: str = label_skew.IID
    """Which samples a worker may have: any (iid), or those that it owns by their labels."""
    warmup_start: float = 0.0
    """The share of the rate at which the warm-up starts."""

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs)
        check_count("batch_size", self.batch_size)
        if self.max_steps is not None and self.max_steps < 1:
            raise SettingError("<max_steps>: it must be a whole number of at least 1, or left out.", max_steps=self.max_steps)
        factor(self.lr_schedule, 1)  # refuses a name that there is not
        if not 0 <= self.warmup_epochs < math.inf:
            raise SettingError("<warmup>: the warm-up is a number of epochs, 0 for none.", warmup=self.warmup_epochs)
        check_balance(self.balance)
        label_skew.check(self.partition)
        if self.partition != label_skew.IID and self.balance != "even":
            raise SettingError("<partition> gives each worker samples of its own; leave <balance> out.", partition=self.partition)
        if self.last not in get_args(Last):
            hint = nearest(str(self.last), get_args(Last))
            raise SettingError(f"<last>: the last round is divided evenly (even) or left out (drop){hint or '.'}", last=self.last)

    def sequence(self, data: DataSet, workers: int, epochs_done: int = 0) -> BatchSequence:
        """All mini-batches of the training, for ``workers`` workers, after those of the first ``epochs_done`` epochs."""
        samples = data.samples
        given = (len(samples), workers, self.batch_size, self.seed, cast(Last, self.last))
        labels = None if self.partition == label_skew.IID else samples.labels()
        owners = label_skew.owners(self.partition, labels, workers, self.seed)
        partition = Partition(*given, order=samples.order(self.seed), owners=owners)
        total = len(partition) * self.epochs
        steps = total if self.max_steps is None else min(total, self.max_steps)
        return BatchSequence(partition, steps, epochs_done * len(partition))

    def samples(self, minibatch: MiniBatch, data: DataSet, train: Samples, workers: int) -> tuple[Tensor, Tensor, Tensor]:
        """A mini-batch of ``train``: inputs, targets and the key of its randomness, a function of its number."""
        x, y = train[minibatch.indices]
        key = step_keys(self.seed, minibatch.step, workers)[minibatch.slot : minibatch.slot + 1]
        return self.prepared(x.unsqueeze(0), key, data)[0], y, key

    def prepared(self, x: Tensor, keys: Tensor, data: DataSet) -> Tensor:
        """The inputs ``[rows, batch, …]`` as the model takes them."""
        if self.augment and data.augment is not None:
            x = data.augment(x, keys)
        return data.prepare(x)

    def lr_factor(self, sequence: BatchSequence) -> Callable[[int], float]:
        """The rate at a step as a multiple of the base rate."""
        warmup = round(self.warmup_epochs * len(sequence.partition))
        return factor(self.lr_schedule, sequence.steps, warmup, self.warmup_start)

    def step_s(self, spec: ClusterSpec, model: nn.Module, loss: Loss, data: DataSet) -> float:
        """How long a worker of ordinary speed computes the gradient of a mini-batch on the described cluster."""
        if spec.step_s is not None:
            return spec.seconds(0.0)
        x, y = (t[:2] for t in data.train)
        return spec.seconds(step_flops(model, loss, data.prepare(x), y, self.batch_size))


def check_count(name: str, value: Any) -> None:
    """Refuse what is not a whole number of at least 1.

    >>> check_count("epochs", 0)
    Traceback (most recent call last):
    hocket.errors.SettingError: epochs=0: it must be a whole number of at least 1.
    """
    if not is_whole(value):
        raise SettingError(f"<{name}>: it must be a whole number of at least 1.", **{name: value})


@dataclass
class Progress:
    """Where a training stands; handed to whoever watches."""

    epoch: int
    epochs: int
    step: int
    steps: int


Watch = Callable[[Progress], None]


class EpochLoop(ABC):
    """What all trainings share: epochs of mini-batches, and a line of metrics after each."""

    def __init__(
        self, replicas: Any, cluster: Cluster, data: DataSet, loss: Loss, plan: TrainingPlan, metric: Metric | None = None
    ) -> None:
        self.replicas, self.cluster, self.data, self.loss, self.plan = replicas, cluster, data, loss, plan
        self.metrics: list[dict[str, Any]] = []
        self.epoch = 0
        self.batches = plan.sequence(data, cluster.size)
        self.steps = self.batches.steps
        self.ledger: JobLedger = replicas.ledger or ClusterLedger(cluster)
        self.evaluator = Evaluator(data, loss, metric)
        self._train = data.samples.on(cluster.device)
        self._test = None if data.test is None else (data.test[0].to(cluster.device), data.test[1].to(cluster.device))

    @property
    @abstractmethod
    def step(self) -> int:
        """Rounds of mini-batches that have had their effect."""

    @property
    def over(self) -> bool:
        """Whether there is no epoch left."""
        return self.epoch == self.plan.epochs or self.epoch * len(self.batches.partition) >= self.steps

    def run(self, watch: Watch = lambda _: None) -> Iterator[dict[str, Any]]:
        """Train on; yields each epoch's metrics as it ends."""
        while not self.over:
            begun = time.perf_counter()
            entry, mean_loss = self._train_epoch(watch)
            wall = time.perf_counter() - begun
            found = self._evaluate() if self.plan.evaluate or (self.over and self.plan.evaluate_last) else Evaluation()
            metrics = {"epoch": self.epoch, **found.line(mean_loss), **vars(entry), "wall_s": wall}
            metrics |= self.batches.tokens(self.epoch - 1, self.data) | self._data_figures()
            self.metrics.append({**metrics, **self._further_metrics(found.accuracy)})
            yield self.metrics[-1]

    @abstractmethod
    def averaged(self) -> AbstractContextManager[nn.Module]:
        """The model to evaluate: the mean of all workers, or the servers' weights."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything to resume from, after an epoch."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume; the training goes on as if it had never stopped."""

    @abstractmethod
    def go_on_at(self, state: dict[str, Any]) -> None:
        """Resume after the epoch of ``state``, which other workers ended; the replicas have the weights already."""

    @abstractmethod
    def _train_epoch(self, watch: Watch) -> tuple[Entry, float]:
        """The next epoch: its figures and its mean loss."""

    @abstractmethod
    def _further_metrics(self, accuracy: float | None) -> dict[str, Any]:
        """The metrics of an epoch that only some trainings have."""

    def _evaluate(self) -> Evaluation:
        """The mean model on the test set; each process looks at its part of it.

        On a CPU a worker's part is evaluated by itself and sums are exact, so that they do not depend on who hosts whom.
        """
        if self._test is None:
            return Evaluation()
        (x, y), workers, size = self._test, self.cluster.workers, self.cluster.size
        ends = range(workers.start, workers.stop + 1) if x.device.type == "cpu" else (workers.start, workers.stop)
        parts = [slice(first * len(x) // size, last * len(x) // size) for first, last in pairwise(ends)]
        with self.averaged() as model:
            own = [self.evaluator.tally(model, (x[part], y[part])) for part in parts]
        rows = torch.zeros(self.cluster.rows, len(vars(Tally())), dtype=torch.float64)
        rows[: len(own)] = torch.tensor([list(vars(tally).values()) for tally in own], dtype=torch.float64)
        sums = [math.fsum(column) for column in self.cluster.all_gather_metrics(rows).T.tolist()]
        return self.evaluator.evaluation(Tally(*sums))

    def _data_figures(self) -> dict[str, float]:
        """The costs of reading: bytes and samples of all processes, seconds as their mean."""
        own = self._train.figures()
        return read_by_all(self.cluster, own) if own else {}

    def _watch_step(self, watch: Watch) -> None:
        watch(Progress(self.epoch, self.plan.epochs, self.step, self.steps))


class Training(EpochLoop):
    """Workers that step together: the loop's own state is the epoch and the step."""

    replicas: Replicas
    step: int = 0
    taken = 0  # rounds of the epoch under way that were done before the run was resumed

    def __init__(
        self, replicas: Replicas, cluster: Cluster, data: DataSet, loss: Loss, plan: TrainingPlan, metric: Metric | None = None
    ) -> None:
        super().__init__(replicas, cluster, data, loss, plan, metric)
        self.shares: list[int] | None = None
        """Samples of each worker in a whole round of the next epoch, where that goes by speed."""
        if plan.balance == "speed":
            check_speeds(cluster)
            self.shares = [plan.batch_size] * cluster.size
        self.scheduler = LambdaLR(replicas.optimizer, plan.lr_factor(self.batches))
        self._workers = torch.arange(cluster.workers.start, cluster.workers.stop)
        if (clock := cluster.clock) is not None and clock.spec.step_s is None:
            clock.step_s = plan.step_s(clock.spec, replicas.model, loss, data)

    def averaged(self) -> AbstractContextManager[nn.Module]:
        return self.replicas.averaged()

    def _train_epoch(self, watch: Watch) -> tuple[Entry, float]:
        losses: list[Tensor] = []
        self.cluster.ledger.resume()
        rounds = self.batches.partition.rounds(self.epoch, self.shares)[self.taken :][: self.steps - self.step]
        indices = self._indices(rounds)
        for round_, index, samples in zip(rounds, indices, self._train.batches(indices), strict=True):
            loss = self._step(round_, index, samples)
            losses += [loss] * bool(loss.numel())  # an asynchronous pipe tells losses later, and none while it fills
            self._watch_step(watch)
        losses += self.replicas.drain()
        self.cluster.ledger.pause()
        entry = self.ledger.close_epoch()
        self.epoch, self.taken = self.epoch + 1, 0
        self.replicas.audit()
        self._samples = [sum(sizes) for sizes in zip(*(r.sizes for r in rounds[: len(losses)]), strict=True)]
        return entry, self._mean_loss(losses)

    def _further_metrics(self, accuracy: float | None) -> dict[str, Any]:
        metrics: dict[str, Any] = {"axes": self.ledger.last} if self.ledger.last else {}
        metrics |= {"step_times": steps} if (steps := self.ledger.step_times()) else {}
        if self.shares is not None:
            metrics["shares"] = self.shares
            self.shares = by_speed(self.shares, self._samples, self.cluster.ledger.computed)
        worst = self._worst() if self.over and self.plan.worst and self.plan.evaluate_last else None
        if worst is not None and worst != accuracy:
            metrics["accuracy_worst"] = worst
        return metrics

    def _mean_loss(self, losses: list[Tensor]) -> float:
        """The mean over steps and workers, summed exactly so that it does not depend on who hosts whom."""
        if not losses:
            return math.nan
        own = [[math.fsum(column) / len(losses)] for column in torch.stack(losses, 1).tolist()]
        everyone = self.cluster.all_gather_metrics(torch.tensor(own, dtype=torch.float64))
        return math.fsum(everyone.flatten().tolist()) / self.cluster.size

    def _indices(self, rounds: list[Round]) -> list[list[Tensor] | Tensor]:
        """Per round, the samples of the workers hosted here: one tensor where all have equally many. One copy to the device."""
        here = slice(self.cluster.workers.start, self.cluster.workers.stop)
        device = self._train.device
        whole = self.plan.batch_size if self.shares is None else self.shares[here.start]
        own = [r.indices[here] for r in rounds]
        even = [k for k, parts in enumerate(own) if len({len(p) for p in parts}) == 1 and len(parts[0]) == whole]
        stacked = torch.stack([torch.stack(own[k]) for k in even]).to(device) if even else None
        place = {k: j for j, k in enumerate(even)}
        return [
            stacked[place[k]] if stacked is not None and k in place else [p.to(device) for p in parts]
            for k, parts in enumerate(own)
        ]

    def _step(self, round_: Round, index: list[Tensor] | Tensor, samples: Pair | list[Pair]) -> Tensor:
        here = slice(self.cluster.workers.start, self.cluster.workers.stop)
        plan = self.plan
        keys = step_keys(plan.seed, self.step, self.cluster.size)[self._workers]
        weights = [1.0] * self.cluster.rows if round_.even else round_.weights[here]
        inputs: Any
        targets: Any
        if isinstance(samples, tuple):
            inputs, targets = plan.prepared(samples[0], keys, self.data), samples[1]
        else:
            inputs = [plan.prepared(x.unsqueeze(0), keys[r : r + 1], self.data)[0] for r, (x, _) in enumerate(samples)]
            targets = [y for _, y in samples]
        if self.cluster.clock is not None:
            self.cluster.clock.compute(self.step, self._loads(index))
        by_samples, self.replicas.samples = self.shares is not None, float(sum(round_.sizes))
        losses = self.replicas.step(inputs, targets, keys, weights, always=by_samples)
        self.scheduler.step()
        self.step += 1
        return losses * losses.new_tensor(weights) if by_samples else losses

    def _loads(self, index: list[Tensor] | Tensor) -> Tensor | float:
        """Each worker's mini-batch in this round as a share of a whole one."""
        if isinstance(index, Tensor):
            return index.shape[1] / self.plan.batch_size
        return torch.tensor([len(i) / self.plan.batch_size for i in index], dtype=torch.float64)

    def _worst(self) -> float | None:
        """The accuracy of the worst replica, which is found on a sample where the test set is larger than a worker's training."""
        if self.cluster.size == 1 or self._test is None or self._test[1].is_floating_point():
            return None
        sample = spread(self._test, max(LEAST_SAMPLE, self.steps * self.plan.batch_size))
        found = self._accuracies(sample, range(self.cluster.size))
        if sample is not self._test:
            found = self._accuracies(self._test, [int(found.nan_to_num(math.inf).argmin())])
        worst = float(found.nan_to_num(math.inf).min())
        return worst if math.isfinite(worst) else None

    def _accuracies(self, pair: Pair, workers: Sequence[int]) -> Tensor:
        """The accuracies of all workers' replicas; NaN for workers that are not wanted."""
        own = torch.full((self.cluster.rows, 1), math.nan, dtype=torch.float64)
        for row, (worker, model) in enumerate(zip(self.cluster.workers, self.replicas.each(), strict=True)):
            if worker in workers and (accuracy := self.evaluator.tally(model, pair).accuracy) is not None:
                own[row] = accuracy
        return self.cluster.all_gather_metrics(own).flatten()

    def state_dict(self) -> dict[str, Any]:
        return {**self._progress(), "replicas": self.replicas.state_dict()}

    def full_state(self) -> dict[str, Any] | None:
        """The :meth:`state_dict` with a split model in one piece; on its first process only."""
        assert self.replicas.job is not None
        whole = self.replicas.job.full_state()
        return None if whole is None else {**self._progress(), "replicas": None, **whole}

    def _progress(self) -> dict[str, Any]:
        """The position of the loop."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "metrics": self.metrics,
            "shares": self.shares,
            "scheduler": self.scheduler.state_dict(),
        }

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Resume from a model that was split otherwise, or not at all; what strategies remember starts anew."""
        self._load_progress(state)
        self.replicas.load_full_state(state)
        self.scheduler.load_state_dict(state["scheduler"])

    def go_on_at(self, state: dict[str, Any]) -> None:
        """The next epoch begins at its first sample, and the schedule stands where these workers would have come."""
        self.epoch, self.metrics = state["epoch"], list(state["metrics"])
        self.step = min(self.epoch * len(self.batches.partition), self.steps)
        scheduler = self.scheduler
        scheduler.last_epoch, scheduler._step_count = self.step, self.step + 1
        rates = [lr * factor(self.step) for lr, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates

    def go_on_after(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on where the workers of ``states`` stood; the replicas have their weights already."""
        self.go_on_at(states[0])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load_progress(state)
        if self.shares is not None:
            self.shares = list(state["shares"] or self.shares)
        self.replicas.load_state_dict(state["replicas"])
        self.scheduler.load_state_dict(state["scheduler"])

    def _load_progress(self, state: dict[str, Any]) -> None:
        self.epoch, self.step, self.metrics = state["epoch"], state["step"], list(state["metrics"])
