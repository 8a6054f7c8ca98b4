"""The functions a training script calls: ``init``, ``parallelize``, ``distribute``."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.join import join
from hocket.cluster.layout import Layout
from hocket.data.distribute import distribute_loader, distributed_length
from hocket.drivers.server_runtime import ServerRuntime
from hocket.errors import HocketError
from hocket.messages import Keys
from hocket.programs.server.requests import WorkerConfig
from hocket.programs.server.wire import DEFAULT_JOB, job_id
from hocket.split import Mesh, MeshCoordinate
from hocket.split.materialize import materialize
from hocket.split.mesh import forget
from hocket.split.sharded import refuse_sharding
from hocket.strategy import Strategy
from hocket.train.free_job import FreeJob, serves_itself
from hocket.train.free_start import Servers, start_servers
from hocket.train.job import Job
from hocket.train.pairs_job import PairsJob
from hocket.train.pairs_start import peer_config

if TYPE_CHECKING:  # what splits a model is loaded only where a model is split
    from hocket.train.mesh_job import MeshJob
    from hocket.train.sharded_job import FSDPJob


class _Session:
    """What the last ``init`` joined, and the jobs on it."""

    cluster: Cluster | None = None
    jobs: list[Job | FreeJob | PairsJob | MeshJob | FSDPJob] = []  # noqa: RUF012 - one session per process
    seed: int = 0
    epochs: dict[int, tuple[Any, int]] = {}  # noqa: RUF012
    servers: list[str] | None = None
    started: list[Servers] = []  # noqa: RUF012
    job: bytes = DEFAULT_JOB
    keys: Path | None = None
    liveness_timeout_s: float = 10.0
    worker: int = 0
    world: int = 1


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
    """Join torchrun, mpirun, Slurm or Ray, or a process group that exists already; alone: one worker.

    ``device`` decides the backend unless one is given: NCCL for CUDA, Gloo for CPU. ``seed`` is for partition and codecs. ``exact``
    makes means sum in worker order (slower, bit-equal to virtual workers). A worker silent for ``liveness_timeout_s`` counts as
    lost.

    Strategies with servers start them as children, unless ``servers`` names some that run already (``python -m
    hocket.drivers.shard_process``), as ``"tcp://host:port,tcp://host:port"``, one per shard; ``job`` is their id, if they were
    given one. Then no launcher is needed: this is worker ``worker`` of ``workers``. ``keys`` is the file made by `hocket keys`, for
    links between machines.
    """
    shutdown()
    _Session.keys = None if keys is None else Path(keys)
    _Session.cluster = join(backend, device, None, exact, timeout_s, liveness_timeout_s, _Session.keys)
    cluster = _Session.cluster
    _Session.seed, _Session.liveness_timeout_s = seed, liveness_timeout_s
    _Session.servers = None if servers is None else [address.strip() for address in servers.split(",")]
    _Session.job = DEFAULT_JOB if job is None else job_id(job)
    if (rank is None) != (world_size is None) or (rank is not None and (servers is None or cluster.size > 1)):
        raise HocketError("rank= and world_size= go together, with servers= and without a launcher, which would tell them.")
    _Session.worker, _Session.world = cluster.workers.start, cluster.size
    if rank is not None and world_size is not None:
        if not 0 <= rank < world_size:
            raise HocketError(f"rank={rank}, world_size={world_size}: workers are numbered from 0 to {world_size - 1}.")
        _Session.worker, _Session.world = rank, world_size
    return cluster


def shutdown() -> None:
    """Leave the cluster in good order (also done when the program ends)."""
    for job in _Session.jobs:
        if isinstance(getattr(job, "job", job), (FreeJob, PairsJob)):
            job.detach()
    for servers in _Session.started:
        servers.see_off()
    forget()
    if _Session.cluster is not None:
        _Session.cluster.close()
    _Session.cluster, _Session.jobs, _Session.epochs, _Session.started = None, [], {}, []


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: str | Strategy = "bulk + allreduce",
    *,
    accumulate: int = 1,
    scaler: Any = None,
    nonfinite: str = "raise",
    check: bool = True,
    steps: int | None = None,
    bucket_cap_bytes: int | None = None,
    first_bucket_cap_bytes: int | None = None,
    mesh: Mesh | str | None = None,
    loss: Callable[[Any, Tensor], Tensor] | None = None,
    sample: Tensor | None = None,
    schedule: str = "1f1b",
    num_microbatches: int | None = None,
    stages_per_rank: int | None = None,
    plan: Mapping[str, str] | None = None,
    cut: Sequence[str] | None = None,
    measure: str | None = None,
    zero: int = 0,
    fsdp: bool = False,
) -> Job | FreeJob | PairsJob | MeshJob | FSDPJob:
    """Train ``model`` with ``optimizer`` in parallel; the loop stays as it is.

    ``accumulate`` backward passes make a step. ``scaler`` is the GradScaler, if one is used: all workers then skip together.
    ``nonfinite`` gradients raise or are left out. ``check=False`` drops the small agreement per exchange on unused parameters and
    non-finite gradients. ``steps`` is the planned number of steps, if known. Buckets are closed at ``bucket_cap_bytes``
    (25 MiB), the first one already at ``first_bucket_cap_bytes`` (1 MiB); top-k and its kin have a single one unless told
    otherwise.

    A ``mesh`` splits the model itself: ``Mesh(data=2, pipeline=2, tensor=2)`` or ``"data=2,pipeline=2"``; the strategy works
    between replicas. Operations are split by ``plan`` (module names to kinds; found by itself). Layers are cut after the modules
    named in ``cut`` (found by itself, for inputs like ``sample``), each process having ``stages_per_rank`` stages, and run by
    ``schedule`` with ``num_microbatches`` micro-batches; ``loss`` is a function of output and target. Then call ``job.train(x,
    y)``, or ``job.backward(x, y)`` and your own step. What layers cost is measured (``measure="seconds"``) or counted (``"flops"``:
    the same cut every time).

    ``zero=1`` leaves each worker a part of the optimiser's state (ZeRO-1), ``fsdp=True`` a part of everything (PyTorch's
    FSDP2); both where all replicas are equal after every step.
    """
    if _Session.cluster is None:
        raise HocketError("Call hocket.init() before hocket.parallelize(…).")
    parsed = Strategy.parse(strategy)
    options: dict[str, Any] = {
        "accumulate": accumulate,
        "nonfinite": nonfinite,
        "check": check,
        "seed": _Session.seed,
        "scaler": scaler,
        "bucket_cap_bytes": bucket_cap_bytes,
        "first_bucket_cap_bytes": first_bucket_cap_bytes,
    }
    job: Job | FreeJob | PairsJob | MeshJob | FSDPJob
    if mesh is not None and fsdp and not Mesh.parse(mesh).splits:
        Mesh.parse(mesh).check(_Session.cluster.size)
        mesh = None  # replicas alone
    if mesh is not None:
        split = {
            "loss": loss,
            "sample": sample,
            "schedule": schedule,
            "num_microbatches": num_microbatches,
            "stages_per_rank": stages_per_rank,
            "plan": plan,
            "cut": cut,
            "measure": measure,
            "zero": zero,
            "fsdp": fsdp,
        }
        job = _on_mesh(model, optimizer, parsed, Mesh.parse(mesh), {**split, **options})
        _Session.jobs.append(job)
        return job
    said = {"num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank, "plan": plan, "cut": cut, "measure": measure}
    if schedule != "1f1b" or any(value is not None for value in said.values()):
        from hocket.train.mesh_checks import refuse_split_options

        refuse_split_options(None, {**said, "schedule": schedule})
    if isinstance(model, nn.Module) and any(p.is_meta for p in model.parameters()):
        materialize(model, seed=_Session.seed, device=_Session.cluster.device)
    if _Session.servers is not None and parsed.runtime != "server":
        raise HocketError(
            f"{parsed} has no servers, but hocket.init named some; leave servers= out, or use for example async + server."
        )
    refuse_sharding(parsed, zero, fsdp, scaler)
    if fsdp and _Session.cluster.has_process_group:
        from hocket.train.sharded_job import FSDPJob  # loaded only where it is needed

        full = {name: options[name] for name in ("accumulate", "nonfinite", "check", "seed", "scaler")}
        job = FSDPJob(model, optimizer, parsed, _Session.cluster, **full)
    elif parsed.runtime == "peers" and _Session.world > 1:
        place = peer_config(_Session.cluster, _Session.keys, _Session.liveness_timeout_s)
        job = PairsJob(model, optimizer, parsed, place, _Session.cluster, **options)
    elif parsed.runtime != "collective" and (_Session.world > 1 or _Session.servers is not None or serves_itself(parsed)):
        job = FreeJob(model, optimizer, parsed, lambda layout: _connect(parsed, layout), _Session.cluster, **options)
    else:
        job = Job(model, optimizer, parsed, _Session.cluster, steps=steps, zero=zero, **options)
    _Session.jobs.append(job)
    return job


def _on_mesh(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, mesh: Mesh, options: dict[str, Any]
) -> MeshJob:
    """A job whose replicas are split; from here on the session's workers are replicas."""
    from hocket.train.mesh_job import MeshJob

    world = _Session.cluster
    assert world is not None
    if _Session.servers is not None:
        raise HocketError(f"The mesh {mesh} starts servers for each part of the model itself; leave servers= of hocket.init out.")
    mesh.check(world.size)
    if strategy.runtime == "peers" and mesh.data > 1:
        raise HocketError(
            f"{strategy} has workers meet one by one, but a split replica is several processes; use downpour + server."
        )
    if strategy.runtime != "collective" and (mesh.data > 1 or serves_itself(strategy)):

        def connect(layout: Layout, place: MeshCoordinate, cluster: Cluster) -> ServerRuntime:
            _Session.worker, _Session.world = place.data.place, place.data.size
            return _connect(strategy, layout, cluster)

        options["connect"] = connect
    job = MeshJob(model, optimizer, strategy, world, mesh, **options)
    _Session.worker, _Session.world = job.place.data.place, job.place.data.size
    return job


def _connect(strategy: Strategy, layout: Layout, cluster: Cluster | None = None) -> ServerRuntime:
    """The link to the servers that ``init`` named, or to new ones."""
    session, cluster = _Session, cluster or _Session.cluster
    assert cluster is not None
    servers = (
        Servers(session.servers, session.job)
        if session.servers is not None
        else start_servers(strategy, layout, cluster, session.keys, session.liveness_timeout_s)
    )
    session.started.append(servers)
    cluster.stop_heartbeat()  # from here on processes neither wait for others nor end with them
    keys = None if session.keys is None else Keys.read(session.keys)
    config = WorkerConfig(strategy, layout, session.worker, session.world, session.seed, session.liveness_timeout_s)
    return ServerRuntime(servers.addresses, servers.job, config, keys)


def distribute(loader: Iterable[Any], epoch: int | None = None) -> DistributedLoader:
    """This worker's part of ``loader``: rounds of N batches are dealt out evenly, so nobody waits for a batch that is not there.

    A ``DataLoader`` over a map-style data set is reshuffled over all workers each epoch (they count the iterations over this
    loader, unless ``epoch`` is given); the last, incomplete round is split evenly, and gradients are weighted by samples. Of any
    other iterable each worker takes every N-th batch.
    """
    if _Session.cluster is None:
        raise HocketError("Call hocket.init() before hocket.distribute(…).")
    return DistributedLoader(loader, epoch)


class DistributedLoader:
    """What :func:`distribute` returns; each iteration over it is one epoch."""

    def __init__(self, loader: Iterable[Any], epoch: int | None) -> None:
        self.loader, self.epoch = loader, epoch

    def __len__(self) -> int:
        """Batches in an epoch (of a loader that has a length)."""
        return distributed_length(self.loader, _Session.world if _Session.cluster is not None else 1)

    def __iter__(self) -> Iterator[Any]:
        if _Session.cluster is None:
            raise HocketError("Call hocket.init() before iterating over hocket.distribute(…).")
        epoch = self.epoch
        if epoch is None:
            # Kept alive with its count: the id of a loader that is gone may come back, on some workers only.
            _, epoch = _Session.epochs.get(id(self.loader), (self.loader, 0))
            _Session.epochs[id(self.loader)] = (self.loader, epoch + 1)
        try:
            for batch, weight in distribute_loader(self.loader, _Session.world, _Session.worker, _Session.seed, epoch):
                for job in _Session.jobs:
                    job.weight = weight
                yield batch
        finally:
            for job in _Session.jobs:
                job.weight = 1.0


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
