"""Collectives: all workers take part in every exchange (:class:`~hocket.programs.collective.CollectiveProgram` on a cluster)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.errors import HocketError
from hocket.programs.collective import CollectiveProgram
from hocket.programs.two_stage import TwoStageProgram, program_for
from hocket.split.sharded import ShardedState, refuse_sharding
from hocket.strategy import Strategy
from hocket.train.ledger_view import ClusterLedger, MeshAxes
from hocket.train.momentum import JobRows, give_state, take_momentum
from hocket.train.runtimes.base import Binding, FixedWorkers
from hocket.train.watch import Where


class CollectiveRuntime(FixedWorkers):
    """The workers of ``cluster``, one per process. ``zero=1``: each keeps a part of the optimiser's state (ZeRO-1)."""

    synchronous = True
    in_rows = True
    takes_gradients = False
    steps_locally = True
    program: CollectiveProgram | TwoStageProgram

    def __init__(self, cluster: Cluster, zero: int = 0, axes: MeshAxes | None = None) -> None:
        self.cluster, self.zero, self.axes = cluster, zero, axes
        self.alone = cluster.size == 1
        self.sharded: ShardedState | None = None
        self._flagged = False

    def terms(self) -> list[str]:
        return [f"zero={self.zero}"]

    def refuse(self, strategy: Strategy, scaler: Any) -> None:
        if self.cluster.rows != 1:
            raise HocketError(
                f"parallelize trains one worker per process, but {self.cluster.rows} are hosted here; use hocket.simulate."
            )
        refuse_sharding(strategy, self.zero, fsdp=False, scaler=scaler)

    def join(self, binding: Binding) -> None:
        self.binding, strategy = binding, binding.strategy
        if strategy.topology.sums_on_servers:
            from hocket.drivers.summation import serve_sums  # its sockets are loaded only where they are needed

            serve_sums(strategy, self.cluster)
        self.program = program_for(strategy, binding.layout, self.cluster, binding.weights, binding.seed)
        if momentum := strategy.exchanged == "momentum" and not self.alone:
            take_momentum(binding.optimizer, strategy.sync.period)
        give_state(self.program, JobRows(binding), momentum)
        self.ledger = ClusterLedger(self.cluster, self.axes)

    def hooked(self) -> None:
        if self.zero and not self.alone:
            binding = self.binding
            self.sharded = ShardedState(binding.model, binding.optimizer, self.cluster, binding.layout, binding.weights)
        self.cluster.ledger.resume()

    # --- steps ---------------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.program.step

    @property
    def where(self) -> Where:
        return self.cluster

    @property
    def linear(self) -> bool:
        return self.program.linear

    @property
    def keeps_residuals(self) -> bool:
        return self.program.keeps_residuals

    @property
    def mixes_gradients(self) -> bool:
        return self.program.mixes_gradients

    @property
    def weighs_gradients(self) -> bool:
        return self.program.mixes_gradients

    def gradient_ready(self, bucket: int, rows: Tensor) -> None:
        self.program.gradient_ready(bucket, rows)

    def flags_ready(self, flags: list[bool]) -> None:
        self._flagged = True
        self.program.flags_ready(torch.tensor([flags], device=self.cluster.device))

    def gradients_done(self) -> list[bool]:
        self.program.samples = self.binding.samples
        results, flagged = self.program.gradients_done(), self._flagged
        self._flagged = False
        return results[-1].tolist() if flagged else []

    def discard_gradients(self) -> None:
        self.program.discard_gradients()

    def any_worker(self, flag: bool) -> bool:
        return bool(self.cluster.all_reduce_any(torch.tensor([[flag]], device=self.cluster.device)))

    def before_update(self, gradients: Sequence[Tensor]) -> None:
        self.program.before_update(self.binding.weights)

    def after_update(self) -> None:
        self.program.after_update(self.binding.weights)

    def drain(self) -> None:
        self.program.drain()

    # --- the mean model ------------------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """All workers must enter together, except where there is nothing to average."""
        self.drain()
        if not self.alone and (self._replicas_differ or self.binding.buffers):
            self.cluster.wait_for_all("job.averaged()")
        with self.cluster.uncounted(), self.binding.restored():
            self._average()
            yield self.binding.model

    def finish(self) -> nn.Module:
        """All workers must call it; their figures are combined, too."""
        self.drain()
        self.cluster.wait_for_all("job.finish()")
        with self.cluster.uncounted():
            self._average()
        self.ledger.close_epoch()
        return self.binding.model

    def leave(self) -> None:
        self.drain()
        if self.program.momentum is not None:
            take_momentum(self.binding.optimizer, 0)
        if self.sharded is not None:
            self.sharded.detach()
            self.sharded = None
        self.cluster.ledger.pause()
        self.cluster.release()

    def _average(self) -> None:
        """Mean weights, where replicas differ, and mean float buffers."""
        if not self.alone and self._replicas_differ:
            for rows, whole in zip(self.binding.weights, self.program.whole(self.binding.weights), strict=True):
                self._mean(rows.copy_(whole))
        self._average_buffers()

    def _average_buffers(self) -> None:
        for buffer in [] if self.alone else self.binding.buffers:
            rows = buffer.data.reshape(1, -1).clone()
            self._mean(rows)
            buffer.data.copy_(rows.view(buffer.shape))

    @property
    def _replicas_differ(self) -> bool:
        return not self.binding.strategy.keeps_replicas_equal

    def _mean(self, rows: Tensor) -> None:
        exchange = self.cluster.exchange()
        exchange.submit(lambda: self.cluster.mean(rows, self.cluster.world), name=f"the mean of {rows.shape[1]} values")
        exchange.wait()

    # --- state ---------------------------------------------------------------------------------------------------------------

    def full_state(self) -> dict[str, Any] | None:
        raise HocketError("This model is not split: save model.state_dict() and optimizer.state_dict().")

    def load_full_state(self, state: dict[str, Any]) -> None:
        raise HocketError("This model is not split: use model.load_state_dict(…) and optimizer.load_state_dict(…).")

    def state_dict(self) -> dict[str, Any]:
        return self.program.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.program.load_state_dict(state)
