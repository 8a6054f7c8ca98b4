"""Collectives among workers that come and go: one generation of members after another.

- A loss interrupts the exchange in progress on all members. They form the next generation, agree whether the exchange counts, and
  otherwise begin it again from what they had before it.
- Workers join and leave at the end of a step that all agree on; one that joins gets the state of a worker that has it.
- A worker that the others went on without (it was stopped, or cut off) joins again as a new one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.elastic import ElasticCluster
from hocket.cluster.join import RendezvousInfo
from hocket.data.elastic_stream import Position as DataPosition
from hocket.data.elastic_stream import SampleStream
from hocket.drivers.elastic import GenerationStore, MemberDriver, leave_on_signals
from hocket.drivers.processes import say
from hocket.errors import HocketError, WorkerLost
from hocket.programs.elastic.generation import Generation, Position, agreed
from hocket.strategy import Strategy
from hocket.train.elastic import Elastic, Stateful
from hocket.train.handover import Shared, load_state, pack_state, receive_state, send_state, state_of, unpack_state
from hocket.train.runtimes.base import Binding
from hocket.train.runtimes.collective import CollectiveRuntime
from hocket.transport import Keys

_BUILD_S = 20.0
"""How long members of a generation wait for each other's connections; longer than a rendezvous takes to find a lost one."""
_MOST_TRIES = 50
_AWAY = "This worker was away, and the others went on without it; start it again to join them."


class Rejoined(Exception):
    """This worker was away; it has the others' state now, and what it was about to do is void."""


class Left(SystemExit):
    """This worker has handed over and left; the others go on."""


class ElasticRuntime(CollectiveRuntime):
    """The worker of this process, whose group ``driver`` learns of."""

    def __init__(self, cluster: ElasticCluster, driver: MemberDriver, elastic: Elastic) -> None:
        super().__init__(cluster)
        self.alone = False
        self.cluster: ElasticCluster = cluster
        self.driver, self.member, self.elastic = driver, driver.program, elastic
        self.events: list[dict[str, Any]] = []
        """What happened: one entry per generation."""
        self.stream = SampleStream()
        """Which samples this worker computes."""
        self.shared = Shared(samples=self.stream)
        self._rescaled = 1.0  # since the state of another worker was taken
        self._newcomer, self._hold, self._members = True, False, tuple[int, ...]()
        self._tried = tuple[int, ...]()
        self._given: list[tuple[int, Tensor]] = []
        self._flags: list[bool] = []
        cluster.latest_generation = lambda: self.member.latest.number
        cluster.abandoned = lambda: (
            self.member.excluded or (self.member.latest.number > self.cluster.generation and not self.member.latest.planned)
        )
        cluster.on_change = self._interrupted
        driver.on_abandon = lambda generation: cluster.abort(
            generation.number if not self.member.excluded else cluster.generation + 1
        )

    # --- as a runtime ----------------------------------------------------------------------------------------------------------

    def refuse(self, strategy: Strategy, scaler: Any) -> None:
        super().refuse(strategy, scaler)
        if strategy.topology.sums_on_servers:
            raise HocketError(f"{strategy}: servers that sum know a fixed number of workers; use allreduce with elastic.")

    def join(self, binding: Binding) -> None:
        super().join(binding)
        self.cluster.drain = self.program.drain
        self._terms = f"{binding.strategy}, seed {binding.seed}, layout {binding.layout.digest()[:16]}"

    def hooked(self) -> None:
        self._join()
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

    def any_worker(self, flag: bool) -> bool:
        with self._in_step():
            return super().any_worker(flag)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        with self._in_step(), super().averaged() as model:
            yield model

    def finish(self) -> nn.Module:
        with self._in_step():
            model = super().finish()
            self.end()
            return model

    def end(self) -> None:
        """The training is complete: wait until it is for all members, who may have to know that the last exchange counts."""
        self.driver.begin(self.member.finish)
        while not self.member.over:
            latest = self.member.latest
            self.driver.call(self.member.wait_newer, latest.number if latest.planned else self.cluster.generation)
            if not self.member.over and not self.member.latest.planned:
                self._form()

    def figures(self) -> dict[str, Any]:
        """How many workers there are now, and what has happened to others so far."""
        counts = {name: sum(event[name] for event in self.events) for name in ("lost", "left", "joined")}
        data = {"dealt_again": self.stream.dealt_again, "skipped": self.stream.skipped}
        return {"workers": self.cluster.size, **counts, "regroup_s": sum(event["seconds"] for event in self.events), **data}

    def leave(self) -> None:
        super().leave()
        with contextlib.suppress(HocketError, RuntimeError):
            self.driver.begin(self.member.say_goodbye, 0)
        self.driver.close()
        self.cluster.close()

    def _mean(self, rows: Tensor) -> None:
        self.cluster.transact(lambda: self.cluster.mean(rows, self.cluster.world), rows)

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            yield
        except Rejoined:
            raise WorkerLost(_AWAY) from None

    def _skip(self) -> None:
        """The step under way is that of the round that the others compute next."""
        if not self.stream.skip():
            raise WorkerLost(_AWAY)

    # --- generations -----------------------------------------------------------------------------------------------------------

    def _end_of_step(self) -> None:
        """Where workers join and leave; with too few, wait for more."""
        alone = self.cluster.size == 1 and self.member.latest.number > self.cluster.generation
        while self.cluster.change or self._hold or alone:
            alone = False
            self.program.drain()
            self.driver.call(self.member.wait_newer, self.cluster.generation)
            self._form()

    def _interrupted(self, error: BaseException | None) -> bool:
        """An exchange has failed: form the next generation; whether the exchange counts."""
        number = self.cluster.generation
        if not self.cluster.abandoned():
            self.driver.begin(self.member.has_failed, number)
        self.driver.call(self.member.wait_newer, number)
        return self._form()

    def _join(self) -> None:
        self.driver.call(self.member.join, self._terms)
        if self.member.over:
            say("the other workers have finished, so there is nothing left to join")
            self.driver.close()
            raise Left(0)

    def _form(self) -> bool:
        begun, again = time.monotonic(), False
        for _ in range(_MOST_TRIES):
            if self.member.excluded or not self.member.inside:
                if self.member.leaving:
                    self.driver.begin(self.member.say_goodbye, self.member.latest.number)
                    self.driver.close()
                    raise Left(0)
                again = self._newcomer = True
                self.program.abandon()
                self._join()
            generation = self.member.latest
            try:
                with self.cluster.uncounted():
                    counts = self._form_one(generation, begun)
            except WorkerLost:
                raise
            except RuntimeError:
                self.driver.begin(self.member.has_failed, generation.number)
                self.driver.call(self.member.wait_newer, generation.number)
                continue
            if again:
                raise Rejoined
            return counts
        raise WorkerLost(f"The workers could not form a group in {_MOST_TRIES} tries; see the rendezvous' output.")

    def _form_one(self, generation: Generation, begun: float) -> bool:
        cluster, before = self.cluster, self._members
        rank, size = generation.rank(self.member.uid), len(generation.members)
        cluster.form(generation.number, GenerationStore(self.driver, generation.number), rank, size, _BUILD_S)
        own = [-1.0 if self._newcomer else cluster.done, cluster.held, self.binding.weight, len(before), *self.stream.position]
        table = self._gathered(torch.tensor([own], dtype=torch.float64))
        begins = bool((table[:, 0] < 0).all())
        if begins:
            table[0, 0] = 0.0  # with the first one's weights
        count = agreed([Position(int(done), bool(held)) for done, held in table[:, :2].tolist()])
        donor = int((table[:, 0] == count).nonzero()[0])
        joins = self._newcomer and donor != rank
        self._hand_over(donor, [r for r in range(size) if table[r, 0] < 0])
        counts = not self._newcomer and cluster.done < count
        known = table[:, 0] >= 0
        places = [DataPosition(*map(int, row)) for row in table[known, 4:].tolist()]
        if self.stream.missed(places):  # others have formed the generation before, in which this worker failed at the last moment
            self.stream.confirm()
            before = self._tried
        lost = tuple(r for r, uid in enumerate(before) if uid not in generation.members)
        self.stream.propose(places, [] if generation.planned else lost, size, rank)
        self._tried = generation.members
        found = self.program.regrouped(counts, self.binding.weights)
        if ((table[:, 0] >= 0) & (table[:, 0] < count)).any():
            cluster.tell_flags(donor)
        cluster.wait_here()  # all have the weights
        # --- from here on this generation is formed ---
        scale = 1.0 if joins else float(size / table[known, 2].sum().clamp(min=1e-9)) * (float(known.sum()) / size)
        self.program.adopt(found, scale if abs(scale - 1.0) > 1e-9 else 1.0)
        was = int(table[donor if joins else rank, 3])
        self._rescaled *= size / was if was else 1.0
        self.elastic.rescale(self.binding.optimizer, self.shared.all, size / was if was else 1.0)
        cluster.done, cluster.held, self._newcomer = count, False, False
        self._hold, self._members = generation.hold, generation.members
        self.stream.confirm()
        self.driver.begin(self.member.has_formed, generation.number)
        seconds = time.monotonic() - begun
        entry = {"generation": generation.number, "workers": size, "step": self.program.step, "seconds": seconds}
        went, came = len(lost), 0 if begins else int((~known).sum())
        self.events.append({**entry, "lost": 0 if generation.planned else went, "left": went * generation.planned, "joined": came})
        return counts

    def _gathered(self, values: Tensor) -> Tensor:
        return self.cluster.start(lambda: self.cluster.all_gather_metrics(values))()

    # --- the state of a worker that joins --------------------------------------------------------------------------------------

    def _hand_over(self, donor: int, newcomers: list[int]) -> None:
        if self.cluster.rank == donor and newcomers:
            packed = pack_state(state_of(self.binding, self.program, self.shared))
            self.cluster.start(lambda: send_state(packed, newcomers))()
        elif self.cluster.rank in newcomers:
            packed = self.cluster.start(lambda: receive_state(donor))()
            load_state(self.binding, self.program, self.shared, unpack_state(packed))
            self._rescaled = 1.0

    def share(self, name: str, one: Stateful) -> None:
        """Give a worker that joins this state, too; where this worker has just joined, take it."""
        self.shared.add(name, one, lambda: self.elastic.rescale(None, [one], self._rescaled))


def elastic_runtime(cluster: ElasticCluster, found: RendezvousInfo, elastic: Elastic, keys: Keys | None) -> ElasticRuntime:
    """A worker of the elastic run whose rendezvous was ``found``."""
    driver = MemberDriver(found.address, found.job, keys, found.member)
    driver.start()
    leave_on_signals(driver)
    return ElasticRuntime(cluster, driver, elastic)
