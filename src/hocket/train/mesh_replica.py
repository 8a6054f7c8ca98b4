"""One replica whose model is split over processes, as the training loop sees it: this process's part, and a job on a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.split import Mesh
from hocket.strategy import Strategy
from hocket.train.mesh_job import Facade, MeshJob
from hocket.train.replicas import Factory, Loss


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
        sample: Tensor,
        *,
        clip: float | None = None,
        autocast: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self.clip, self.autocast = clip, autocast
        self._optimizer = optimizer(list(model.parameters()))
        self.job = MeshJob(model, self._optimizer, strategy, world, mesh, loss=loss, sample=sample, **options)
        self.model: nn.Module = Facade(self.job)
        self.layout, self.ledger, self.cluster = self.job.layout, self.job.ledger, self.job.cluster

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
        return self.job.state_dict()

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a checkpoint is of the parts that are held here."""
        return self.job.fits(state)

    def load_whole(self, state: Mapping[str, Any]) -> None:
        self.job.load_whole(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.job.load_state_dict(state)
