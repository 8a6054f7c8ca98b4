"""The functions a training script calls: ``init``, ``parallelize``, ``distribute``."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hocket.cluster.base import Cluster
from hocket.cluster.dtensor import is_sharded
from hocket.cluster.join import RendezvousInfo, find_rendezvous, join
from hocket.cluster.layout import Buckets, Layout
from hocket.data.distribute import LoaderPositions, distribute_loader, distribute_stream, distributed_length
from hocket.data.elastic_stream import SampleStream
from hocket.errors import HocketError
from hocket.split.materialize import materialize
from hocket.split.mesh import Mesh, forget
from hocket.split.options import Pipeline, refuse_split_options
from hocket.split.sharded import refuse_sharding
from hocket.strategy import Strategy
from hocket.train.audit import AUDIT, Checks
from hocket.train.checks import needs_servers, refuse_twice
from hocket.train.elastic import Elastic, ElasticStart
from hocket.train.job import Job
from hocket.train.runtimes.base import Runtime
from hocket.train.runtimes.collective import CollectiveRuntime

if TYPE_CHECKING:  # sockets are loaded only where a strategy sends messages
    from hocket.drivers.server_runtime import ServerRuntime
    from hocket.train.async_start import Servers

SHARDINGS = ("zero1", "fsdp")


class _Session:
    """What the last ``init`` joined, and the jobs on it."""

    cluster: Cluster | None = None
    jobs: list[Job] = []  # noqa: RUF012 - one session per process
    seed: int = 0
    loaders = LoaderPositions()
    servers: list[str] | None = None
    started: list[Servers] = []  # noqa: RUF012
    job: str | None = None
    keys: Path | None = None
    liveness_timeout_s: float = 10.0
    worker: int = 0
    world: int = 1
    rendezvous: RendezvousInfo | None = None
    stream: SampleStream | None = None  # the samples of an elastic job
    number: int = 0  # the number of sessions that this process has begun


def init(
    backend: str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    exact: bool = False,
    timeout_s: float = 1800.0,
    liveness_timeout_s: float = 10.0,
    servers: str | None = None,
    keys: str | Path | None = None,
    job: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Cluster:
    """Join the processes that torchrun, mpirun, Slurm or Ray has started, or a process group that exists; otherwise one worker.

    Without ``backend`` the ``device`` decides: NCCL for CUDA, Gloo for CPU. ``seed`` is for partition and codecs. With ``exact``
    means are summed in worker order (slower, bit-equal to virtual workers). A worker that is silent for ``liveness_timeout_s``
    counts as lost.

    Strategies with servers start them as children, unless ``servers`` names some that run already (``python -m
    hocket.drivers.shard_process``), as ``"tcp://host:port,tcp://host:port"``, one per shard; ``job`` is the id that
    they were given. Then no launcher is needed: this is worker ``rank`` of ``world_size``. ``keys`` is the file made by
    `hocket keys`, for links between machines and for the store by which the processes of a launcher find each other.
    """
    shutdown()
    _Session.keys = None if keys is None else Path(keys)
    tunnel = None
    if _Session.keys is not None:
        from hocket.transport.tunnel import Tunnel

        tunnel = Tunnel.with_keys(_Session.keys)
    _Session.cluster = join(backend, device, None, exact, timeout_s, liveness_timeout_s, _Session.keys, tunnel)
    cluster, _Session.number, _Session.rendezvous = _Session.cluster, _Session.number + 1, find_rendezvous(os.environ)
    _Session.seed, _Session.liveness_timeout_s = seed, liveness_timeout_s
    _Session.servers, _Session.job = None if servers is None else [address.strip() for address in servers.split(",")], job
    if (rank is None) != (world_size is None) or (rank is not None and (servers is None or cluster.size > 1)):
        raise HocketError("Give rank= and world_size= together, only beside servers= and only without a launcher, which sets both.")
    _Session.worker, _Session.world = cluster.workers.start, cluster.size
    if rank is not None and world_size is not None:
        if not 0 <= rank < world_size:
            raise HocketError(f"rank={rank}, world_size={world_size}: workers are numbered from 0 to {world_size - 1}.")
        _Session.worker, _Session.world = rank, world_size
    return cluster


def shutdown() -> None:
    """End all jobs of this process and leave the cluster; this also happens when the program ends."""
    for job in list(_Session.jobs):
        if job.strategy.runtime != "collective":  # leave without waiting for the others
            job.detach()
    for servers in _Session.started:
        servers.see_off()
    forget()
    if _Session.cluster is not None:
        _Session.cluster.close()
    _Session.cluster, _Session.stream, _Session.jobs, _Session.started = None, None, [], []
    _Session.loaders = LoaderPositions()


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: str | Strategy = "bulk + allreduce",
    *,
    accumulate: int = 1,
    scaler: Any = None,
    check: Checks | bool | str = True,
    steps: int | None = None,
    buckets: Buckets = Buckets(),  # noqa: B008 - frozen
    mesh: Mesh | str | None = None,
    pipeline: Pipeline = Pipeline(),  # noqa: B008 - frozen
    sharding: str | None = None,
    elastic: Elastic | str | None = None,
) -> Job:
    """Train ``model`` with ``optimizer`` in parallel; the training loop does not change.

    A step has ``accumulate`` backward passes. ``scaler`` is the GradScaler, if one is used: all workers then skip the same steps.
    ``check``: what is compared between workers and what becomes of NaN and Inf in gradients (:class:`hocket.Checks`);
    ``check="audit"`` finds the first difference between workers (worker, step, parameter). ``steps`` is the planned number of
    steps, if known. ``buckets``: how large the parts are in which gradients and weights travel (:class:`hocket.Buckets`).

    A ``mesh`` splits the model itself: ``Mesh(data=2, pipeline=2, tensor=2)`` or ``"data=2,pipeline=2"``; the strategy works
    between replicas. Operations are split by the mesh's ``plan``. Layers are cut and run as ``pipeline`` says
    (:class:`hocket.Pipeline`); then call ``job.train(x, y)``, or ``job.backward(x, y)`` and your own step.

    With ``sharding="zero1"`` each worker keeps a part of the optimiser's state (ZeRO-1), with ``"fsdp"`` a part of weights,
    gradients and state (PyTorch's FSDP2); both need replicas that are equal after every step. On a model that your own
    ``fully_shard(model, mesh=…)`` has split inside each replica, the strategy works between replicas, as on a mesh.

    ``elastic`` is the least and the most workers, ``"2:8"`` or :class:`hocket.Elastic`: when a worker is lost, the others go on,
    and new workers join; on a mesh these are replicas. Start it by ``hocket launch --elastic 2:8``, or beside a
    ``hocket rendezvous``.
    """
    cluster = _joined("hocket.parallelize(…)")
    refuse_twice(model, optimizer, _Session.jobs)
    checks = Checks.parse(check)
    parsed, placed = Strategy.parse(strategy), None if mesh is None else Mesh.parse(mesh)
    if sharding not in (None, *SHARDINGS):
        raise HocketError(f"sharding={sharding!r}: use 'zero1' (a part of the optimiser's state) or 'fsdp' (a part of everything).")
    options = {"accumulate": accumulate, "scaler": scaler, "steps": steps, **vars(checks)}
    options |= {"buckets": buckets, "seed": _Session.seed}
    if is_sharded(model) and (placed is not None or sharding is not None or elastic is not None or cluster.elastic):
        raise HocketError("fully_shard(…) has split this model already; leave mesh=, sharding= and elastic= out.")
    if elastic is not None or cluster.elastic:
        start = ElasticStart(cluster, _Session.rendezvous, _Session.keys, elastic)
        start.refuse(parsed, sharding, bool(_Session.jobs), checks.check == AUDIT)
        job, _Session.stream = start.job(model, optimizer, parsed, options, placed, pipeline)
        return _begun(job)
    if placed is not None and sharding == "fsdp" and not placed.splits:
        placed.check(cluster.size)
        placed = None  # only whole replicas count
    if placed is not None:
        job = _split(model, optimizer, parsed, placed, pipeline, sharding, options)
    else:
        refuse_split_options(None, pipeline)
        job = _unsplit(model, optimizer, parsed, sharding, options)
    job.loaders = _Session.loaders
    return _begun(job)


def _begun(job: Job) -> Job:
    job.on_detach = _forget_job
    _Session.jobs.append(job)
    return job


def _forget_job(job: Job) -> None:
    _Session.jobs = [other for other in _Session.jobs if other is not job]
    _Session.stream = None


def _joined(what: str) -> Cluster:
    if _Session.cluster is None:
        raise HocketError(f"Call hocket.init() before {what}.")
    return _Session.cluster


def _unsplit(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, sharding: str | None, options: dict[str, Any]
) -> Job:
    cluster = _joined("hocket.parallelize(…)")
    if isinstance(model, nn.Module) and any(p.is_meta for p in model.parameters()) and not is_sharded(model):
        materialize(model, seed=_Session.seed, device=cluster.device)
    if _Session.servers is not None and strategy.runtime != "server":
        raise HocketError(
            f"{strategy} has no servers, but hocket.init named some; leave servers= out, or use for example async + server."
        )
    zero, fsdp = int(sharding == "zero1"), sharding == "fsdp"
    refuse_sharding(strategy, zero, fsdp, options["scaler"])
    runtime: Runtime
    if fsdp and cluster.has_process_group:
        from hocket.train.runtimes.fsdp import FsdpRuntime  # loaded only where it is needed

        runtime = FsdpRuntime(cluster.for_job())
    elif is_sharded(model):
        from hocket.train.runtimes.fsdp_replicas import FsdpReplicas

        runtime = FsdpReplicas(model, cluster)
    elif strategy.runtime == "peers" and _Session.world > 1:
        from hocket.train.async_start import connect_peers
        from hocket.train.runtimes.messages import peer_runtime

        given = (cluster, _Session.keys, _Session.liveness_timeout_s, _Session.seed)
        runtime = peer_runtime(lambda layout: connect_peers(strategy, layout, *given), cluster)
    elif strategy.runtime != "collective" and (_Session.world > 1 or _Session.servers is not None or needs_servers(strategy)):
        from hocket.train.runtimes.messages import server_runtime

        runtime = server_runtime(lambda layout: _connect(strategy, layout, cluster), cluster)
    else:
        runtime = CollectiveRuntime(cluster.for_job(), zero)
    try:
        return Job(model, optimizer, strategy, runtime, **options)
    except BaseException:
        runtime.cluster.release()
        raise


def _split(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    mesh: Mesh,
    pipeline: Pipeline,
    sharding: str | None,
    options: dict[str, Any],
) -> Job:
    """Make a job of split replicas; from here on the session's workers are replicas."""
    from hocket.split.split_model import SplitModel  # what splits a model is loaded only where a model is split
    from hocket.train.split_job import split_job

    world = _joined("hocket.parallelize(…)")
    if _Session.servers is not None:
        raise HocketError(f"The mesh {mesh} starts servers for each part of the model itself; leave servers= of hocket.init out.")
    mesh.check(world.size)
    if strategy.runtime == "peers" and mesh.data > 1:
        raise HocketError(
            f"{strategy} pairs workers that are one process each, but a split replica is several; use downpour + server."
        )

    def connect(layout: Layout, split: SplitModel) -> ServerRuntime:
        _Session.worker, _Session.world = split.place.data.place, split.place.data.size
        return _connect(strategy, layout, split.cluster)

    served = strategy.runtime != "collective" and (mesh.data > 1 or needs_servers(strategy))
    options |= {"connect": connect if served else None, "zero": int(sharding == "zero1"), "fsdp": sharding == "fsdp"}
    job = split_job(model, optimizer, strategy, world, mesh, pipeline, **options)
    assert job.split is not None
    _Session.worker, _Session.world = job.split.place.data.place, job.split.place.data.size
    return job


def _connect(strategy: Strategy, layout: Layout, cluster: Cluster) -> ServerRuntime:
    """The link to the servers that ``init`` named, or to new ones."""
    from hocket.drivers.server_runtime import ServerRuntime
    from hocket.programs.server.requests import WorkerConfig
    from hocket.programs.server.wire import DEFAULT_JOB, job_id
    from hocket.train.async_start import Servers, start_servers
    from hocket.transport import Keys

    session = _Session
    servers = (
        Servers(session.servers, DEFAULT_JOB if session.job is None else job_id(session.job))
        if session.servers is not None
        else start_servers(strategy, layout, cluster, session.keys, session.liveness_timeout_s)
    )
    session.started.append(servers)
    cluster.stop_heartbeat()  # from here on processes do not wait for each other, nor end together
    keys = None if session.keys is None else Keys.read(session.keys)
    config = WorkerConfig(strategy, layout, session.worker, session.world, session.seed, session.liveness_timeout_s)
    return ServerRuntime(servers.addresses, servers.job, config, keys)


def distribute(loader: Iterable[Any], epoch: int | None = None, even: bool = False) -> DistributedLoader:
    """This worker's part of ``loader``: each round of N batches gives every worker one, so no worker waits for a missing batch.

    A ``DataLoader`` over a map-style data set is reshuffled over all workers each epoch; the last, incomplete round is split
    evenly, and gradients are weighted by samples. Of any other iterable each worker takes every N-th batch.

    Under ``async``, ``downpour``, ``stale`` and ``aedit`` a worker that is ready takes the next batch, so a fast worker gets
    more; every batch is given once. ``even=True`` gives equal numbers there, too, for a loop with collectives of its own or
    with a schedule of steps.

    Workers count the epochs over loaders of the same size, unless ``epoch`` is given; the loader may be built anew for each. The
    count, and the place in an epoch that has not ended, are in ``job.state_dict()``: after ``job.load_state_dict`` the next
    iteration goes on there.
    """
    _joined("hocket.distribute(…)")
    if isinstance(loader, nn.Module):  # an nn.Sequential is iterable
        raise HocketError(f"distribute takes a DataLoader, got the model {type(loader).__name__}; a model is for parallelize.")
    if not hasattr(loader, "__iter__"):
        raise HocketError(f"distribute takes a DataLoader or another iterable of batches, got {type(loader).__name__}.")
    return DistributedLoader(loader, epoch, even)


class DistributedLoader:
    """What :func:`distribute` returns; each iteration over it is one epoch."""

    def __init__(self, loader: Iterable[Any], epoch: int | None, even: bool) -> None:
        self.loader, self.epoch, self.even = loader, epoch, even

    def __len__(self) -> int:
        """Batches in an epoch (of a loader that has a length); where workers take them on demand, an even share of them."""
        world = _Session.world if _Session.stream is None or _Session.cluster is None else _Session.cluster.size
        return distributed_length(self.loader, world if _Session.cluster is not None else 1)

    def __iter__(self) -> Iterator[Any]:
        cluster = _joined("iterating over hocket.distribute(…)")
        if _Session.stream is not None:
            yield from self._elastic(_Session.stream)
            return
        positions, world, worker, seed = _Session.loaders, _Session.world, _Session.worker, _Session.seed
        place = positions.begin(self.loader, self.epoch, world)
        take = place.by_demand(_store()) if not self.even and _without_waiting(cluster) else None
        try:
            given = (world, worker, seed, place.epoch, place.batches, take, place.before)
            for batch, weight in distribute_loader(self.loader, *given):
                for job in _Session.jobs:
                    job.weight = weight
                place.batches += 1
                yield batch
        finally:
            positions.end(place)
            for job in _Session.jobs:
                job.weight = 1.0

    def _elastic(self, stream: SampleStream) -> Iterator[Any]:
        """One epoch, dealt anew whenever the number of workers changes."""
        for batch, weight in distribute_stream(self.loader, stream, _Session.seed):
            for job in _Session.jobs:
                job.weight = weight
            yield batch
        for job in _Session.jobs:
            job.weight = 1.0


def epochs(count: int) -> Iterator[int]:
    """The numbers of the remaining epochs of ``count``; a worker that joins an elastic run begins with the others' epoch.

    >>> list(epochs(3))
    [0, 1, 2]
    """
    epoch = 0
    while (now := epoch if _Session.stream is None else _Session.stream.epoch) < count:
        yield now
        epoch += 1


def _without_waiting(cluster: Cluster) -> bool:
    """Whether no worker waits for another's step, so that a fast one may take more batches. Processes of a split replica need the
    same batches, and workers without a launcher have no store in common: these get even parts."""
    together = any(job.strategy.sync.static_partition or job.split is not None for job in _Session.jobs)
    return bool(_Session.jobs) and not together and cluster.has_process_group and cluster.size > 1


def _store() -> dist.Store:
    return dist.PrefixStore(f"hocket/loaders/{_Session.number}", dist.distributed_c10d._get_default_store())


def _at_exit() -> None:
    if hasattr(sys, "last_value"):
        return  # died of an exception: say nothing, so that the others notice
    shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    # Gloo's threads let go of the last tensors some time after a collective, and abort the process if the interpreter is being
    # taken down by then. They end with the group, once nobody holds it: a model under DDP does, in a cycle.
    gc.collect()


atexit.register(_at_exit)
