"""One worker of ``hocket train`` that does not go in step: takes mini-batches by number until there are none left.

Whose turn a mini-batch is, its rate and its randomness are functions of its number, as with virtual workers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from hocket.cluster.layout import Buckets, Layout
from hocket.data import DataSet, Partition, load
from hocket.data.batches import BatchSequence, MiniBatch
from hocket.drivers.server_runtime import ServerRuntime
from hocket.errors import HocketError
from hocket.messages import Keys
from hocket.models import build, loss_for
from hocket.noise import step_keys
from hocket.programs.account import Account
from hocket.programs.server.requests import WorkerConfig
from hocket.train.engines.loop import forked, random_modules
from hocket.train.job import Job
from hocket.train.lr_schedule import factor
from hocket.train.pairs_job import PeerConfig
from hocket.train.pairs_worker import DealtPairsJob
from hocket.train.run import AUTOCAST, Settings
from hocket.train.runtimes.server import server_runtime
from hocket.train.simulate import seeded
from hocket.train.throttle import Throttle


class BatchSource(Protocol):
    """Where a worker's mini-batches come from, and what it tells in the end."""

    @property
    def account(self) -> Account:
        """The worker's own figures."""

    def next_batch(self) -> int | None:
        """The number of the next mini-batch; None when there is none left."""

    def record_batch(self, number: int | None) -> int | None:
        """The number of a mini-batch that the worker takes without asking."""

    def flush(self) -> None:
        """There is no mini-batch left."""


@dataclass(frozen=True)
class WorkerTask:
    """Where a worker stands, as plain data: what whoever starts it tells it."""

    settings: dict[str, Any]
    worker: int
    addresses: list[str]
    job: str
    device: str = "cpu"
    data_dir: str | None = None
    keys: str | None = None
    liveness_timeout_s: float = 10.0
    replaces: bool = False
    record: str | None = None
    """A file for all that happens to the worker, to replay the run."""

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def batch_sequence(settings: Settings, data: DataSet) -> BatchSequence:
    """All mini-batches of a run."""
    plan = settings.plan()
    partition = Partition(len(data.train[0]), settings.workers, plan.batch_size, plan.seed, plan.rounds)
    total = len(partition) * plan.epochs
    return BatchSequence(partition, total if plan.max_steps is None else min(total, plan.max_steps))


def work(post: WorkerTask) -> None:
    """Train until there is no mini-batch left, and leave."""
    settings = Settings(**post.settings)
    settings.check()
    device = torch.device(post.device)
    data = load(settings.data, None if post.data_dir is None else Path(post.data_dir))
    sequence, loss_of = batch_sequence(settings, data), loss_for(data)
    model = seeded(lambda: build(settings.model, data), settings.seed).to(device)
    optimizer = settings.make_optimizer(list(model.parameters()))
    base = [float(group["lr"]) for group in optimizer.param_groups]
    at = factor(settings.lr_schedule, sequence.steps, round(settings.warmup * len(sequence.partition)))
    job, source = _enter(post, settings, model, optimizer, sequence)
    throttle, account = Throttle(settings.slowdown_of(post.worker)), source.account
    x, y = (t.to(device) for t in data.train)
    dtype, random = AUTOCAST[settings.autocast], bool(random_modules(model))
    model.train()
    while (minibatch := _next(job, source, post.worker, sequence)) is not None:
        throttle.begin()
        key = step_keys(settings.seed, minibatch.step, settings.workers)[minibatch.slot : minibatch.slot + 1]
        inputs = x[minibatch.indices.to(device)]
        if settings.augment and data.augment is not None:
            inputs = data.augment(inputs.unsqueeze(0), key)[0]
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * at(minibatch.step)
        job.weight = minibatch.weight
        optimizer.zero_grad()
        with forked(random, device), torch.autocast(device.type, dtype, enabled=dtype is not None):
            if random:
                torch.manual_seed(int(key[0]))
            loss = loss_of(model(data.prepare(inputs)), y[minibatch.indices.to(device)])
        loss.backward()
        if settings.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        account.add_loss(float(loss.detach()))
        throttle.end()
        optimizer.step()
    source.flush()
    job.detach()


def _enter(
    post: WorkerTask, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, sequence: BatchSequence
) -> tuple[Job | DealtPairsJob, BatchSource]:
    strategy, keys, job = settings.check(), None if post.keys is None else Keys.read(post.keys), bytes.fromhex(post.job)
    options: dict[str, Any] = {"nonfinite": settings.nonfinite, "seed": settings.seed}
    caps = settings.bucket_cap_bytes, settings.first_bucket_cap_bytes
    if strategy.runtime == "peers":
        place = PeerConfig(
            post.worker, settings.workers, job, keys=keys, liveness_timeout_s=post.liveness_timeout_s, joins=post.replaces
        )
        options |= {"bucket_cap_bytes": caps[0], "first_bucket_cap_bytes": caps[1]}
        peer = DealtPairsJob(model, optimizer, strategy, place, post.addresses[0], **options)
        return peer, peer
    links: list[ServerRuntime] = []

    def connect(layout: Layout) -> ServerRuntime:
        links.append(_connect(post, settings, layout, sequence))
        return links[0]

    return Job(model, optimizer, strategy, server_runtime(connect), buckets=Buckets(*caps), **options), links[0]


def _connect(post: WorkerTask, settings: Settings, layout: Layout, sequence: BatchSequence) -> ServerRuntime:
    config = WorkerConfig(
        settings.check(),
        layout,
        post.worker,
        settings.workers,
        settings.seed,
        post.liveness_timeout_s,
        total=len(sequence),
        per_epoch=sequence.per_epoch,
        replaces=post.replaces,
    )
    keys = None if post.keys is None else Keys.read(post.keys)
    return ServerRuntime(post.addresses, bytes.fromhex(post.job), config, keys, None if post.record is None else Path(post.record))


def _next(job: Job | DealtPairsJob, source: BatchSource, worker: int, sequence: BatchSequence) -> MiniBatch | None:
    own = job.strategy.sync.static_partition
    number = source.record_batch(sequence.own(worker, job.step)) if own else source.next_batch()
    return None if number is None or number >= len(sequence) else sequence.minibatch(number)


def read_worker_config(told: Any) -> WorkerTask:
    """From :meth:`WorkerTask.describe`."""
    try:
        return WorkerTask(**told)
    except TypeError:
        raise HocketError(f"Invalid worker configuration from the launcher: {str(told)[:200]}.") from None
