"""Workers that keep a part of everything (FSDP2), as the training loop sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.strategy import Strategy
from hocket.train.engines.loop import forked, random_modules
from hocket.train.job import Job
from hocket.train.replicas import Factory, Loss
from hocket.train.runtimes.fsdp import FsdpRuntime


class FullReplica:
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
        self.model, self.loss, self.clip, self.autocast = model, loss, clip, autocast
        self._optimizer = optimizer(list(model.parameters()))
        self._random = random_modules(model)
        self.runtime = FsdpRuntime(cluster)
        self.job = Job(model, self._optimizer, strategy, self.runtime, nonfinite=nonfinite, seed=seed)
        self.layout, self.ledger = self.job.layout, self.runtime.ledger

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def step(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], keys: Tensor, weights: Sequence[float], always: bool = False
    ) -> Tensor:
        self.job.weight = weights[0]
        self._optimizer.zero_grad()
        x, y = inputs[0], targets[0]
        with forked(bool(self._random), x.device), torch.autocast(x.device.type, self.autocast, enabled=self.autocast is not None):
            if self._random:
                torch.manual_seed(int(keys[0]))
            loss = self.loss(self.model(x), y)
        loss.backward()
        if self.clip is not None:
            self.runtime.check_gradients()  # clipping would spread one NaN over all gradients
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self._optimizer.step()
        return loss.detach().view(1)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        with self.job.averaged() as model:
            yield model

    def audit(self) -> None:
        """Every step has been looked at."""

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

    def load_full_state(self, state: dict[str, Any]) -> None:
        self.job.load_full_state(state)
