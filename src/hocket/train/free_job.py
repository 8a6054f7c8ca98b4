"""``parallelize`` for workers that talk to servers: an ordinary loop, pushes and fetches behind the optimiser's own hooks.

- Before the optimiser's step the gradients, clipped or accumulated as the loop did it, go to the worker's program, and weights that
  were requested earlier are applied; unless the step is a local one the gradients are hidden, so that the optimiser does nothing.
- After it the program pushes and fetches (:class:`~hocket.programs.server.worker.ServerWorker`).

The weights are on the shards, and so is the optimiser; the learning rates are this worker's. A parameter that was not used counts
as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.cluster.ledger import Entry
from hocket.cluster.virtual import VirtualCluster
from hocket.drivers.server_runtime import ServerRuntime
from hocket.errors import HocketError
from hocket.programs.account import Account
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.strategy import Strategy
from hocket.train.job import adopt, check_equal, check_job, check_optimizer, layout_for, refuse_newcomers
from hocket.train.watch import NonFinite

Connect = Callable[[Layout], ServerRuntime]


def optimizer_spec_for(strategy: Strategy, optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """The optimiser of the shards; under ``stale`` and in pairs the workers keep theirs, whatever it is."""
    if strategy.sync.averages_weights or strategy.topology.peer_to_peer:
        return OptimizerSpec("sgd", tuple({"lr": 0.0} for _ in optimizer.param_groups))
    return OptimizerSpec.of(optimizer, strategy.topology.server_optimizer)


def serves_itself(strategy: Strategy) -> bool:
    """Whether even a single worker needs its servers: they have an optimiser or a learning rate of their own."""
    return strategy.topology.server_optimizer is not None or strategy.topology.lr_factor != 1


@dataclass
class _Where:
    """This worker, for whoever counts bad gradients."""

    ledger: Account
    workers: range


class FreeLedger:
    """All workers' figures as the shards know them; any worker may ask at any time."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime

    def summary(self) -> dict[str, Any]:
        """Everything so far (:meth:`~hocket.drivers.server_runtime.ServerRuntime.summary`)."""
        return self._runtime.summary()

    def total(self) -> Entry:
        """Seconds, bytes and exchanges so far."""
        return self._runtime.total()


class FreeJob:
    """A model in parallel training with servers; made by :func:`hocket.parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        connect: Connect,
        cluster: Cluster | None = None,
        accumulate: int = 1,
        nonfinite: str = "raise",
        check: bool = True,
        seed: int = 0,
        scaler: Any = None,
        bucket_cap_bytes: int | None = None,
        first_bucket_cap_bytes: int | None = None,
        apart: Mapping[str, str] | None = None,
    ) -> None:
        """``connect`` makes the link to the shards; ``cluster`` is where workers agree on the model before they start, if any."""
        if scaler is not None:
            raise HocketError(f"{strategy}: a GradScaler wants all workers to skip together; use autocast with bfloat16 instead.")
        check_job(model, optimizer, strategy, accumulate, nonfinite)
        self.model, self.optimizer, self.strategy, self.accumulate, self.check = model, optimizer, strategy, accumulate, check
        self.weight = 1.0
        """This worker's share of the next exchange (set by :func:`hocket.distribute`); it counts where pushes make one update."""
        self.layout = layout_for(model, optimizer, strategy, bucket_cap_bytes, first_bucket_cap_bytes, apart)
        if not self.layout.buckets:
            raise HocketError("The optimiser holds no trainable parameter of this model; build it from model.parameters().")
        check_optimizer(model, optimizer)
        cluster = VirtualCluster(1) if cluster is None else cluster
        check_equal(model, self.layout, cluster, [str(strategy), f"seed={seed}"])
        spec = optimizer_spec_for(strategy, optimizer)
        named = dict(model.named_parameters())
        self._params = [[named[s.name] for s in b.slots] for b in self.layout.buckets]
        self.weights = [b.empty(1) for b in self.layout.buckets]
        self._ours = adopt(model, self.layout, self._params, self.weights, cluster)
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]
        self._hidden: list[tuple[nn.Parameter, Tensor | None]] = []
        self._together = strategy.sync.max_staleness == 0
        self.runtime = connect(self.layout)
        self.runtime.join(self.weights, spec)
        worker = self.runtime.config.worker
        self._nonfinite = NonFinite(nonfinite, self.layout, _Where(self.runtime.account, range(worker, worker + 1)))
        self.ledger = FreeLedger(self.runtime)
        self._handles = self._hook()

    # --- what users call ---------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the job is still on the model."""
        return bool(self._handles)

    @property
    def step(self) -> int:
        """Steps done; a worker that was away goes on with the others."""
        return self.runtime.step

    def state_dict(self) -> dict[str, Any]:
        raise HocketError("The weights are on the shards: save the model that job.averaged() gives instead.")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise HocketError("The weights are on the shards: load them into the model before hocket.parallelize(…) instead.")

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The weights as the shards have them now, for evaluation and checkpoints; any worker may enter alone."""
        with self.runtime.paused():
            rows, buffers = self.runtime.global_weights()
            kept = [t.clone() for t in (*self.weights, *self._buffers)]
            for own, new in zip(self.weights, rows, strict=True):
                own.copy_(new)
            self._set_buffers(buffers)
            try:
                yield self.model
            finally:
                for tensor, old in zip((*self.weights, *self._buffers), kept, strict=True):
                    tensor.data.copy_(old)

    def finish(self) -> nn.Module:
        """End the training: push what is left, and wait for the final weights, the same on all workers; all must call it."""
        if self._handles:
            self._set_buffers(self.runtime.finish())
        self.detach()
        return self.model

    def flush(self) -> None:
        """Apply what was requested, and push what has not been pushed yet."""
        if self._handles:
            self.runtime.flush()

    def detach(self) -> None:
        """Remove all hooks and leave; the model goes on alone, from the weights it has."""
        if self._handles:
            self.runtime.leave()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _hook(self) -> list[Any]:
        handles: list[Any] = []
        if self.accumulate > 1 and self._together:
            handles += [p.register_hook(self._weighed) for params in self._params for p in params]
        handles.append(self.optimizer.register_step_pre_hook(lambda *_: self._before_step()))
        handles.append(self.optimizer.register_step_post_hook(lambda *_: self._after_step()))
        return handles

    def _weighed(self, gradient: Tensor) -> Tensor:
        """One pass of several: each has its own share of samples, so it is weighed before it is added to the others."""
        return gradient * self.weight if self.weight != 1.0 else gradient

    def _before_step(self) -> None:
        refuse_newcomers(self.optimizer, self._ours)
        if self.check and self.runtime.steps_locally:  # its own optimiser will read them
            self._nonfinite.check_local(self._params, self.step + 1)
        self.runtime.before_update([rows[0] for rows in self._gradients()])
        if not self.runtime.steps_locally:
            self._hidden = [(p, p.grad) for params in self._params for p in params]
            for p, _ in self._hidden:
                p.grad = None

    def _after_step(self) -> None:
        for p, gradient in self._hidden:
            p.grad = gradient
        self._hidden = []
        lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        buffers = torch.cat([b.detach().flatten().float() for b in self._buffers]) if self._buffers else None
        self.runtime.after_update(lrs, buffers)

    def _gradients(self) -> list[Tensor]:
        """This step's gradients as rows of their own: those that are sent must not be written to any more."""
        fresh = [b.empty(1) for b in self.layout.buckets]
        for b, (bucket, rows, params) in enumerate(zip(self.layout.buckets, fresh, self._params, strict=True)):
            for view, p in zip(bucket.views(rows, 0), params, strict=True):
                if p.grad is not None:
                    if p.grad.is_sparse:
                        raise HocketError("A gradient is sparse; pushes are dense, so build the embedding with sparse=False.")
                    view.copy_(p.grad)
            if self.check:
                self._nonfinite.look(b, rows, self.step + 1)
            if self._together and self.weight != 1.0 and self.accumulate == 1:
                rows.mul_(self.weight)
        self._nonfinite.judge(self._nonfinite.found)
        return fresh

    def _set_buffers(self, flat: Tensor | None) -> None:
        if flat is None:
            return
        for buffer, part in zip(self._buffers, flat.split([b.numel() for b in self._buffers]), strict=True):
            buffer.data.copy_(part.view(buffer.shape))
