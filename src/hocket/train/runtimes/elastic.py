"""Collectives among workers that come and go: one generation of members after another.

- A loss interrupts the exchange in progress on all members. They form the next generation, agree whether the exchange counts, and
  otherwise begin it again from what they had before it.
- Workers join and leave at the end of a step that all agree on; one that joins gets the state of a worker that has it.
- A worker that the others went on without (it was stopped, or cut off) joins again as a new one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import Tensor, nn

from hocket.cluster.elastic import ElasticCluster
from hocket.cluster.join import RendezvousInfo
from hocket.drivers.elastic import MemberDriver, leave_on_signals
from hocket.errors import HocketError, WorkerLost
from hocket.train.elastic import Elastic
from hocket.train.runtimes.base import Binding
from hocket.train.runtimes.elastic_view import AWAY, Rejoined
from hocket.train.runtimes.regroup import Regrouping
from hocket.transport import Keys


class ElasticRuntime(Regrouping):
    """The worker of this process, whose group ``driver`` learns of."""

    def __init__(self, cluster: ElasticCluster, driver: MemberDriver, elastic: Elastic) -> None:
        super().__init__(cluster, driver, elastic)
        self._given, self._flags = list[tuple[int, Tensor]](), list[bool]()

    def join(self, binding: Binding) -> None:
        super().join(binding)
        self.cluster.drain = self.program.drain
        self._terms = f"{binding.strategy}, seed {binding.seed}, {self.common or f'layout {binding.layout.digest()[:16]}'}"

    def hooked(self) -> None:
        self._join()
        with contextlib.suppress(Rejoined):  # nothing was under way
            self._form()
        super().hooked()

    def gradient_ready(self, bucket: int, rows: Tensor) -> None:
        self._given.append((bucket, rows))
        super().gradient_ready(bucket, rows)

    def flags_ready(self, flags: list[bool]) -> None:
        self._flags = flags
        super().flags_ready(flags)

    def gradients_done(self) -> list[bool]:
        try:
            agreed = super().gradients_done()
            self.stream.count()
            return agreed
        except Rejoined:  # gradients of weights that nobody has any more: zeros
            self._skip()
            for bucket, rows in self._given:
                rows.zero_()
                self.program.gradient_ready(bucket, rows)
            if not self.program.mixes_gradients:
                return self._flags
            self.flags_ready(self._flags)
            return super().gradients_done()
        finally:
            self._given = []

    def before_update(self, gradients: Sequence[Tensor]) -> None:
        before = self.program.exchanges
        try:
            super().before_update(gradients)
        except Rejoined:
            self._skip()
            super().before_update(gradients)
        if self.program.exchanges > before:
            self.stream.count()

    def after_update(self) -> None:
        with contextlib.suppress(Rejoined):  # the state is that of the end of a step
            before = self.program.exchanges
            super().after_update()
            if self.program.exchanges > before:
                self.stream.count()
            self._end_of_step()

    def finish(self) -> nn.Module:
        with self.in_step():
            model = super().finish()
            self.end()
            return model

    def end(self) -> None:
        """The training is complete: wait until it is for all members, who may have to know that the last exchange counts."""
        self.driver.begin(self.member.finish)
        while not self.member.over:
            latest = self.member.latest
            self._ask(self.member.wait_newer, latest.number if latest.planned else self.cluster.generation)
            if not self.member.over and not self.member.latest.planned:
                self._form()

    def leave(self) -> None:
        super().leave()
        with contextlib.suppress(HocketError, RuntimeError):
            self.driver.begin(self.member.say_goodbye, 0)
        self.driver.close()
        self.cluster.close()

    def _skip(self) -> None:
        """The step under way is that of the round that the others compute next."""
        if not self.stream.skip():
            raise WorkerLost(AWAY)


def elastic_runtime(cluster: ElasticCluster, found: RendezvousInfo, elastic: Elastic, keys: Keys | None) -> ElasticRuntime:
    """A worker of the elastic run whose rendezvous was ``found``."""
    return ElasticRuntime(cluster, member_driver(found, keys), elastic)


def member_driver(found: RendezvousInfo, keys: Keys | None, part: int = 0, parts: int = 1) -> MemberDriver:
    """The link to the rendezvous; signals make this worker leave."""
    driver = MemberDriver(found.address, found.job, keys, found.member, part, parts)
    driver.start()
    leave_on_signals(driver)
    return driver
