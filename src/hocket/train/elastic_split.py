"""Replicas of several processes that come and go: a job on a mesh whose number of replicas changes.

The unit of membership is a replica (docs/decisions/20-elastic.md): where one of its processes is lost, its passes cannot be
completed. The others join again, with a process in the place of the lost one, at the end of a step of the other replicas. The step
in which they were interrupted is made without a pass: they give zeros to its exchange.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.elastic import ElasticCluster
from hocket.cluster.join import RendezvousInfo, find_launcher
from hocket.cluster.replica import Replica, ReplicaLost
from hocket.errors import HocketError
from hocket.split.elastic import elastic_coordinate
from hocket.split.inputs import Inputs
from hocket.split.mesh import Mesh
from hocket.split.options import ASYNCHRONOUS, Pipeline, refuse_on_mesh
from hocket.split.split_model import SplitModel
from hocket.strategy import Strategy
from hocket.train.adaptive import with_exchange
from hocket.train.checks import check_job
from hocket.train.elastic import Elastic
from hocket.train.job import Job
from hocket.train.ledger_view import MeshAxes
from hocket.train.runtimes.elastic import member_driver
from hocket.train.runtimes.elastic_replica import ReplicaRuntime, StepVoid
from hocket.transport import Keys


class ElasticSplit(SplitModel):
    """This process's part of a replica; its :attr:`runtime` learns of other replicas."""

    runtime: ReplicaRuntime
    skipped = False
    """Whether the last step was made without a pass."""

    @property
    def hooks_passes(self) -> bool:
        return False  # what is exchanged in a pass could be interrupted while others wait for the pass

    def backward(self, x: Inputs, y: Any = None) -> Tensor:
        runtime, self.draws.step, self.skipped = self.runtime, self.runtime.step, False
        self.draws.replica = runtime.stream.worker
        try:
            if runtime.skips:
                return self._give_zeros()
            runtime.mid_step = runtime.driven = True
            loss = super().backward(x, y)
            if self.pipe is None:
                self._exchanger.exchange()
            return loss
        except ReplicaLost:
            return self._take_up()
        except StepVoid:
            return self._give_nothing()

    def clip(self, max_norm: float) -> Tensor:
        while not self.runtime.void:
            try:
                return super().clip(max_norm)
            except ReplicaLost:
                self._take_up()
        return torch.zeros(())

    def _take_up(self) -> Tensor:
        """Another process of this replica was lost in a step: go on with the others' next one."""
        try:
            self.runtime.rejoin()
            return self._give_zeros()
        except StepVoid:
            return self._give_nothing()

    def _give_zeros(self) -> Tensor:
        self.runtime.mid_step = self.runtime.driven = True
        loss = self._give_nothing()
        self.job.exchange()
        return loss

    def _give_nothing(self) -> Tensor:
        self.skipped = True
        for p in self.module.parameters():
            p.grad = None
        self.job.begin_step()
        return torch.full((), math.nan)

    @property
    def job(self) -> Job:
        assert isinstance(self._job, Job)
        return self._job

    def _after_step(self) -> None:
        void, self.runtime.void = self.runtime.void, False
        try:
            if not void:
                super()._after_step()
        except ReplicaLost:
            self.runtime.rejoin()

    def picture(self) -> str:
        """Of this process: others may be gone."""
        held = sum(p.nbytes for p in self.module.parameters())
        names = [name for name, _ in self.module.named_parameters()]
        place = ", ".join(f"{name} {axis.place} of {axis.size}" for name, axis in self.place.axes.items() if axis.size > 1)
        return f"{place}: {names[0]} … {names[-1]}, {held / 1e6:.2f} MB of weights"

    def timeline(self) -> None:
        """None: others may be gone."""


def part_of_process(mesh: Mesh, found: RendezvousInfo, environ: Mapping[str, str]) -> int:
    """Which part of a replica this process holds: by its number among those that one launcher has started."""
    launcher = find_launcher(environ)
    number = found.member if found.member is not None else None if launcher is None else launcher.rank
    if number is None:
        raise HocketError(
            f"On the mesh {mesh} each process holds one part, by its number; start the processes with `hocket train --elastic`, "
            "`hocket launch --elastic … --mesh …`, or under torchrun."
        )
    return number % (mesh.pipeline * mesh.tensor)


def refuse_elastic_mesh(mesh: Mesh, schedule: str, measure: str | None, strategy: Strategy, limits: str) -> None:
    """Refuse what cannot be elastic."""
    if not mesh.splits:
        raise HocketError(f"An elastic run counts replicas by elastic={limits}; leave mesh={mesh} out, or split the model.")
    if schedule == ASYNCHRONOUS:
        raise HocketError(f"{ASYNCHRONOUS} keeps mini-batches in the pipe, which a loss would break; use 1f1b in an elastic run.")
    if mesh.pipeline > 1 and measure == "seconds":
        raise HocketError("Processes of an elastic run cut the model by themselves, all in the same way: use measure='flops'.")
    if strategy.runtime != "collective" or strategy.topology.sums_on_servers:
        raise HocketError(f"{strategy} has servers or pairs, which an elastic run on a mesh lacks; use bulk, for example.")


def elastic_split_job(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    cluster: ElasticCluster,
    mesh: Mesh,
    pipeline: Pipeline,
    found: RendezvousInfo,
    elastic: Elastic,
    environ: Mapping[str, str],
    *,
    accumulate: int = 1,
    nonfinite: str = "raise",
    scaler: Any = None,
    seed: int = 0,
    **options: Any,
) -> Job:
    """Split ``model`` over the processes of a replica, and join the others."""
    check_job(model, optimizer, strategy, accumulate, nonfinite)
    refuse_elastic_mesh(mesh, pipeline.schedule, pipeline.measure, strategy, f"{elastic.least}:{elastic.most}")
    strategy = with_exchange(strategy, optimizer, False, tell=False)
    mesh = replace(mesh, data=1)
    refuse_on_mesh(mesh, optimizer, strategy, cluster, pipeline, 0, False, accumulate, nonfinite, scaler)
    cluster.replica = Replica((mesh.pipeline, mesh.tensor), part_of_process(mesh, found, environ))
    cluster.acknowledges = True
    common = f"mesh {mesh}, model {_digest(model)}"
    place = elastic_coordinate(mesh, cluster.replica)
    staged = replace(pipeline, measure="flops") if mesh.pipeline > 1 else pipeline
    split = ElasticSplit(model, optimizer, strategy, cluster, mesh, staged, place=place, seed=seed)
    stages = [[split.module]] if split.cut is None else [split.cut.stages[k :: mesh.pipeline] for k in range(mesh.pipeline)]
    if not all(any(p.requires_grad for stage in own for p in stage.parameters()) for own in stages):  # all processes refuse it
        raise HocketError("An elastic run needs something to train in every part of the model; cut it elsewhere (cut=).")
    keys = None if cluster.keys is None else Keys.read(cluster.keys)
    driver = member_driver(found, keys, cluster.replica.part, cluster.replica.parts)
    runtime = ReplicaRuntime(cluster, driver, elastic, cluster.replica)
    split.runtime, runtime.axes, runtime.common = runtime, MeshAxes(place, cluster), common
    return Job(split.module, optimizer, strategy, runtime, seed=seed, split=split, **options)


def _digest(model: nn.Module) -> str:
    """Of names, shapes and first values: all processes must begin with the same, since each keeps its part of its own."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if not tensor.is_meta:
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
