"""A process of a replica in an elastic run: other replicas come and go; its own is formed anew when one of its own is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.cluster.elastic import ElasticCluster
from hocket.cluster.replica import Replica, ReplicaLost
from hocket.drivers.elastic import GenerationStore, MemberDriver
from hocket.errors import WorkerLost
from hocket.programs.elastic.generation import Generation
from hocket.train.elastic import Elastic
from hocket.train.runtimes.elastic import ElasticRuntime
from hocket.train.runtimes.elastic_view import AWAY, Rejoined
from hocket.train.runtimes.member_table import MemberTable
from hocket.train.runtimes.regroup import BUILD_S


class StepVoid(Exception):
    """The others have ended the epoch, so the step under way, in which this process was interrupted, is none."""


class ReplicaRuntime(ElasticRuntime):
    """The process that holds one part of ``replica``."""

    def __init__(self, cluster: ElasticCluster, driver: MemberDriver, elastic: Elastic, replica: Replica) -> None:
        super().__init__(cluster, driver, elastic)
        self.replica = replica
        self.mid_step = False
        """It is in a step."""
        self.void = False
        """The step under way is none: it changes nothing, and is not counted."""
        self._skipping: int | None = None
        self.driven = False
        """The passes of the step are the job's own, so that it can be made without one."""
        replica.abandoned, replica.regroup, replica.watched = cluster.abandoned, self._regroup, cluster.watched

    # --- steps ---------------------------------------------------------------------------------------------------------------

    @property
    def skips(self) -> bool:
        """Its replica was formed when another process of it was in a step, so all make the next one without a pass; where the
        others had ended the epoch, there is none."""
        return self._skipping == self.stream.epoch

    @property
    def mixes_gradients(self) -> bool:
        return not self.void and super().mixes_gradients

    def gradients_done(self) -> list[bool]:
        self.mid_step = True
        return super().gradients_done()

    def before_update(self, gradients: Sequence[Tensor]) -> None:
        self.mid_step = True
        with contextlib.suppress(StepVoid):
            if not self.void:
                super().before_update(gradients)

    def after_update(self) -> None:
        self.mid_step, self.driven, self._skipping = False, False, None
        try:
            if not self.void:
                super().after_update()
        except ReplicaLost:
            self.rejoin()

    def _skip(self) -> None:
        if not self.driven:
            raise WorkerLost(AWAY) from None
        if not self.stream.skip():
            self.void = True
            for p in (p for row in self.binding.params for p in row):
                p.grad = None  # the optimiser leaves what has no gradient as it is
            raise StepVoid

    def _average(self) -> None:
        """Parts may have different numbers of buckets and buffers, but all processes make the same exchanges."""
        rows = [*self.program.whole(self.binding.weights)] if self._replicas_differ else []
        flat = torch.cat([t.reshape(1, -1).double() for t in [*rows, *self.binding.buffers]] or [torch.zeros(1, 0).double()], 1)
        self._mean(flat)
        into = [*self.binding.weights[: len(rows)], *(buffer.data for buffer in self.binding.buffers)]
        for tensor, mean in zip(into, flat.split([t.numel() for t in into], 1), strict=True):
            tensor.copy_(mean.view(tensor.shape))

    # --- generations -----------------------------------------------------------------------------------------------------------

    def rejoin(self) -> None:
        """Another process of this replica is lost: join as a new one, with the others' state at the end of a step."""
        with contextlib.suppress(Rejoined):
            self._form(lost=True)
        if self.mid_step:
            self._skip()

    def _regroup(self) -> None:
        """While this process waits for others of its replica."""
        self._meanwhile = True
        try:
            with self.cluster.progress.aside():
                self.program.drain()
                if self.cluster.abandoned():
                    self._interrupted(None)
        finally:
            self._meanwhile = False

    def _abandon(self, new: Generation) -> None:
        super()._abandon(new)
        if self.member.excluded:
            self.replica.abort()
        self.replica.wake()

    def most(self, value: int) -> int:
        with self.replica.waiting():
            return self.replica.most(value)

    def _join(self) -> None:
        self.replica.disconnect()
        super()._join()

    def _further_state(self) -> dict[str, float]:
        return {"connected": self.replica.connected, "mid_step": self.mid_step, "step": self.program.step}

    def _form_replica(self, number: int, store: GenerationStore, table: MemberTable) -> None:
        """Where one of its processes was in a step, it takes part in the next one without a pass, and so do the others."""
        mates, place = table.mates, self.cluster.rank
        if mates[:, 6].min() > 0 and bool((mates[:, 6] == mates[0, 6]).all()):
            return
        self.replica.connect(number, dist.PrefixStore(f"replica {place}", store), BUILD_S)
        self._skipping = self.stream.epoch if bool(mates[:, 7].any()) and not self.mid_step else None
