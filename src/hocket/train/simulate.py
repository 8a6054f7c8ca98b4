"""``simulate``: hundreds of virtual workers in this process, with the strategy's own code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Buckets, Layout
from hocket.cluster.ledger import Entry
from hocket.cluster.spec import ClusterSpec
from hocket.cluster.virtual import VirtualCluster
from hocket.data.base import DataSet, identity
from hocket.data.fields import Unpacking, as_packed
from hocket.errors import HocketError
from hocket.picture import Chart
from hocket.strategy import Strategy
from hocket.train import curves
from hocket.train.asynchronous import DEFAULT_CLUSTER, AsyncReplicas, AsyncSimulation
from hocket.train.balance import check_balance
from hocket.train.checks import mention_steps
from hocket.train.engines import Engine, engine_of
from hocket.train.evaluate import Metric
from hocket.train.loop import EpochLoop, Progress, Training, TrainingPlan, check_count
from hocket.train.lr_schedule import lr_scale, warmup_start
from hocket.train.replicas import Factory, Loss, StackedReplicas
from hocket.train.trial import try_batch


@dataclass
class Run:
    """The result of a simulated training: ``metrics`` one dict per epoch, the mean ``model``, the ``ledger``'s totals."""

    metrics: list[dict[str, Any]]
    model: nn.Module
    ledger: Entry
    replicas: Any
    """The workers' rows of weights."""
    strategy: str = ""
    workers: int = 0
    cluster: str = ""
    """The described cluster that seconds are predicted for."""

    def __repr__(self) -> str:
        return f"Run({self.strategy}, {self.workers} virtual workers, {len(self.metrics)} epochs)"

    def _repr_html_(self) -> str:
        return curves.table_of(self)

    def plot(self, *others: Run) -> Chart:
        """This run, and others beside it: accuracy (or a loss) per epoch and against predicted seconds, or MB sent.

        In a notebook the result is shown; ``.save("run.png")`` writes it. Needs matplotlib (``hocket[plot]``).
        """
        return curves.plot_of([self, *others])

    @property
    def accuracy(self) -> float | None:
        """Of the mean model on the test set, after the last epoch."""
        return self.metrics[-1]["accuracy"]

    @property
    def test_loss(self) -> float | None:
        """Of the mean model on the test set, after the last epoch."""
        return self.metrics[-1]["test_loss"]

    @property
    def perplexity(self) -> float | None:
        """``exp(test_loss)``, of a language model."""
        return self.metrics[-1].get("perplexity")

    @property
    def metric(self) -> float | None:
        """The value of ``metric`` for the mean model after the last epoch."""
        return self.metrics[-1].get("metric")


def simulate(
    model: Callable[[], nn.Module],
    loss: Loss,
    train_set: Any,
    test_set: Any = None,
    *,
    metric: Metric | None = None,
    strategy: str | Strategy = "bulk + allreduce",
    workers: int = 4,
    optimizer: Factory = lambda params: torch.optim.SGD(params, 0.1),
    batch_size: int = 100,
    epochs: int = 1,
    seed: int = 0,
    lr_schedule: str = "constant",
    warmup_epochs: float = 0.0,
    scale_lr: str = "none",
    max_steps: int | None = None,
    clip: float | None = None,
    autocast: torch.dtype | None = None,
    nonfinite: str = "raise",
    device: torch.device | str = "cpu",
    engine: str = "auto",
    host_size: int | None = None,
    cluster: str | Path | ClusterSpec | None = None,
    last: str = "even",
    balance: str = "even",
    partition: str = "iid",
    evaluate: bool = True,
    bucket_cap_bytes: int | None = None,
    first_bucket_cap_bytes: int | None = None,
    watch: Callable[[Progress], None] = lambda _: None,
) -> Run:
    """Train ``model()`` with ``workers`` virtual workers and return metrics, mean model and ledger.

    ``train_set`` and ``test_set`` are map-style data sets or pairs (inputs, targets); inputs are a tensor, a dict of tensors
    (the model's keyword arguments) or a tuple (positional ones). Every worker steps with ``optimizer`` on its own
    ``batch_size`` samples; exchanges are those of ``strategy``. ``loss(model(inputs), targets)`` is one number, the mean over a
    batch. After every epoch the mean model is evaluated on ``test_set`` (not with ``evaluate=False``): test loss, accuracy
    where the output is logits of classes or has them as ``logits``, and ``metric(output, targets)``. One batch is tried first.
    ``scale_lr`` multiplies all rates by the workers (``linear``) or their root (``sqrt``). ``cluster`` (preset, file, or
    :class:`hocket.ClusterSpec`) is where they would run: seconds are predicted for it (else None), and ``balance="speed"``
    divides rounds by speed. ``partition="dirichlet(0.5)"`` or ``"label(2)"``: samples of each worker's own, by label.

    >>> x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0)); y = (x.sum(1) > 0).long()
    >>> run = simulate(lambda: nn.Linear(5, 2), nn.functional.cross_entropy, (x, y), (x, y), strategy="local(2) + gossip",
    ...                workers=8, optimizer=lambda p: torch.optim.SGD(p, 1.0), batch_size=4, epochs=10)
    >>> run.accuracy > 0.9, run.ledger.bytes_sent > 0
    (True, True)
    """
    check_count("workers", workers)
    check_balance(balance, parsed := Strategy.parse(strategy), partition)
    plan = TrainingPlan(epochs, batch_size, seed, lr_schedule, warmup_epochs, max_steps, True, last, evaluate, evaluate)
    plan = replace(plan, balance=balance, partition=partition, warmup_start=warmup_start(scale_lr, workers))
    options: dict[str, Any] = {"clip": clip, "autocast": autocast, "nonfinite": nonfinite, "engine": engine, "metric": metric}
    where = VirtualCluster(workers, device, host_size, spec=_spec(cluster, parsed), seed=seed)
    (data, made), scaled = _data(train_set, test_set, model), _scaled(optimizer, lr_scale(scale_lr, workers))
    buckets = Buckets(bucket_cap_bytes, first_bucket_cap_bytes)
    training = train_rows(made, loss, scaled, data, parsed, where, plan, buckets=buckets, **options)
    mention_steps(parsed, training.steps, workers)
    return _carry_out(training, parsed, watch)


def _scaled(optimizer: Factory, scale: float) -> Factory:
    """A factory like ``optimizer``, with all rates multiplied."""
    if scale == 1.0:
        return optimizer

    def made(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        built = optimizer(params)
        for group in built.param_groups:
            group["lr"] = group["lr"] * scale
        return built

    return made


def _carry_out(training: EpochLoop, strategy: Strategy, watch: Callable[[Progress], None]) -> Run:
    plan, clock = training.plan, training.cluster.clock
    try_batch(training.replicas.model, training.evaluator, plan.batch_size, plan.evaluate)
    for _ in training.run(watch):
        pass
    who = str(strategy), training.cluster.size, "" if clock is None else clock.spec.name
    return Run(training.metrics, mean_model(training), training.ledger.total(), training.replicas, *who)


def _spec(cluster: str | Path | ClusterSpec | None, strategy: Strategy) -> ClusterSpec | None:
    """The described cluster; workers that do not step together need one for their clocks."""
    if cluster is None and strategy.runtime == "collective":
        return None
    return ClusterSpec.parse(DEFAULT_CLUSTER if cluster is None else cluster)


def _data(train_set: Any, test_set: Any, model: Callable[[], nn.Module]) -> tuple[DataSet, Callable[[], nn.Module]]:
    """Both sets as tensors, and what makes a model that takes them."""
    train, fields = as_packed(train_set)
    test, others = (None, fields) if test_set is None else as_packed(test_set)
    if fields != others:
        raise HocketError("The inputs of the training set and of the test set differ in names, types or shapes: make them equal.")
    data = DataSet("simulated", train, test, 0, identity)
    if fields is None:
        return data, model

    def made() -> nn.Module:
        built = model()
        return Unpacking(built, fields) if isinstance(built, nn.Module) else built

    return data, made


def train_rows(
    model: Callable[[], nn.Module],
    loss: Loss,
    optimizer: Factory,
    data: DataSet,
    strategy: Strategy,
    cluster: Cluster,
    plan: TrainingPlan,
    *,
    engine: str | Callable[[Layout], Engine] = "auto",
    autocast: torch.dtype | None = None,
    metric: Metric | None = None,
    **options: Any,
) -> EpochLoop:
    """A training of the workers that ``cluster`` hosts here, as rows: in step, or not, as ``strategy`` says."""
    built = seeded(model, plan.seed).to(cluster.device)
    make = engine_of(engine, built, loss, cluster, autocast)
    if strategy.runtime == "collective":
        replicas = StackedReplicas(built, loss, optimizer, strategy, cluster, seed=plan.seed, engine=make, **options)
        return Training(replicas, cluster, data, loss, plan, metric)
    rows = AsyncReplicas(built, optimizer, strategy, cluster, engine=make, **options)
    return AsyncSimulation(rows, cluster, data, loss, plan, metric)


def seeded(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model with weights drawn from ``seed``, torch's own random state left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        built = model()
    if not isinstance(built, nn.Module):
        raise HocketError(f"The model factory must return an nn.Module, got {type(built).__name__}; pass a class or a function.")
    return built


def mean_model(training: EpochLoop) -> nn.Module:
    """A copy of the mean model of all workers, or of the servers' global weights."""
    with training.averaged() as model:
        return copy.deepcopy(model.model if isinstance(model, Unpacking) else model)
