"""Replicas of which a process holds a part, as the training loop sees them: on a mesh, or with a part of everything (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.split.split_model import Facade, SplitModel
from hocket.train.job import Job
from hocket.train.replicas import Factory, JobReplica, LiveReplica, Loss
from hocket.train.runtimes.fsdp import FsdpRuntime


class MeshReplica(JobReplica):
    """This process's part of a replica that is split over a mesh."""

    split: SplitModel

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Factory,
        make: Callable[[torch.optim.Optimizer], Job],
        *,
        clip: float | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, loss, optimizer, make, clip, autocast)
        assert self.job.split is not None
        self.split = self.job.split
        self.model = Facade(self.split)

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
        """Finish the mini-batches in an asynchronous pipe; returns their losses."""
        return [loss.detach().view(1) for loss in self.job.drain()]

    def each(self) -> Iterator[nn.Module]:
        self.job.drain()
        with self.cluster.uncounted():
            yield self.model

    def state_dict(self) -> dict[str, Any]:
        """The state of this process, to resume on the same mesh."""
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


class FullReplica(LiveReplica):
    """A worker that keeps its part of weights, gradients and state (FSDP2). Worker 0's checkpoint has all of it, every worker's has
    its own buffers."""

    @property
    def _runtime(self) -> FsdpRuntime:
        assert isinstance(self.job.runtime, FsdpRuntime)
        return self.job.runtime

    def _step(self, x: Tensor, y: Tensor, key: Tensor, factor: float) -> Tensor:
        self.optimizer.zero_grad()
        loss = self._loss(x, y, key)
        loss.backward()
        if self.clip is not None:
            self._runtime.check_gradients()  # clipping would spread one NaN over all gradients
        self._clip()
        self.optimizer.step()
        return loss

    def each(self) -> Iterator[nn.Module]:
        """The whole model, with this worker's own buffers."""
        model, own = self._runtime.whole(), dict(self.model.named_buffers())
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
