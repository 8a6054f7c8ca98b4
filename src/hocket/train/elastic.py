"""What users say of an elastic run: how many workers it may have, and what follows their number."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from hocket.cluster.base import Cluster
from hocket.cluster.elastic import ElasticCluster
from hocket.cluster.join import RendezvousInfo
from hocket.data.elastic_stream import SampleStream
from hocket.errors import HocketError
from hocket.split.mesh import Mesh
from hocket.split.options import Pipeline
from hocket.strategy import Strategy
from hocket.train.lr_schedule import lr_scale, scaling

if TYPE_CHECKING:
    from hocket.train.job import Job

MOST_WORKERS = 2**15
"""No limit."""


class Stateful(Protocol):
    """Whatever has a state, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


@dataclass(frozen=True)
class Elastic:
    """A run of ``least`` to ``most`` workers, which may be lost and may join while it goes on.

    With fewer than ``least`` the others wait at the end of a step until enough have joined; above ``most`` workers wait, ready to
    take the place of one that is lost. ``scale_lr="linear"`` keeps the learning rate proportional to the number of workers,
    ``"sqrt"`` to its root; the optimiser's own rate is that of ``counted`` workers (None: of those that the run starts with).
    ``on_leave`` is called with the job on every worker, where all of them have been told to leave, so that nobody is left to hand
    over to: in the optimiser's step, at its end, within seconds (save a checkpoint).

    >>> Elastic.parse("2:8")
    Elastic(least=2, most=8, scale_lr='none', counted=None)
    """

    least: int
    most: int
    scale_lr: str | bool = "none"
    counted: int | None = None
    on_leave: Callable[[Job], None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale_lr", scaling(self.scale_lr))
        if not 1 <= self.least <= self.most:
            raise HocketError(f"elastic={self.least}:{self.most}: give the least and the most workers, such as 2:8.")

    @classmethod
    def parse(cls, given: Elastic | str) -> Elastic:
        if isinstance(given, Elastic):
            return given
        least, colon, most = str(given).partition(":")
        if not colon or not least.isdigit() or not most.isdigit():
            raise HocketError(f"elastic={given}: give the least and the most workers, such as 2:8.")
        return cls(int(least), int(most))

    def change(self, size: int, before: int) -> float:
        """How many times as many workers there are as the rate was made for; ``before`` is 0 where the run starts.

        >>> Elastic(2, 8).change(6, 4), Elastic(2, 8).change(6, 0), Elastic(2, 8, counted=4).change(6, 0)
        (1.5, 1.0, 1.5)
        """
        return size / (before or self.counted or size)

    def rescale(self, optimizer: torch.optim.Optimizer | None, shared: Sequence[Any], times: float) -> None:
        """Let the learning rate, where it follows the number of workers, follow ``times`` as many, also that of schedulers."""
        factor = lr_scale(self.scale_lr, times)
        if factor == 1.0:
            return
        for group in () if optimizer is None else optimizer.param_groups:
            for name in ("lr", "initial_lr"):
                if name in group:
                    group[name] = group[name] * factor
        for scheduler in shared:
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]


@dataclass(frozen=True)
class ElasticStart:
    """How ``parallelize`` makes an elastic job."""

    cluster: Cluster
    rendezvous: RendezvousInfo | None
    keys: Path | None
    given: Elastic | str | None

    @property
    def elastic(self) -> Elastic:
        return Elastic(1, MOST_WORKERS) if self.given is None else Elastic.parse(self.given)

    def refuse(self, strategy: Strategy, sharding: str | None, second: bool, audit: bool = False) -> None:
        """Refuse what an elastic run cannot do."""
        limits = f"{self.elastic.least}:{self.elastic.most}"
        if self.rendezvous is None:
            raise HocketError(
                f"elastic={limits} needs a rendezvous: start the program with `hocket launch --elastic {limits}`, or set "
                "HOCKET_RENDEZVOUS to the address of a `hocket rendezvous`."
            )
        refused = {f"sharding={sharding!r}": sharding is not None}
        refused |= {str(strategy): strategy.runtime != "collective", "the second job": second, "check='audit'": audit}
        refused["exchange=momentum"] = strategy.exchanged == "momentum"
        if named := [name for name, found in refused.items() if found]:
            raise HocketError(f"An elastic run trains one model, as whole replicas that step together; leave {named[0]} out.")

    def job(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        options: dict[str, Any],
        mesh: Mesh | None = None,
        pipeline: Pipeline = Pipeline(),  # noqa: B008 - frozen
    ) -> tuple[Job, SampleStream]:
        """The job, which has joined the others, and the samples that its worker computes."""
        from hocket.train.job import Job
        from hocket.train.runtimes.elastic import ElasticRuntime, elastic_runtime  # sockets are loaded only where they are needed
        from hocket.transport import Keys

        assert isinstance(self.cluster, ElasticCluster)
        assert self.rendezvous is not None
        if mesh is not None:
            from hocket.train.elastic_split import elastic_split_job

            given = (self.cluster, mesh, pipeline, self.rendezvous, self.elastic, os.environ)
            job = elastic_split_job(model, optimizer, strategy, *given, **options)
            assert isinstance(job.runtime, ElasticRuntime)
        else:
            keys = None if self.keys is None else Keys.read(self.keys)
            job = Job(model, optimizer, strategy, elastic_runtime(self.cluster, self.rendezvous, self.elastic, keys), **options)
        runtime = job.runtime
        assert isinstance(runtime, ElasticRuntime)
        if self.elastic.on_leave is not None:
            runtime.on_last = partial(self.elastic.on_leave, job)
        return job, runtime.stream
