"""Replicas of which a process holds a part, as the training loop sees them: on a mesh, or with a part of everything (FSDP2)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.elastic import ElasticCluster
from hocket.cluster.join import RendezvousInfo
from hocket.split.mesh import Mesh
from hocket.split.options import Pipeline
from hocket.split.split_model import Facade, SplitModel
from hocket.strategy import Strategy
from hocket.train.elastic import Elastic
from hocket.train.job import Job
from hocket.train.replicas import Factory, JobReplica, Loss
from hocket.train.runtimes.fsdp import FsdpRuntime
from hocket.train.split_job import split_job


class MeshReplica(JobReplica):
    """This process's part of a replica that is split over a mesh."""

    split: SplitModel

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Factory,
        strategy: Strategy,
        world: Cluster,
        mesh: Mesh,
        pipeline: Pipeline,
        *,
        clip: float | None = None,
        autocast: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, loss, optimizer, clip, autocast)
        self._hold(split_job(model, self.optimizer, strategy, world, mesh, replace(pipeline, loss=loss), **options))

    def _hold(self, job: Job) -> None:
        self._attach(job)
        assert self.job.split is not None
        self.split = self.job.split
        self.model = Facade(self.split)
        self.cluster = self.job.cluster

    def _step(self, x: Tensor, y: Tensor, key: Tensor, factor: float) -> Tensor | None:
        with torch.autocast(x.device.type, self.autocast, enabled=self.autocast is not None):
            if self.split.asynchronous:  # the whole step is made inside the pipe
                return self.job.train(x, y)
            self.optimizer.zero_grad()
            loss = self.job.backward(x, y)
            self._scale(factor)
            if self.clip is not None:
                self.job.clip(self.clip)
            self.optimizer.step()
            return loss

    def drain(self) -> list[Tensor]:
        """The losses of mini-batches that were still in an asynchronous pipe."""
        return [loss.detach().view(1) for loss in self.job.drain()]

    def each(self) -> Iterator[nn.Module]:
        self.job.drain()
        with self.cluster.uncounted():
            yield self.model

    def state_dict(self) -> dict[str, Any]:
        """What this process has: it goes on from there on the same mesh."""
        return {
            **self.job.own_state(),
            "model": {name: t.detach().clone() for name, t in self.split.state.held().items()},
            "optimizer": self._optimizer_state(),
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a checkpoint is of the parts that are held here."""
        return self.split.state.fits(state)

    def take_over(self, states: Sequence[dict[str, Any]], host_size: int | None) -> None:
        """Go on with what the processes that held this part have left."""
        module, first = self.split.module, self.split.state.first
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]

        def own(state: dict[str, Any]) -> dict[str, Any]:
            job, saved = dict(state), state["model"]
            optimizer = job.pop("optimizer")
            model = {name: saved[first.get(name, name)] for name in names if first.get(name, name) in saved}
            return {"model": model, "optimizer": optimizer, "job": job}

        self.job.take_over([own(state) for state in states], host_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.job.load_own_state(state)
        for name, tensor in self.split.state.held().items():
            tensor.data.copy_(state["model"][name])
        self.optimizer.load_state_dict(state["optimizer"])


class ElasticMeshReplica(MeshReplica):
    """The same where the number of replicas changes."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Factory,
        strategy: Strategy,
        cluster: ElasticCluster,
        mesh: Mesh,
        pipeline: Pipeline,
        found: RendezvousInfo,
        elastic: Elastic,
        *,
        clip: float | None = None,
        autocast: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        from hocket.train.elastic_split import elastic_split_job  # sockets are loaded only where they are needed

        JobReplica.__init__(self, model, loss, optimizer, clip, autocast)
        pipeline = replace(pipeline, loss=loss)
        self._hold(
            elastic_split_job(model, self.optimizer, strategy, cluster, mesh, pipeline, found, elastic, os.environ, **options)
        )

    def _step(self, x: Tensor, y: Tensor, key: Tensor, factor: float) -> Tensor | None:
        """A step that was made without a pass has no loss."""
        loss = super()._step(x, y, key, factor)
        return None if self.split.skipped else loss


class FullReplica(JobReplica):
    """A worker that keeps its part of weights, gradients and state (FSDP2). Worker 0's checkpoint has all of it, every worker's has
    its own buffers."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Factory,
        strategy: Strategy,
        cluster: Cluster,
        *,
        clip: float | None = None,
        autocast: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, loss, optimizer, clip, autocast)
        self.runtime = FsdpRuntime(cluster)
        self._attach(Job(model, self.optimizer, strategy, self.runtime, **options))

    def _step(self, x: Tensor, y: Tensor, key: Tensor, factor: float) -> Tensor:
        self.optimizer.zero_grad()
        loss = self._loss(x, y, key)
        loss.backward()
        if self.clip is not None:
            self.runtime.check_gradients()  # clipping would spread one NaN over all gradients
        self._clip()
        self.optimizer.step()
        return loss

    def each(self) -> Iterator[nn.Module]:
        """In one piece, with this worker's own buffers."""
        model, own = self.runtime.whole(), dict(self.model.named_buffers())
        for name, buffer in model.named_buffers():
            buffer.data.copy_(own[name])
        yield model

    def state_dict(self) -> dict[str, Any]:
        return {"whole": {**self.job.own_state(), **(self.job.full_state() or {})}, "buffers": dict(self.model.named_buffers())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from worker 0's ``whole``, which every worker is given, and from its own ``buffers``."""
        self.job.load_full_state(state["whole"])
        self.job.load_own_state(state["whole"])
        for name, buffer in self.model.named_buffers():
            buffer.data.copy_(state["buffers"][name])
