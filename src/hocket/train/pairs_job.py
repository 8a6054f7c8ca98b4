"""``parallelize`` for workers that average among themselves, without servers and without waiting for all workers.

- Before the optimiser's step the exchange under way is completed; the model then has the weights as they are by now, and the
  gradient, computed at older ones, is applied to these by the loop's own optimiser.
- After it the update is added to the worker's state, and the next exchange begins; it travels while the worker computes.

What the workers do is in :mod:`hocket.programs.gossip`; :class:`~hocket.drivers.gossip_runtime.GossipRuntime` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.cluster.ledger import Entry
from hocket.cluster.virtual import VirtualCluster
from hocket.drivers.gossip_runtime import GossipRuntime
from hocket.errors import HocketError
from hocket.programs.account import Account
from hocket.programs.gossip.state import Mean
from hocket.strategy import Strategy
from hocket.train.job import adopt, check_equal, check_job, check_optimizer, layout_for, refuse_newcomers
from hocket.train.watch import NonFinite

Connect = Callable[[Layout], GossipRuntime]


class PairsLedger:
    """All workers' figures, asked of all that answer; any worker may ask at any time."""

    def __init__(self, runtime: GossipRuntime) -> None:
        self._runtime = runtime

    def summary(self) -> dict[str, Any]:
        """Everything so far (:meth:`~hocket.drivers.gossip_runtime.GossipRuntime.summary`)."""
        return self._runtime.summary()

    def total(self) -> Entry:
        """Seconds, bytes and exchanges so far."""
        return self._runtime.total()


@dataclass
class _Where:
    """This worker, for whoever counts bad gradients."""

    ledger: Account
    workers: range


class PairsJob:
    """A model in parallel training without servers; made by :func:`hocket.parallelize`."""

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
    ) -> None:
        """``connect`` finds the other workers; ``cluster`` is where workers agree on the model before they start, if any."""
        if scaler is not None:
            raise HocketError(f"{strategy} does not support GradScaler; use autocast with bfloat16 instead.")
        check_job(model, optimizer, strategy, accumulate, nonfinite)
        self.model, self.optimizer, self.strategy, self.check = model, optimizer, strategy, check
        self.weight = 1.0
        """Set by :func:`hocket.distribute`; every worker's update is its own here, so it counts for nothing."""
        self.layout: Layout = layout_for(model, optimizer, strategy, bucket_cap_bytes, first_bucket_cap_bytes)
        if not self.layout.buckets:
            raise HocketError("The optimiser holds no trainable parameter of this model; build it from model.parameters().")
        check_optimizer(model, optimizer)
        cluster = VirtualCluster(1) if cluster is None else cluster
        check_equal(model, self.layout, cluster, [str(strategy), f"seed={seed}"])
        named = dict(model.named_parameters())
        self._params = [[named[s.name] for s in b.slots] for b in self.layout.buckets]
        self.weights = [b.empty(1) for b in self.layout.buckets]
        self._ours = adopt(model, self.layout, self._params, self.weights, cluster)
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.runtime = connect(self.layout)
        self._set_buffers(self.runtime.join(self.weights, None, self._flat_buffers()))
        worker = self.runtime.config.worker
        self._nonfinite = NonFinite(nonfinite, self.layout, _Where(self.runtime.account, range(worker, worker + 1)))
        self.ledger = PairsLedger(self.runtime)
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    # --- what users call ---------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the job is still on the model."""
        return bool(self._handles)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.runtime.step

    @property
    def mean(self) -> Mean | None:
        """What all workers have agreed on at the end: which took part (``here``), and their ``push_sum_weight``."""
        return self.runtime.mean

    @property
    def refused(self) -> dict[str, int]:
        """How many messages to this worker were refused, by reason."""
        return self.runtime.refused

    def state_dict(self) -> dict[str, Any]:
        raise HocketError("What a worker holds changes at any time: save the model that job.averaged() gives instead.")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise HocketError(
            "What a worker holds changes at any time: load weights into the model before hocket.parallelize(…) instead."
        )

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The mean model as it is now, for evaluation and checkpoints; any worker may enter alone. Silent workers are left out."""
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
        """End the training: the model becomes the mean of all workers that live, the same on all; all of them must call it."""
        if self._handles:
            self._set_buffers(self.runtime.finish())
        self.detach()
        return self.model

    def flush(self) -> None:
        """Agree with the others on the mean, as :meth:`finish`."""
        self.finish()

    def detach(self) -> None:
        """Remove all hooks and leave; the model goes on alone, from the weights it has."""
        if self._handles:
            self.runtime.leave()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _before_step(self) -> None:
        refuse_newcomers(self.optimizer, self._ours)
        if self.check:
            self._nonfinite.check_local(self._params, self.step + 1)
        self.runtime.before_update()

    def _after_step(self) -> None:
        self.runtime.after_update([float(group["lr"]) for group in self.optimizer.param_groups], self._flat_buffers())

    def _flat_buffers(self) -> Tensor | None:
        return torch.cat([b.detach().flatten().float() for b in self._buffers]) if self._buffers else None

    def _set_buffers(self, flat: Tensor | None) -> None:
        if flat is None:
            return
        for buffer, part in zip(self._buffers, flat.split([b.numel() for b in self._buffers]), strict=True):
            buffer.data.copy_(part.view(buffer.shape))
