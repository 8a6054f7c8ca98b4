"""One run from its settings: what ``hocket train`` does in every process, real or virtual."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hocket.cluster.base import Cluster
from hocket.cluster.elastic import ElasticCluster
from hocket.cluster.join import find_rendezvous
from hocket.cluster.layout import Layout
from hocket.cluster.message import ring_bytes
from hocket.data import DataSet, load
from hocket.errors import SettingError
from hocket.files import CannotWrite
from hocket.models import loss_for
from hocket.split.mesh import Mesh
from hocket.split.options import Pipeline
from hocket.train.checkpoints import LEAST_KEPT, Checkpoints
from hocket.train.checks import mention_steps
from hocket.train.elastic import MOST_WORKERS, Elastic
from hocket.train.engines import Engine, VmapEngine, choose
from hocket.train.hosted import Replicas
from hocket.train.leaving import leaving
from hocket.train.loop import EpochLoop, Progress, Training
from hocket.train.record import CHECKPOINTS, Record, versions
from hocket.train.replicas import LiveReplica, Loss
from hocket.train.resume import Resumption, facts_of, mean_weights, states_of
from hocket.train.runtimes.collective import CollectiveRuntime
from hocket.train.setting_groups import SplitSettings
from hocket.train.settings import RunSettings
from hocket.train.simulate import train_rows
from hocket.train.trial import check_own

Engines = dict[tuple[Any, ...], Engine]


def make_training(settings: RunSettings, cluster: Cluster, data: DataSet, engines: Engines | None = None) -> EpochLoop:
    """A training ready to run on the workers hosted here; ``engines`` keeps gradient engines from one training to the next."""
    strategy, workers, plan = settings.strategy, settings.workers, settings.plan()
    steps = plan.sequence(data, workers.count).steps  # refuses too few samples
    settings = replace(settings, optimizer=settings.optimizer.with_steps(steps))
    loss, model = loss_for(data), settings.build(data).to(cluster.device)
    optimizer = settings.optimizer_for(model)
    check_own(settings.model, data, settings.data.batch_size, model)
    options: dict[str, Any] = {
        "clip": settings.optimizer.clip,
        "nonfinite": settings.numerics.nonfinite,
        "buckets": settings.buckets,
    }
    own = {"seed": settings.seed, "autocast": settings.numerics.dtype, **options}
    # One real worker has nobody to talk to.
    asynchronous = strategy.runtime != "collective" and (workers.virtual or cluster.size > 1)
    if asynchronous and cluster.rows != cluster.size:
        raise SettingError(f"{strategy}: its workers are processes of their own; leave <processes> out, or use <virtual:True>.")
    if settings.split is not None and not asynchronous and not cluster.elastic:
        return _on_mesh(settings, settings.split, cluster, data, model, loss, own)
    training: EpochLoop
    if cluster.elastic:
        return _elastic(settings, cluster, data, model, loss, own)
    sharded = bool(settings.sharding.named) and cluster.size > 1 and not asynchronous
    if sharded or (cluster.rows == 1 and not workers.virtual):
        training = Training(_replica(settings, cluster, model, loss, sharded, own), cluster, data, loss, plan)
    else:
        kept = {} if engines is None else engines
        make = lambda layout: _engine(settings, model, loss, layout, cluster, kept)  # noqa: E731
        training = train_rows(lambda: model, loss, optimizer, data, strategy, cluster, plan, engine=make, **options)
    if cluster.workers.start == 0 and not asynchronous:
        mention_steps(strategy, training.steps, cluster.size)
    return training


def _on_mesh(
    settings: RunSettings,
    split: SplitSettings,
    world: Cluster,
    data: DataSet,
    model: nn.Module,
    loss: Loss,
    options: dict[str, Any],
) -> Training:
    """Replicas that are split; the workers of the loop are the replicas."""
    from hocket.train.split_job import split_job  # loaded only where a model is split
    from hocket.train.split_replicas import MeshReplica

    where = settings.strategy, world, *_split(settings, split, data, world, loss)
    steps = {name: options.pop(name) for name in ("clip", "autocast")}
    make = lambda optimizer: split_job(model, optimizer, *where, zero=settings.sharding.zero, **options)  # noqa: E731
    replica = MeshReplica(model, loss, settings.optimizer_for(model), make, **steps)
    return Training(replica, replica.cluster, data, loss, settings.plan())


def _split(settings: RunSettings, split: SplitSettings, data: DataSet, world: Cluster, loss: Loss) -> tuple[Mesh, Pipeline]:
    first = torch.arange(min(settings.data.batch_size, len(data.samples)))
    sample = data.prepare(data.samples[first][0].to(world.device))
    return replace(split.mesh, plan=split.kinds), replace(split.pipeline(sample), loss=loss)


def _elastic(
    settings: RunSettings, cluster: Cluster, data: DataSet, model: nn.Module, loss: Loss, options: dict[str, Any]
) -> EpochLoop:
    """The training of an elastic run's worker."""
    from hocket.train.elastic_loop import ElasticTraining  # sockets are loaded only where they are needed
    from hocket.train.runtimes.elastic import elastic_runtime
    from hocket.transport import Keys

    assert isinstance(cluster, ElasticCluster)
    found = find_rendezvous(os.environ)
    assert found is not None
    elastic, strategy = Elastic(1, MOST_WORKERS, settings.optimizer.scale_lr, settings.workers.count), settings.strategy
    if settings.split is not None:
        from hocket.train.elastic_split import elastic_split_job
        from hocket.train.split_replicas import MeshReplica

        where = strategy, cluster, *_split(settings, settings.split, data, cluster, loss), found, elastic, os.environ
        steps = {name: options.pop(name) for name in ("clip", "autocast")}
        make = lambda optimizer: elastic_split_job(model, optimizer, *where, **options)  # noqa: E731
        split = MeshReplica(model, loss, settings.optimizer_for(model), make, **steps)
        return ElasticTraining(split, data, loss, settings.plan())
    keys, slowdown = None if cluster.keys is None else Keys.read(cluster.keys), settings.workers.slowdown_of(found.member or 0)
    runtime = elastic_runtime(cluster, found, elastic, keys)
    replica = LiveReplica(model, loss, settings.optimizer_for(model), strategy, runtime, slowdown=slowdown, **options)
    return ElasticTraining(replica, data, loss, settings.plan())


def _replica(
    settings: RunSettings, cluster: Cluster, model: nn.Module, loss: Loss, sharded: bool, options: dict[str, Any]
) -> Replicas:
    """The worker of this process; ``sharded``: it keeps a part of what would be the same on all."""
    sharding, optimizer, strategy = settings.sharding, settings.optimizer_for(model), settings.strategy
    if sharded and (cluster.rows != 1 or not cluster.has_process_group):
        raise SettingError(f"{sharding.named}: a worker that keeps a part has a process of its own; leave <processes> out.")
    if sharded and sharding.fsdp:
        from hocket.train.runtimes.fsdp import FsdpRuntime  # loaded only where something is sharded
        from hocket.train.split_replicas import FullReplica

        del options["buckets"]
        return FullReplica(model, loss, optimizer, strategy, FsdpRuntime(cluster), **options)
    runtime, slowdown = CollectiveRuntime(cluster, sharding.zero * sharded), settings.workers.slowdown_of(cluster.workers.start)
    return LiveReplica(model, loss, optimizer, strategy, runtime, slowdown=slowdown, **options)


def explanation(settings: RunSettings, world: Cluster, data: DataSet) -> str:
    """How the model would be split, and why; all processes must ask together."""
    training = make_training(settings, world, data)
    assert isinstance(training, Training)
    job = training.replicas.job
    if job is None or settings.split is None:
        raise SettingError("Nothing is split; add <mesh:pipeline=2>, for example.")
    return "\n\n".join([*job.explain(), job.picture()])


def _engine(settings: RunSettings, model: nn.Module, loss: Loss, layout: Layout, cluster: Cluster, engines: Engines) -> Engine:
    """The engine of an earlier training that differs in nothing an engine depends on, or a new one; compiling takes seconds.

    An engine reads what is not trained from the model it was made with, so models with such parts get one of their own.
    """
    numerics = settings.numerics
    where = (cluster.rows, str(cluster.device))
    key = (settings.model, settings.data.name, *where, numerics.autocast, numerics.engine, layout.digest())
    trained = {s.name for b in layout.buckets for s in b.slots}
    if key in engines and trained == {name for name, _ in model.named_parameters()}:
        return engines[key]
    engine = choose(model, loss, layout, cluster.rows, cluster.device, numerics.engine, autocast=numerics.dtype)
    if isinstance(engine, VmapEngine):  # a loop engine saves no time when it is kept
        engines[key] = engine
    return engine


def run(
    settings: RunSettings,
    cluster: Cluster,
    data_dir: Path | None = None,
    out: Path | None = None,
    resume: bool = False,
    watch: Callable[[Progress], None] = lambda _: None,
    on_epoch: Callable[[dict[str, Any]], None] = lambda _: None,
    data: DataSet | None = None,
    checkpoints: bool = True,
    engines: Engines | None = None,
    briefly: bool = False,
    note: Callable[[str], None] = lambda _: None,
    keep: int = LEAST_KEPT,
    leaves: bool = False,
) -> EpochLoop:
    """Train as ``settings`` say, leaving records in ``out``; ``data`` is loaded by its name unless given.

    ``checkpoints``: one after every epoch, the last ``keep`` of which are kept; a full disk then does not end the training.
    ``briefly``: nothing is evaluated but the mean model at the end. ``note`` is called, on the first process, with remarks: who
    holds what of a split model, which checkpoint the run goes on from, which one could not be written. ``leaves``: SIGTERM and
    SIGUSR1 to any process make all write a checkpoint at the end of a step, and leave."""
    process = cluster.process
    record = None if out is None else Record(out, int(cluster.elastic) or process, resume)
    data = load(settings.data.name, data_dir) if data is None else data
    with warnings.catch_warnings():
        if process:
            warnings.simplefilter("ignore")
        training = make_training(settings, cluster, data, engines)
    if settings.split is not None and not cluster.elastic:
        picture = training.replicas.job.picture()
        if process == 0:
            note(picture)
    if briefly:
        training.plan = replace(training.plan, evaluate=False, worst=False)
    if record is None:
        for metrics in training.run(watch):
            on_epoch(metrics)
        return training
    with Checkpoints(record.folder / CHECKPOINTS, cluster, keep, note) as kept:
        record.process, described = cluster.rank, describe(settings, cluster, training)
        here = settings, cluster, training, described
        go_on = lambda *who: Resumption(*here, *who).load(kept, record, repeated(settings), note)  # noqa: E731
        save = _saver(*here, kept, go_on, resume, checkpoints)
        record.write_run(described)
        with leaving(training, cluster, kept, save, leaves and checkpoints) as (watching, after_epoch):
            for metrics in training.run(watching(watch)):
                record.process = cluster.process  # elastic workers are numbered anew when one is lost
                _write_metrics(record, training, checkpoints, note)
                if checkpoints:
                    save()
                on_epoch(metrics)
                after_epoch()
    if checkpoints and (weights := mean_weights(settings, cluster, training)) is not None:
        record.write_weights(weights)
    if settings.split is not None and isinstance(training, Training):
        assert training.replicas.job is not None
        timeline = training.replicas.job.timeline()
        record.write_timeline(None if timeline is None else timeline.to_dict())
    return training


def _saver(
    settings: RunSettings,
    cluster: Cluster,
    training: EpochLoop,
    described: dict[str, Any],
    kept: Checkpoints,
    go_on: Callable[[int, int], int],
    resume: bool,
    checkpoints: bool,
) -> Callable[..., None]:
    """What writes one more checkpoint; before that ``go_on`` is called, if this is to."""
    if cluster.elastic:
        from hocket.train.elastic_checkpoints import begun  # sockets are loaded only where they are needed

        return begun(training, kept, described, go_on, resume, checkpoints)
    if resume:
        go_on(cluster.rank, settings.workers.count)

    def save(taken: int = 0) -> None:
        kept.save(states_of(settings, cluster, training), facts_of(settings, cluster, training, described, taken))

    return save


def _write_metrics(record: Record, training: EpochLoop, goes_on: bool, note: Callable[[str], None]) -> None:
    """Write the lines so far; where training ``goes_on`` without them, the next epoch tries again."""
    try:
        record.write_metrics(training.metrics)
    except CannotWrite as error:
        if not goes_on or training.over:
            raise
        note(f"{error.cause}; the lines are written later, and training goes on.")


def describe(settings: RunSettings, cluster: Cluster, training: EpochLoop) -> dict[str, Any]:
    """run.json: everything needed to repeat the run."""
    clock = cluster.clock
    where = {
        "kind": "virtual" if settings.workers.virtual else "processes",
        "workers": settings.workers.count,
        "processes": cluster.processes,
        "device": str(cluster.device),
        "backend": cluster.backend,
        "step_s": None if clock is None else clock.step_s,
    }
    return describe_run(settings, where, training.steps, training.replicas.layout)


def describe_run(settings: RunSettings, where: dict[str, Any], steps: int, layout: Layout) -> dict[str, Any]:
    """The same for a run of ``steps`` steps on a cluster described as ``where``."""
    strategy = settings.resolved
    return {
        **repeated(settings),
        "exchange": strategy.exchanged,
        "cluster": where,
        "steps": steps,
        "buckets": layout.describe(),
        "parameters": layout.parameters,
        "versions": versions(),
        "citations": strategy.citation(),
    }


def repeated(settings: RunSettings) -> dict[str, Any]:
    """What a run must have in common with the one it goes on with. Of files there is what they said: ``spec`` (the
    cluster) and ``plan``."""
    spec, split = settings.spec, settings.split
    given = {name: value for name, value in settings.recorded().items() if name not in ("cluster", "plan_file")}
    return {**given, "plan": None if split is None else split.kinds, "spec": None if spec is None else spec.describe()}


def bulk_bytes(training: EpochLoop) -> int:
    """What ``bulk + allreduce`` would send in the same number of steps, all workers together (computed, not measured)."""
    split = training.replicas.split
    if split is not None:  # as if each process had a whole model
        processes = split.mesh.size * (training.cluster.size if training.cluster.elastic else 1)
        return ring_bytes(split.whole_bytes, processes) * training.step * processes
    return bulk_bytes_of(training.replicas.layout, training.cluster.size, training.step)


def bulk_bytes_of(layout: Layout, workers: int, steps: int) -> int:
    """The same for ``workers`` with this layout."""
    return sum(ring_bytes(b.size * b.dtype.itemsize, workers) for b in layout.buckets) * steps * workers
