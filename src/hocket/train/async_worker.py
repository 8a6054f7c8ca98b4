"""An asynchronous worker of ``hocket train``: takes mini-batches by number until there are none left.

Whose turn a mini-batch is, its rate and its randomness are functions of its number, as with virtual workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hocket.cluster.layout import Layout
from hocket.data import DataSet, load
from hocket.data.batches import BatchSequence, MiniBatch
from hocket.drivers.gossip_runtime import CoordinatorLink, GossipRuntime
from hocket.drivers.machines import ANY_PORT
from hocket.drivers.server_runtime import ServerRuntime
from hocket.drivers.worker_runtime import WorkerRuntime
from hocket.errors import HocketError
from hocket.files import read_safetensors
from hocket.models import loss_for
from hocket.programs.gossip.links import PeerConfig
from hocket.programs.server.requests import WorkerConfig
from hocket.programs.server.wire import link_bytes
from hocket.train.engines.loop import draws_numbers, seeded_loss
from hocket.train.job import Job
from hocket.train.runtimes.messages import peer_runtime, server_runtime
from hocket.train.settings import RunSettings
from hocket.train.throttle import Throttle
from hocket.train.worker_states import StateFiles, StateWriter, begin_with
from hocket.transport import Keys


@dataclass(frozen=True)
class WorkerTask:
    """A worker's task as plain data, which the process that starts it sends."""

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
    epochs_done: int = 0
    weights: str | None = None
    """A file of weights to begin with, in a run that goes on after so many epochs."""
    begins: str | None = None
    """A file of what each worker of a run that goes on takes over beside the weights."""
    states: str | None = None
    """A folder for what this worker holds and owes after every epoch."""
    run: str = ""
    """Which of the runs in that folder this is."""
    bind: str = ANY_PORT
    """Where a worker that others call listens."""

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def batch_sequence(settings: RunSettings, data: DataSet, epochs_done: int = 0) -> BatchSequence:
    """All mini-batches of a run, after those of the first epochs."""
    return settings.plan().sequence(data, settings.workers.count, epochs_done)


def work(task: WorkerTask, connect: Callable[[WorkerConfig | PeerConfig], Any] | None = None) -> None:
    """Train until there is no mini-batch left, and leave; ``connect`` makes the link, by default one of sockets."""
    settings = RunSettings.of(**task.settings)
    device = torch.device(task.device)
    data = load(settings.data.name, None if task.data_dir is None else Path(task.data_dir))
    sequence, loss_of = batch_sequence(settings, data, task.epochs_done), loss_for(data)
    model = settings.build(data).to(device)
    if task.weights is not None:
        model.load_state_dict(read_safetensors(_content(Path(task.weights))))
    optimizer = settings.optimizer_for(model)(list(model.parameters()))
    base = [float(group["lr"]) for group in optimizer.param_groups]
    plan = settings.plan()
    at = plan.lr_factor(sequence)
    residuals = None if task.begins is None else begin_with(Path(task.begins), model, optimizer)
    job, link = _enter(task, settings, model, optimizer, sequence, connect)
    if residuals is not None:
        link.begin_with(residuals)
    look = _state_writer(task, job, link)
    throttle, account = Throttle(settings.workers.slowdown_of(task.worker)), link.account
    train = data.samples.on(device)
    random = draws_numbers(model, loss_of)
    model.train()
    while (minibatch := _next(job, link, task.worker, sequence)) is not None:
        look(minibatch.epoch)
        throttle.begin()
        inputs, targets, key = plan.samples(minibatch, data, train, settings.workers.count)
        account.add_data(**train.figures())
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * at(minibatch.step)
        job.weight = minibatch.weight
        optimizer.zero_grad()
        loss = seeded_loss(model, loss_of, inputs, targets, key[0], random, settings.numerics.dtype)
        loss.backward()
        if settings.optimizer.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.clip)
        account.add_loss(float(loss.detach()))
        throttle.end()
        optimizer.step()
    link.flush()
    look(-(-sequence.steps // len(sequence.partition)))
    job.detach()


def _state_writer(task: WorkerTask, job: Job, link: WorkerRuntime) -> Callable[[int], None]:
    """A function to call with the number of epochs done, which writes this worker's state where the run keeps it."""
    if task.states is None:
        return lambda done: None
    return StateWriter(StateFiles(Path(task.states), task.run), job, link, task.epochs_done).look


def _enter(
    task: WorkerTask,
    settings: RunSettings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sequence: BatchSequence,
    connect: Callable[[WorkerConfig | PeerConfig], Any] | None,
) -> tuple[Job, WorkerRuntime]:
    """Make this worker's job and its link to servers or peers."""
    strategy, numerics = settings.strategy, settings.numerics

    def connect_peer(layout: Layout) -> GossipRuntime:
        config = _peer_config(task, settings)
        return _connect_peer(task, settings, layout, config) if connect is None else connect(config)

    def connect_server(layout: Layout) -> ServerRuntime:
        config = _server_config(task, settings, layout, sequence)
        return _connect_server(task, config) if connect is None else connect(config)

    runtime = peer_runtime(connect_peer) if strategy.runtime == "peers" else server_runtime(connect_server)
    job = Job(model, optimizer, strategy, runtime, nonfinite=numerics.nonfinite, seed=settings.seed, buckets=settings.buckets)
    return job, runtime.link


def _peer_config(task: WorkerTask, settings: RunSettings) -> PeerConfig:
    rule, world, joins = settings.strategy.topology.partner_rule, settings.workers.count, task.incarnation > 0
    return PeerConfig(task.worker, world, rule, settings.seed, task.liveness_timeout_s, task.incarnation, joins)


def _connect_peer(task: WorkerTask, settings: RunSettings, layout: Layout, config: PeerConfig) -> GossipRuntime:
    """A worker without servers finds the others through the coordinator."""
    job, keys, record = _link_options(task)
    most = link_bytes(settings.strategy, layout)
    coordinator = CoordinatorLink(task.addresses[0], job, task.worker, keys, most, task.incarnation)
    return GossipRuntime(config, job, most, coordinator=coordinator, bind=task.bind, keys=keys, record=record)


def _server_config(task: WorkerTask, settings: RunSettings, layout: Layout, sequence: BatchSequence) -> WorkerConfig:
    return WorkerConfig(
        settings.strategy,
        layout,
        task.worker,
        settings.workers.count,
        settings.seed,
        task.liveness_timeout_s,
        total=len(sequence),
        per_epoch=sequence.per_epoch,
        replaces=task.incarnation > 0,
    )


def _connect_server(task: WorkerTask, config: WorkerConfig) -> ServerRuntime:
    job, keys, record = _link_options(task)
    return ServerRuntime(task.addresses, job, config, keys, record)


def _link_options(task: WorkerTask) -> tuple[bytes, Keys | None, Path | None]:
    """The id of the job, its keys and the file for the recording."""
    keys = None if task.keys is None else Keys.read(task.keys)
    return bytes.fromhex(task.job), keys, None if task.record is None else Path(task.record)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise HocketError(
            f"Worker cannot read {path} ({error.strerror}): put the run's folder where all machines can read it."
        ) from None


def _next(job: Job, link: WorkerRuntime, worker: int, sequence: BatchSequence) -> MiniBatch | None:
    own = job.strategy.sync.static_partition
    number = link.record_batch(sequence.own(worker, job.step)) if own else link.next_batch()
    return None if number is None or number >= len(sequence) else sequence.minibatch(number)


def read_worker_task(fields: Any) -> WorkerTask:
    """From :meth:`WorkerTask.describe`."""
    try:
        return WorkerTask(**fields)
    except TypeError:
        raise HocketError(f"Invalid worker configuration from the launcher: {str(fields)[:200]}.") from None
