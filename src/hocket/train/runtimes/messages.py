"""Messages: each worker is a program that talks to servers or peers and does not wait for all others.

A *link* (:class:`~hocket.drivers.worker_runtime.WorkerRuntime`) is this program on sockets. Servers hold the weights and run the
optimiser; its options (learning rates, momentum, weight decay) are the worker's. Gossip peers keep their optimisers: their program
takes the weights before and after a step, not gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.cluster.virtual import VirtualCluster
from hocket.drivers.gossip_runtime import GossipRuntime
from hocket.drivers.server_runtime import ServerRuntime
from hocket.drivers.worker_runtime import WorkerRuntime
from hocket.errors import HocketError
from hocket.programs.account import Account
from hocket.programs.server.optimizer_spec import shard_optimizer, state_rows, workers_optimize
from hocket.strategy import Strategy
from hocket.train.ledger_view import MeshAxes, MessageLedger
from hocket.train.runtimes.base import Binding, FixedWorkers

Join = Callable[[Binding], WorkerRuntime]


@dataclass
class _Worker:
    """Whose gradients are looked at."""

    ledger: Account
    workers: range


class MessageRuntime(FixedWorkers):
    """A worker whose link ``join`` makes; workers agree on the model on ``cluster`` before they start, if there is one."""

    synchronous = False
    in_rows = True
    alone = False
    mixes_gradients = False
    linear = True
    keeps_residuals = False
    sharded = None

    def __init__(
        self, join: Join, cluster: Cluster | None = None, takes_gradients: bool = True, axes: MeshAxes | None = None
    ) -> None:
        self._join, self.takes_gradients, self.axes = join, takes_gradients, axes
        self.cluster: Cluster = VirtualCluster(1) if cluster is None else cluster
        self._handles: list[Any] = []

    def terms(self) -> list[str]:
        return []

    def refuse(self, strategy: Strategy, scaler: Any) -> None:
        if scaler is not None:
            raise HocketError(
                f"{strategy}: a GradScaler needs workers that skip a step together; use autocast with bfloat16 instead."
            )

    def join(self, binding: Binding) -> None:
        self.binding, strategy = binding, binding.strategy
        self.spec = None if workers_optimize(strategy) else shard_optimizer(strategy, binding.optimizer)
        self.weighs_gradients = binding.strategy.sync.max_staleness == 0
        self.link = self._join(binding)
        self.where = _Worker(self.link.account, range(self.link.worker, self.link.worker + 1))
        self.ledger = MessageLedger(self.link, self.axes)

    def hooked(self) -> None:
        """Servers have taken over the optimiser's state: what is loaded later would not reach them."""
        if self.spec is not None and self.binding.strategy.topology.server_optimizer is None:
            self._handles.append(self.binding.optimizer.register_load_state_dict_pre_hook(_refuse_state))

    # --- steps ---------------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.link.step

    @property
    def steps_locally(self) -> bool:
        return self.link.steps_locally

    def gradient_ready(self, bucket: int, rows: Tensor) -> None:
        raise AssertionError("gradients travel after the backward pass")

    def flags_ready(self, flags: list[bool]) -> None:
        raise AssertionError("gradients travel after the backward pass")

    def gradients_done(self) -> list[bool]:
        raise AssertionError("gradients travel after the backward pass")

    def discard_gradients(self) -> None:
        raise AssertionError("gradients travel after the backward pass")

    def any_worker(self, flag: bool) -> bool:
        raise AssertionError("workers do not step together")

    def before_update(self, gradients: Sequence[Tensor]) -> None:
        self.link.before_update([rows[0] for rows in gradients])

    def after_update(self) -> None:
        lrs = [float(group["lr"]) for group in self.binding.optimizer.param_groups]
        if self.spec is not None:
            self.link.set_options(self.spec.changes(self.binding.optimizer, self.binding.strategy.topology.server_optimizer))
        self.link.after_update(lrs, self.binding.flat_buffers)

    def drain(self) -> None:
        """What is under way does not touch the weights."""

    # --- the mean model ------------------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Any worker may enter alone."""
        with self.link.paused():
            rows, buffers = self.link.global_weights()
            with self.binding.restored():
                for own, new in zip(self.binding.weights, rows, strict=True):
                    own.copy_(new.view(1, -1))
                self.binding.set_buffers(buffers)
                yield self.binding.model

    def finish(self) -> nn.Module:
        """Push what is left, and wait for the final weights, the same on all workers; all must call it."""
        if self.link.attached:
            self.binding.set_buffers(self.link.finish())
        return self.binding.model

    def leave(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        if self.link.attached:
            self.link.leave()

    # --- state ---------------------------------------------------------------------------------------------------------------

    def full_state(self) -> dict[str, Any] | None:
        raise HocketError("This model is not split: save the model that job.averaged() gives.")

    def load_full_state(self, state: dict[str, Any]) -> None:
        raise HocketError("This model is not split: load weights into it before hocket.parallelize(…).")

    def state_dict(self) -> dict[str, Any]:
        """Residuals, sums, the step: what this worker adds to the weights, which ``averaged`` gives."""
        return self.link.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, before the first step of this job."""
        self.link.load_state_dict(state)


def _refuse_state(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    if state["state"]:
        raise HocketError(
            "optimizer.load_state_dict(…) after hocket.parallelize(…): the optimiser runs on servers, which began with the state "
            "that it had; load it before hocket.parallelize(…)."
        )


def server_runtime(
    connect: Callable[[Layout], ServerRuntime], cluster: Cluster | None = None, axes: MeshAxes | None = None
) -> MessageRuntime:
    """A worker of the shards that ``connect`` finds."""

    def join(binding: Binding) -> ServerRuntime:
        spec = shard_optimizer(binding.strategy, binding.optimizer)  # refuses an optimiser that shards do not know
        if not workers_optimize(binding.strategy) and binding.strategy.topology.server_optimizer is None:
            spec = replace(spec, state=state_rows(binding.optimizer, binding.params))
        link = connect(binding.layout)
        link.join(binding.weights, spec)
        return link

    return MessageRuntime(join, cluster, takes_gradients=True, axes=axes)


def peer_runtime(connect: Callable[[Layout], GossipRuntime], cluster: Cluster | None = None) -> MessageRuntime:
    """A worker among the peers that ``connect`` finds."""

    def join(binding: Binding) -> GossipRuntime:
        link = connect(binding.layout)
        binding.set_buffers(link.join(binding.weights, None, binding.flat_buffers))
        return link

    return MessageRuntime(join, cluster, takes_gradients=False)
