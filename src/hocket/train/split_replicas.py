"""Replicas of which a process holds a part, as the training loop sees them: on a mesh, or with a part of everything (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.split.mesh import Mesh
from hocket.split.options import Pipeline
from hocket.split.split_model import Facade
from hocket.strategy import Strategy
from hocket.train.engines.loop import draws_numbers, forked
from hocket.train.job import Job
from hocket.train.replicas import Factory, Loss
from hocket.train.runtimes.fsdp import FsdpRuntime
from hocket.train.split_job import split_job


class _JobReplica:
    """A replica whose job makes all exchanges."""

    model: nn.Module
    job: Job

    def __init__(self, model: nn.Module, optimizer: Factory, clip: float | None, autocast: torch.dtype | None) -> None:
        self.clip, self.autocast = clip, autocast
        self.optimizer = optimizer(list(model.parameters()))

    def _attach(self, job: Job) -> None:
        self.job, self.layout, self.ledger = job, job.layout, job.runtime.ledger

    def step(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], keys: Tensor, weights: Sequence[float], always: bool = False
    ) -> Tensor:
        self.job.weight = weights[0]
        loss = self._step(inputs[0], targets[0], keys[0])
        return torch.empty(0) if loss is None else loss.detach().view(1)

    def _step(self, x: Tensor, y: Tensor, key: Tensor) -> Tensor | None:
        """A step on one mini-batch; its loss."""
        raise NotImplementedError

    def _autocast(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, self.autocast, enabled=self.autocast is not None)

    def averaged(self) -> AbstractContextManager[nn.Module]:
        return self.job.averaged()

    def audit(self) -> None:
        """Every step has been looked at."""

    def load_full_state(self, state: dict[str, Any]) -> None:
        self.job.load_full_state(state)


class MeshReplica(_JobReplica):
    """This process's part of a replica that is split over a mesh."""

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
        super().__init__(model, optimizer, clip, autocast)
        self._attach(split_job(model, self.optimizer, strategy, world, mesh, replace(pipeline, loss=loss), **options))
        assert self.job.split is not None
        self.split = self.job.split
        self.model: nn.Module = Facade(self.split)
        self.cluster = self.job.cluster

    def _step(self, x: Tensor, y: Tensor, key: Tensor) -> Tensor | None:
        with self._autocast(x):
            if self.clip is None:
                return self.job.train(x, y)
            self.optimizer.zero_grad()
            loss = self.job.backward(x, y)
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
        state, sharded = self.job.state_dict(), self.job.sharded
        return {
            **state,
            "model": {name: t.detach().clone() for name, t in self.split.state.held().items()},
            "optimizer": self.optimizer.state_dict() if sharded is None else sharded.saved(),
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a checkpoint is of the parts that are held here."""
        return self.split.state.fits(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.job.load_state_dict(state)
        for name, tensor in self.split.state.held().items():
            tensor.data.copy_(state["model"][name])
        self.optimizer.load_state_dict(state["optimizer"])


class FullReplica(_JobReplica):
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
        seed: int = 0,
        clip: float | None = None,
        autocast: torch.dtype | None = None,
        nonfinite: str = "raise",
    ) -> None:
        super().__init__(model, optimizer, clip, autocast)
        self.model, self.loss, self.runtime = model, loss, FsdpRuntime(cluster)
        self._random = draws_numbers(model, loss)
        self._attach(Job(model, self.optimizer, strategy, self.runtime, nonfinite=nonfinite, seed=seed))

    def _step(self, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with forked(self._random, x.device, int(key)), self._autocast(x):
            loss = self.loss(self.model(x), y)
        loss.backward()
        if self.clip is not None:
            self.runtime.check_gradients()  # clipping would spread one NaN over all gradients
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss

    def each(self) -> Iterator[nn.Module]:
        """In one piece, with this worker's own buffers."""
        model, own = self.runtime.whole(), dict(self.model.named_buffers())
        for name, buffer in model.named_buffers():
            buffer.data.copy_(own[name])
        yield model

    def state_dict(self) -> dict[str, Any]:
        return {"whole": {**self.job.state_dict(), **(self.job.full_state() or {})}, "buffers": dict(self.model.named_buffers())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from worker 0's ``whole``, which every worker is given, and from its own ``buffers``."""
        self.job.load_full_state(state["whole"])
        self.job.load_state_dict(state["whole"])
        for name, buffer in self.model.named_buffers():
            buffer.data.copy_(state["buffers"][name])
