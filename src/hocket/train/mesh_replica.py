"""One replica whose model is split over processes, as the training loop sees it: this process's part, and a job on a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.split.mesh import Mesh
from hocket.split.options import Pipeline
from hocket.split.split_model import Facade
from hocket.strategy import Strategy
from hocket.train.replicas import Factory, Loss
from hocket.train.split_job import split_job


class MeshReplica:
    """This process's part of a replica."""

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
        self.clip, self.autocast = clip, autocast
        self._optimizer = optimizer(list(model.parameters()))
        self.job = split_job(model, self._optimizer, strategy, world, mesh, replace(pipeline, loss=loss), **options)
        assert self.job.split is not None
        self.split = self.job.split
        self.model: nn.Module = Facade(self.split)
        self.layout, self.ledger, self.cluster = self.job.layout, self.job.runtime.ledger, self.job.cluster

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def step(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], keys: Tensor, weights: Sequence[float], always: bool = False
    ) -> Tensor:
        self.job.weight = weights[0]
        x, y = inputs[0], targets[0]
        with torch.autocast(x.device.type, self.autocast, enabled=self.autocast is not None):
            if self.clip is None:
                loss = self.job.train(x, y)
            else:
                self._optimizer.zero_grad()
                loss = self.job.backward(x, y)
                self.job.clip(self.clip)
                self._optimizer.step()
        return torch.empty(0) if loss is None else loss.detach().view(1)

    def drain(self) -> list[Tensor]:
        """The losses of mini-batches that were still in an asynchronous pipe."""
        return [loss.detach().view(1) for loss in self.job.drain()]

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        with self.job.averaged() as model:
            yield model

    def audit(self) -> None:
        """Every step has been looked at."""

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
            "optimizer": self._optimizer.state_dict() if sharded is None else sharded.saved(),
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a checkpoint is of the parts that are held here."""
        return self.split.state.fits(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.job.load_state_dict(state)
        for name, tensor in self.split.state.held().items():
            tensor.data.copy_(state["model"][name])
        self._optimizer.load_state_dict(state["optimizer"])

    def load_full_state(self, state: dict[str, Any]) -> None:
        self.job.load_full_state(state)
