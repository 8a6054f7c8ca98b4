"""One worker of ``hocket train`` that does not go in step: takes mini-batches by number until there are none left.

Whose turn a mini-batch is, its rate and its randomness are functions of its number, as with virtual workers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hocket.cluster.layout import Layout
from hocket.data import DataSet, Partition, load
from hocket.data.dealing import Dealing, Hand
from hocket.drivers.server_runtime import ServerRuntime
from hocket.errors import HocketError
from hocket.messages import Keys
from hocket.models import build, loss_for
from hocket.noise import step_keys
from hocket.programs.account import Account
from hocket.programs.server.requests import WorkerConfig
from hocket.topology import Gossip
from hocket.train.engines.loop import forked, random_modules
from hocket.train.free_job import FreeJob
from hocket.train.pairs_job import Place
from hocket.train.pairs_worker import DealtPairsJob
from hocket.train.run import AUTOCAST, Settings
from hocket.train.schedule import factor
from hocket.train.simulate import seeded
from hocket.train.throttle import Throttle

_Job = FreeJob | DealtPairsJob


@dataclass(frozen=True)
class Post:
    """Where a worker stands, as plain data: what whoever starts it tells it."""

    settings: dict[str, Any]
    worker: int
    addresses: list[str]
    job: str
    device: str = "cpu"
    data_dir: str | None = None
    keys: str | None = None
    patience_s: float = 10.0
    replaces: bool = False
    record: str | None = None
    """A file for all that happens to the worker, to replay the run."""

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def dealing_of(settings: Settings, data: DataSet) -> Dealing:
    """All mini-batches of a run."""
    plan = settings.plan()
    partition = Partition(len(data.train[0]), settings.workers, plan.batch, plan.seed, plan.rounds)
    total = len(partition) * plan.epochs
    return Dealing(partition, total if plan.max_steps is None else min(total, plan.max_steps))


def work(post: Post) -> None:
    """Train until there is no mini-batch left, and leave."""
    settings = Settings(**post.settings)
    settings.check()
    device = torch.device(post.device)
    data = load(settings.data, None if post.data_dir is None else Path(post.data_dir))
    dealing, loss_of = dealing_of(settings, data), loss_for(data)
    model = seeded(lambda: build(settings.model, data), settings.seed).to(device)
    optimizer = settings.make_optimizer(list(model.parameters()))
    base = [float(group["lr"]) for group in optimizer.param_groups]
    at = factor(settings.schedule, dealing.steps, round(settings.warmup * len(dealing.partition)))
    job = _enter(post, settings, model, optimizer, dealing)
    throttle, account = Throttle(settings.slowdown_of(post.worker)), _account_of(job)
    x, y = (t.to(device) for t in data.train)
    dtype, random = AUTOCAST[settings.autocast], bool(random_modules(model))
    model.train()
    while (hand := _next(job, post.worker, dealing)) is not None:
        throttle.begin()
        key = step_keys(settings.seed, hand.step, settings.workers)[hand.slot : hand.slot + 1]
        inputs = x[hand.indices.to(device)]
        if settings.augment and data.augment is not None:
            inputs = data.augment(inputs.unsqueeze(0), key)[0]
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * at(hand.step)
        job.weight = hand.weight
        optimizer.zero_grad()
        with forked(random, device), torch.autocast(device.type, dtype, enabled=dtype is not None):
            if random:
                torch.manual_seed(int(key[0]))
            loss = loss_of(model(data.prepare(inputs)), y[hand.indices.to(device)])
        loss.backward()
        if settings.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        account.add_loss(float(loss.detach()))
        throttle.end()
        optimizer.step()
    job.flush()
    job.detach()


def _enter(post: Post, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, dealing: Dealing) -> _Job:
    strategy, keys, job = settings.check(), None if post.keys is None else Keys.read(post.keys), bytes.fromhex(post.job)
    options: dict[str, Any] = {
        "nonfinite": settings.nonfinite,
        "seed": settings.seed,
        "cap_bytes": settings.bucket_bytes,
        "first_cap_bytes": settings.first_bucket_bytes,
    }
    if isinstance(strategy.topology, Gossip):
        place = Place(post.worker, settings.workers, job, keys=keys, patience_s=post.patience_s, joins=post.replaces)
        return DealtPairsJob(model, optimizer, strategy, place, post.addresses[0], **options)
    return FreeJob(model, optimizer, strategy, lambda layout: _connect(post, settings, layout, dealing), **options)


def _connect(post: Post, settings: Settings, layout: Layout, dealing: Dealing) -> ServerRuntime:
    config = WorkerConfig(
        settings.check(),
        layout,
        post.worker,
        settings.workers,
        settings.seed,
        post.patience_s,
        total=len(dealing),
        per_epoch=dealing.per_epoch,
        replaces=post.replaces,
    )
    keys = None if post.keys is None else Keys.read(post.keys)
    return ServerRuntime(post.addresses, bytes.fromhex(post.job), config, keys, None if post.record is None else Path(post.record))


def _account_of(job: _Job) -> Account:
    return job.runtime.account if isinstance(job, FreeJob) else job.client.account


def _next(job: _Job, worker: int, dealing: Dealing) -> Hand | None:
    if job.strategy.sync.static_partition:
        number: int | None = dealing.own(worker, job.step)
        if isinstance(job, FreeJob):
            job.runtime.record_batch(number)
    else:
        number = job.runtime.next_batch() if isinstance(job, FreeJob) else job.client.take()
    return None if number is None or number >= len(dealing) else dealing.hand(number)


def read_post(told: Any) -> Post:
    """From :meth:`Post.describe`."""
    try:
        return Post(**told)
    except TypeError:
        raise HocketError(f"Invalid worker configuration from the launcher: {str(told)[:200]}.") from None
