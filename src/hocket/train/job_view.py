"""A job's properties: its model, optimiser, cluster and rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.split.sharded import ShardedState
from hocket.train.elastic import Stateful
from hocket.train.gradients import Gradients
from hocket.train.runtimes.base import Binding, Runtime


class JobView:
    """The properties of a job, which its runtime and the model provide."""

    runtime: Runtime
    _binding: Binding
    _gradients: Gradients | None

    @property
    def model(self) -> nn.Module:
        """The model that is trained; a job that has ended does not keep it alive."""
        return self._binding.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimiser of the training loop."""
        return self._binding.optimizer

    @property
    def weight(self) -> float:
        """This worker's share of the next exchange: its samples × N / all samples (set by :func:`hocket.distribute`). It counts
        where the gradients of all workers make one update."""
        return self._binding.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._binding.weight = weight

    @property
    def samples(self) -> float:
        """Samples of all workers in the next exchange, where they differ from step to step: ``acco`` weighs the halves of a
        mini-batch by them. Hocket's own loops set it."""
        return self._binding.samples

    @samples.setter
    def samples(self, samples: float) -> None:
        self._binding.samples = samples

    def reads(self, data: Any) -> None:
        """:meth:`summary` tells what reading ``data``, a :func:`hocket.data.stream`, takes in this process: ``data_wait_s``,
        ``data_bytes`` and ``data_skipped``. All workers call it."""
        self.runtime.ledger.reading = data.figures

    def share(self, **shared: Stateful) -> None:
        """Hand these objects' states, such as ``scheduler=scheduler``, to workers that join an elastic run; a worker that has just
        joined loads them. In other runs nothing happens."""
        for name, one in shared.items():
            self.runtime.share(name, one)

    @property
    def step(self) -> int:
        """Steps done; with servers it jumps ahead where this worker was away."""
        return self.runtime.step

    @property
    def cluster(self) -> Cluster:
        """The workers that exchange what this process holds."""
        return self.runtime.cluster

    @property
    def weights(self) -> list[Tensor]:
        """The rows ``[1, values]`` per bucket in which the parameters lie."""
        return self._binding.weights

    @property
    def sharded(self) -> ShardedState | None:
        """The optimiser's state, where each worker has a part of it (ZeRO-1)."""
        return self.runtime.sharded

    @property
    def gradients_at(self) -> float:
        """When the last backward pass had computed all gradients (``time.perf_counter``), where hooks see them."""
        return 0.0 if self._gradients is None else self._gradients.done_at

    @property
    def overflow(self) -> bool:
        """Whether any worker's gradient was not finite in the last exchange; reading it clears it."""
        if self._gradients is None:
            return False
        found, self._gradients.overflow = self._gradients.overflow, False
        return found
