"""The functions a training script calls: ``init``, ``parallelize``, ``shard``."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hocket.cluster.base import Cluster
from hocket.cluster.join import join
from hocket.data.shard import shard_length, shard_loader
from hocket.errors import HocketError
from hocket.strategy import Strategy
from hocket.train.job import Job


class _Session:
    """What the last ``init`` joined, and the jobs on it."""

    cluster: Cluster | None = None
    jobs: list[Job] = []  # noqa: RUF012 - one session per process
    seed: int = 0
    epochs: dict[int, tuple[Any, int]] = {}  # noqa: RUF012


def init(
    backend: str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    exact: bool = False,
    timeout_s: float = 1800.0,
    patience_s: float = 10.0,
) -> Cluster:
    """Join torchrun, mpirun, Slurm or Ray, or a process group that exists already; alone: one worker.

    ``device`` decides the backend unless one is given: NCCL for CUDA, Gloo for CPU. ``seed`` is for partition and codecs. ``exact``
    makes means sum in worker order (slower, bit-equal to virtual workers). A worker silent for ``patience_s`` counts as lost.
    """
    leave()
    _Session.cluster = join(backend, device, None, exact, timeout_s, patience_s)
    _Session.seed = seed
    return _Session.cluster


def leave() -> None:
    """Leave the cluster in good order (also done when the program ends)."""
    if _Session.cluster is not None:
        _Session.cluster.close()
    _Session.cluster, _Session.jobs, _Session.epochs = None, [], {}


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
    bucket_bytes: int | None = None,
    first_bucket_bytes: int | None = None,
) -> Job:
    """Train ``model`` with ``optimizer`` in parallel; the loop stays as it is.

    ``accumulate`` backward passes make a step. ``scaler`` is the GradScaler, if one is used: all workers then skip together.
    ``nonfinite`` gradients raise or are left out. ``check=False`` drops the small agreement per exchange on unused parameters and
    non-finite gradients. ``steps`` is the planned number of steps, if known. Buckets are closed at ``bucket_bytes``
    (25 MiB), the first one already at ``first_bucket_bytes`` (1 MiB); top-k and its kin have a single one unless told otherwise.
    """
    if _Session.cluster is None:
        raise HocketError("Call hocket.init() before hocket.parallelize(…).")
    job = Job(
        model,
        optimizer,
        Strategy.parse(strategy),
        _Session.cluster,
        accumulate=accumulate,
        nonfinite=nonfinite,
        check=check,
        steps=steps,
        seed=_Session.seed,
        scaler=scaler,
        cap_bytes=bucket_bytes,
        first_cap_bytes=first_bucket_bytes,
    )
    _Session.jobs.append(job)
    return job


def shard(loader: Iterable[Any], epoch: int | None = None) -> Shard:
    """This worker's part of ``loader``: rounds of N batches are dealt out evenly, so nobody waits for a batch that is not there.

    A ``DataLoader`` over a map-style data set is reshuffled over all workers each epoch (they count the iterations over this
    loader, unless ``epoch`` is given); the last, incomplete round is split evenly, and gradients are weighted by samples. Of any
    other iterable each worker takes every N-th batch.
    """
    if _Session.cluster is None:
        raise HocketError("Call hocket.init() before hocket.shard(…).")
    return Shard(loader, epoch)


class Shard:
    """What :func:`shard` returns; each iteration over it is one epoch."""

    def __init__(self, loader: Iterable[Any], epoch: int | None) -> None:
        self.loader, self.epoch = loader, epoch

    def __len__(self) -> int:
        """Batches in an epoch (of a loader that has a length)."""
        return shard_length(self.loader, _Session.cluster.size if _Session.cluster is not None else 1)

    def __iter__(self) -> Iterator[Any]:
        cluster = _Session.cluster
        if cluster is None:
            raise HocketError("Call hocket.init() before iterating over hocket.shard(…).")
        epoch = self.epoch
        if epoch is None:
            # Kept alive with its count: the id of a loader that is gone may come back, on some workers only.
            _, epoch = _Session.epochs.get(id(self.loader), (self.loader, 0))
            _Session.epochs[id(self.loader)] = (self.loader, epoch + 1)
        try:
            for batch, weight in shard_loader(self.loader, cluster.size, cluster.workers.start, _Session.seed, epoch):
                for job in _Session.jobs:
                    job.weight = weight
                yield batch
        finally:
            for job in _Session.jobs:
                job.weight = 1.0


def _at_exit() -> None:
    if hasattr(sys, "last_value"):
        return  # died of an exception: say nothing, so that the others notice
    leave()
    if dist.is_initialized():
        dist.destroy_process_group()
        # Gloo's threads let go of the last tensors some time after a collective, and abort the process if the interpreter is being
        # taken down by then. They end with the group, once nobody holds it.
        gc.collect()


atexit.register(_at_exit)
