"""The training loop, in plain sight: epochs of rounds, one step each, then an evaluation of the mean model.

It serves real processes and virtual workers alike; what differs is in the replicas and in the cluster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.data.base import DataSet
from hocket.data.partition import Last, Partition, Round
from hocket.errors import HocketError
from hocket.noise import step_keys
from hocket.train.balance import by_speed, check_balance, check_speeds
from hocket.train.flops import step_flops
from hocket.train.ledger_view import ClusterLedger, JobLedger
from hocket.train.lr_schedule import factor, scheduler
from hocket.train.replicas import Loss, Replicas
from hocket.train.setting_checks import check_count, check_last, check_max_steps, check_warmup

_EVALUATION_BATCH = 1000
_MOST_ON_CUDA, _ROOM = 10_000, 2**34


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
    worst: bool = True
    """After the last epoch evaluate every replica too, for the worst of them."""
    balance: str = "even"
    """A worker's share of a round: even, or by its speed in the epoch before."""

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs)
        check_count("batch_size", self.batch_size)
        check_max_steps(self.max_steps)
        factor(self.lr_schedule, 1)  # refuses a name that there is not
        check_warmup(self.warmup_epochs)
        check_balance(self.balance)
        check_last(self.last)

    @property
    def rounds(self) -> Last:
        """What becomes of an epoch's incomplete round."""
        return cast(Last, self.last)


@dataclass
class Progress:
    """Where a training stands; handed to whoever watches."""

    epoch: int
    epochs: int
    step: int
    steps: int


@dataclass
class Training:
    """A training under way: the loop's own state is the epoch and the step."""

    replicas: Replicas
    cluster: Cluster
    data: DataSet
    loss: Loss
    plan: TrainingPlan
    metrics: list[dict[str, Any]] = field(default_factory=list)
    epoch: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        plan, samples = self.plan, len(self.data.train[0])
        self.partition = Partition(samples, self.cluster.size, plan.batch_size, plan.seed, plan.rounds)
        if not len(self.partition):
            raise HocketError(f"{samples} samples give no round for {self.cluster.size} workers; use fewer workers or more data.")
        self.shares: list[int] | None = None
        """Samples of each worker in a whole round of the next epoch, where that goes by speed."""
        if plan.balance == "speed":
            check_speeds(self.cluster)
            self.shares = [plan.batch_size] * self.cluster.size
        total = len(self.partition) * plan.epochs
        self.steps = total if plan.max_steps is None else min(total, plan.max_steps)
        self.scheduler = scheduler(
            self.replicas.optimizer, plan.lr_schedule, self.steps, round(plan.warmup_epochs * len(self.partition))
        )
        self.ledger: JobLedger = getattr(self.replicas, "ledger", None) or ClusterLedger(self.cluster)
        device = self.cluster.device
        self._train = tuple(t.to(device) for t in self.data.train)
        self._test = tuple(t.to(device) for t in self.data.test)
        self._workers = torch.arange(self.cluster.workers.start, self.cluster.workers.stop)
        if (clock := self.cluster.clock) is not None and clock.spec.step_s is None:
            x, y = (t[:2] for t in self.data.train)
            flops = step_flops(self.replicas.model, self.loss, self.data.prepare(x), y, plan.batch_size)
            clock.step_s = clock.spec.seconds(flops)

    def run(self, watch: Callable[[Progress], None] = lambda _: None) -> Iterator[dict[str, Any]]:
        """Train on; yields each epoch's metrics as it ends."""
        while self.epoch < self.plan.epochs and self.step < self.steps:
            yield self._run_epoch(watch)

    def _run_epoch(self, watch: Callable[[Progress], None]) -> dict[str, Any]:
        begun = time.perf_counter()
        losses: list[Tensor] = []
        self.cluster.ledger.resume()
        for round_, index in zip(rounds := self.partition.rounds(self.epoch, self.shares), self._indices(rounds), strict=True):
            if self.step >= self.steps:
                break
            loss = self._step(round_, index)
            losses += [loss] * bool(loss.numel())  # an asynchronous pipe tells losses later, and none while it fills
            watch(Progress(self.epoch, self.plan.epochs, self.step, self.steps))
        losses += getattr(self.replicas, "drain", list)()
        self.cluster.ledger.pause()
        entry = self.ledger.close_epoch()
        self.epoch += 1
        self.replicas.audit()
        mean_loss = self._mean_loss(losses)
        wall = time.perf_counter() - begun
        over = self.epoch == self.plan.epochs or self.step >= self.steps
        accuracy = self._evaluate() if self.plan.evaluate or over else None
        metrics: dict[str, Any] = {"epoch": self.epoch, "accuracy": accuracy, "loss": mean_loss, **vars(entry), "wall_s": wall}
        if self.ledger.last:
            metrics["axes"] = self.ledger.last
        if self.shares is not None:
            metrics["shares"] = self.shares
            samples = [sum(sizes) for sizes in zip(*(r.sizes for r in rounds[: len(losses)]), strict=True)]
            self.shares = by_speed(self.shares, samples, self.cluster.ledger.computed)
        if over:
            worst = self._worst() if self.plan.worst else None
            if worst is not None and worst != accuracy:
                metrics["accuracy_worst"] = worst
        self.metrics.append(metrics)
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
        device = self._train[0].device
        whole = self.plan.batch_size if self.shares is None else self.shares[here.start]
        own = [r.indices[here] for r in rounds]
        even = [k for k, parts in enumerate(own) if len({len(p) for p in parts}) == 1 and len(parts[0]) == whole]
        stacked = torch.stack([torch.stack(own[k]) for k in even]).to(device) if even else None
        place = {k: j for j, k in enumerate(even)}
        return [
            stacked[place[k]] if stacked is not None and k in place else [p.to(device) for p in parts]
            for k, parts in enumerate(own)
        ]

    def _step(self, round_: Round, index: list[Tensor] | Tensor) -> Tensor:
        here = slice(self.cluster.workers.start, self.cluster.workers.stop)
        keys = step_keys(self.plan.seed, self.step, self.cluster.size)[self._workers]
        x, y = self._train
        weights = [1.0] * self.cluster.rows if round_.even else round_.weights[here]
        inputs: Any
        targets: Any
        if isinstance(index, Tensor):
            inputs, targets = self._prepared(x[index], keys), y[index]
        else:
            inputs = [self._prepared(x[i].unsqueeze(0), keys[r : r + 1])[0] for r, i in enumerate(index)]
            targets = [y[i] for i in index]
        if self.cluster.clock is not None:
            self.cluster.clock.compute(self.step, self._loads(index))
        by_samples = self.shares is not None
        losses = self.replicas.step(inputs, targets, keys, weights, always=by_samples)
        self.scheduler.step()
        self.step += 1
        return losses * losses.new_tensor(weights) if by_samples else losses

    def _loads(self, index: list[Tensor] | Tensor) -> Tensor | float:
        """What part of a whole mini-batch each worker has in this round."""
        if isinstance(index, Tensor):
            return index.shape[1] / self.plan.batch_size
        return torch.tensor([len(i) / self.plan.batch_size for i in index], dtype=torch.float64)

    def _prepared(self, x: Tensor, keys: Tensor) -> Tensor:
        if self.plan.augment and self.data.augment is not None:
            x = self.data.augment(x, keys)
        return self.data.prepare(x)

    def _evaluate(self) -> float | None:
        with self.replicas.averaged() as model:
            right, seen = accuracy_of(model, self._share(), self.data)
        rows = torch.zeros(self.cluster.rows, 2, dtype=torch.float64)
        rows[0] = torch.tensor([right, seen])
        right, seen = self.cluster.all_gather_metrics(rows).sum(0).tolist()
        return right / seen if seen else None

    def _share(self) -> tuple[Tensor, Tensor]:
        """This process's part of the test set."""
        x, y = self._test
        start, stop, size = self.cluster.workers.start, self.cluster.workers.stop, self.cluster.size
        part = slice(start * len(x) // size, stop * len(x) // size)
        return x[part], y[part]

    def _worst(self) -> float | None:
        if self.cluster.size == 1 or not _countable(self._test[1]):
            return None
        own = [r / n for r, n in (accuracy_of(model, self._test_pair(), self.data) for model in self.replicas.each())]
        return float(self.cluster.all_gather_metrics(torch.tensor(own, dtype=torch.float64).unsqueeze(1)).min())

    def _test_pair(self) -> tuple[Tensor, Tensor]:
        return self._test[0], self._test[1]

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume from, after an epoch."""
        return {**self._progress(), "replicas": self.replicas.state_dict()}

    def full_state(self) -> dict[str, Any] | None:
        """The same with a split model put together; on its first process only."""
        whole = self.replicas.job.full_state()  # type: ignore[attr-defined]
        return None if whole is None else {**self._progress(), "replicas": None, **whole}

    def _progress(self) -> dict[str, Any]:
        """Where the loop stands."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "metrics": self.metrics,
            "shares": self.shares,
            "scheduler": self.scheduler.state_dict(),
        }

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Resume from a model that was split otherwise, or not at all; what strategies remember starts anew."""
        self.epoch, self.step, self.metrics = state["epoch"], state["step"], list(state["metrics"])
        self.replicas.load_full_state(state)
        self.scheduler.load_state_dict(state["scheduler"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume; the training goes on as if it had never stopped."""
        self.epoch, self.step, self.metrics = state["epoch"], state["step"], list(state["metrics"])
        if self.shares is not None:
            self.shares = list(state["shares"] or self.shares)
        self.replicas.load_state_dict(state["replicas"])
        self.scheduler.load_state_dict(state["scheduler"])


def _countable(targets: Tensor) -> bool:
    return not targets.is_floating_point()


def _evaluation_batch(x: Tensor) -> int:
    """Samples at a time; a GPU with room takes more of them where they are small, so as not to wait for the next launch."""
    if not x.is_cuda or not len(x) or torch.cuda.mem_get_info(x.device)[0] < _ROOM:
        return _EVALUATION_BATCH
    return min(_MOST_ON_CUDA, max(_EVALUATION_BATCH, 2**25 // x[0].numel()))


@torch.no_grad()
def accuracy_of(model: nn.Module, pair: tuple[Tensor, Tensor], data: DataSet) -> tuple[float, float]:
    """Right answers and questions; ``(0, 0)`` where targets are not classes."""
    x, y = pair
    if not _countable(y):
        return 0.0, 0.0
    training = model.training
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=x.device)
    try:
        batch = _evaluation_batch(x)
        for start in range(0, len(x), batch):
            part = slice(start, start + batch)
            right += (model(data.prepare(x[part])).argmax(-1) == y[part]).sum()
    finally:
        model.train(training)
    return float(right), float(y.numel())
