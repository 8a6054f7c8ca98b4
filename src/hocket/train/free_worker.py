"""One worker of ``hocket train`` that does not go in step: takes mini-batches by number until there are none left.

Whose turn a mini-batch is, its rate and its randomness are functions of its number, as with virtual workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hocket.cluster.layout import Buckets, Layout
from hocket.data import DataSet, Partition, load
from hocket.data.batches import BatchSequence, MiniBatch
from hocket.drivers.gossip_runtime import GossipRuntime
from hocket.drivers.server_runtime import ServerRuntime
from hocket.errors import HocketError
from hocket.models import build, loss_for
from hocket.noise import step_keys
from hocket.programs.gossip.links import PeerConfig
from hocket.programs.server.requests import WorkerConfig
from hocket.train.engines.loop import forked, random_modules
from hocket.train.job import Job
from hocket.train.lr_schedule import factor
from hocket.train.pairs_worker import connect_coordinated
from hocket.train.runtimes.peers import peer_runtime
from hocket.train.runtimes.server import server_runtime
from hocket.train.settings import RunSettings
from hocket.train.simulate import seeded
from hocket.train.throttle import Throttle
from hocket.transport import Keys

Link = ServerRuntime | GossipRuntime


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
    incarnation: int = 0
    """How many processes were this worker before; above 0 it replaces one that died."""
    record: str | None = None
    """A file for all that happens to the worker, to replay the run."""

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def batch_sequence(settings: RunSettings, data: DataSet) -> BatchSequence:
    """All mini-batches of a run."""
    plan = settings.plan()
    partition = Partition(len(data.train[0]), settings.workers.count, plan.batch_size, plan.seed, plan.rounds)
    total = len(partition) * plan.epochs
    return BatchSequence(partition, total if plan.max_steps is None else min(total, plan.max_steps))


def work(post: WorkerTask, connect: Callable[[WorkerConfig | PeerConfig], Any] | None = None) -> None:
    """Train until there is no mini-batch left, and leave; ``connect`` makes another link than one of sockets."""
    settings = RunSettings.of(**post.settings)
    device = torch.device(post.device)
    data = load(settings.data.name, None if post.data_dir is None else Path(post.data_dir))
    sequence, loss_of = batch_sequence(settings, data), loss_for(data)
    model = seeded(lambda: build(settings.model, data), settings.seed).to(device)
    optimizer = settings.make_optimizer(list(model.parameters()))
    base = [float(group["lr"]) for group in optimizer.param_groups]
    at = factor(settings.optimizer.lr_schedule, sequence.steps, round(settings.optimizer.warmup * len(sequence.partition)))
    job, link = _enter(post, settings, model, optimizer, sequence, connect)
    throttle, account = Throttle(settings.workers.slowdown_of(post.worker)), link.account
    x, y = (t.to(device) for t in data.train)
    dtype, random = settings.numerics.dtype, bool(random_modules(model))
    model.train()
    while (minibatch := _next(job, link, post.worker, sequence)) is not None:
        throttle.begin()
        key = step_keys(settings.seed, minibatch.step, settings.workers.count)[minibatch.slot : minibatch.slot + 1]
        inputs = x[minibatch.indices.to(device)]
        if settings.data.augment and data.augment is not None:
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
        if settings.optimizer.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.clip)
        account.add_loss(float(loss.detach()))
        throttle.end()
        optimizer.step()
    link.flush()
    job.detach()


def _enter(
    post: WorkerTask,
    settings: RunSettings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sequence: BatchSequence,
    connect: Callable[[WorkerConfig | PeerConfig], Any] | None,
) -> tuple[Job, Link]:
    """A job of this worker, and its link to servers or peers."""
    strategy, keys, job = settings.strategy, None if post.keys is None else Keys.read(post.keys), bytes.fromhex(post.job)
    record = None if post.record is None else Path(post.record)
    links: list[Link] = []

    def connect_server(layout: Layout) -> ServerRuntime:
        config = _server_config(post, settings, layout, sequence)
        links.append(link := ServerRuntime(post.addresses, job, config, keys, record) if connect is None else connect(config))
        return link

    def connect_peer(layout: Layout) -> GossipRuntime:
        rule, joins = strategy.topology.partner_rule, post.incarnation > 0
        config = PeerConfig(
            post.worker, settings.workers.count, rule, settings.seed, post.liveness_timeout_s, post.incarnation, joins
        )
        if connect is None:
            links.append(link := connect_coordinated(strategy, layout, config, post.addresses[0], job, keys, record))
        else:
            links.append(link := connect(config))
        return link

    runtime = peer_runtime(connect_peer) if strategy.runtime == "peers" else server_runtime(connect_server)
    buckets = Buckets(settings.buckets.cap_bytes, settings.buckets.first_cap_bytes)
    options: dict[str, Any] = {"nonfinite": settings.numerics.nonfinite, "seed": settings.seed, "buckets": buckets}
    return Job(model, optimizer, strategy, runtime, **options), links[0]


def _server_config(post: WorkerTask, settings: RunSettings, layout: Layout, sequence: BatchSequence) -> WorkerConfig:
    return WorkerConfig(
        settings.strategy,
        layout,
        post.worker,
        settings.workers.count,
        settings.seed,
        post.liveness_timeout_s,
        total=len(sequence),
        per_epoch=sequence.per_epoch,
        replaces=post.incarnation > 0,
    )


def _next(job: Job, link: Link, worker: int, sequence: BatchSequence) -> MiniBatch | None:
    own = job.strategy.sync.static_partition
    number = link.record_batch(sequence.own(worker, job.step)) if own else link.next_batch()
    return None if number is None or number >= len(sequence) else sequence.minibatch(number)


def read_worker_task(told: Any) -> WorkerTask:
    """From :meth:`WorkerTask.describe`."""
    try:
        return WorkerTask(**told)
    except TypeError:
        raise HocketError(f"Invalid worker configuration from the launcher: {str(told)[:200]}.") from None
