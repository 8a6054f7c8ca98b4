"""Collectives among workers that come and go: one generation of members after another.

- A loss interrupts the exchange in progress on all members. They form the next generation, agree whether the exchange counts, and
  otherwise begin it again from what they had before it.
- Workers join and leave at the end of a step that all agree on; one that joins gets the state of a worker that has it.
- A worker that the others went on without (it was stopped, or cut off) joins again as a new one.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.elastic import ElasticCluster
from hocket.cluster.elastic_exchange import Kept, tell_flags
from hocket.cluster.join import RendezvousInfo
from hocket.cluster.replica import ReplicaLost
from hocket.data.elastic_stream import Position as DataPosition
from hocket.data.elastic_stream import SampleStream
from hocket.drivers.elastic import GenerationStore, MemberDriver, leave_on_signals
from hocket.drivers.processes import release_memory, say
from hocket.errors import HocketError, WorkerLost
from hocket.programs.elastic.generation import Generation, Position, agreed
from hocket.train.elastic import Elastic, Stateful
from hocket.train.handover import Shared, load_state, pass_on, state_of
from hocket.train.runtimes.base import Binding
from hocket.train.runtimes.elastic_view import AWAY, ElasticView, Rejoined
from hocket.transport import Keys

BUILD_S = 20.0
"""How long members of a generation wait for each other's connections; longer than a rendezvous takes to find a lost one."""
_MOST_TRIES = 50
_PLACE = 8
"""Where a process tells its place in the data, after seven figures."""


class Left(SystemExit):
    """This worker has handed over and left; the others go on."""


class ElasticRuntime(ElasticView):
    """The worker of this process, whose group ``driver`` learns of."""

    def __init__(self, cluster: ElasticCluster, driver: MemberDriver, elastic: Elastic) -> None:
        super().__init__(cluster)
        self.alone = False
        self.driver, self.member, self.elastic = driver, driver.program, elastic
        self.events: list[dict[str, Any]] = []  # what happened: one entry per generation
        self.stream = SampleStream()  # which samples this worker computes
        self.shared = Shared(samples=self.stream)
        self._rescaled = 1.0  # since the state of another worker was taken
        self._newcomer, self._hold, self._meanwhile, self._members, self.common = True, False, False, tuple[int, ...](), ""
        self._given, self._flags = list[tuple[int, Tensor]](), list[bool]()
        self._tried, self._untidy, self._given_in, self._hold_from = tuple[int, ...](), False, 0, 0
        self.began: tuple[int, int] | None = None  # its place and the number of workers, where the run began with it
        self.on_last: Callable[[], None] = lambda: None  # called where all leave, at the end of a step
        cluster.latest_generation = lambda: self.member.latest.number
        cluster.abandoned = lambda: (
            self.member.excluded or (self.member.latest.number > self.cluster.generation and not self.member.latest.planned)
        )
        cluster.on_change = self._interrupted
        driver.on_abandon = self._abandon

    # --- as a runtime ----------------------------------------------------------------------------------------------------------

    def join(self, binding: Binding) -> None:
        super().join(binding)
        self.cluster.drain = self.program.drain
        self._terms = f"{binding.strategy}, seed {binding.seed}, {self.common or f'layout {binding.layout.digest()[:16]}'}"

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
            self.driver.call(self.member.wait_newer, latest.number if latest.planned else self.cluster.generation)
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

    # --- generations -----------------------------------------------------------------------------------------------------------

    def _end_of_step(self) -> None:
        """Where workers join and leave; with too few, wait for more."""
        if self._untidy:
            release_memory()
            self._untidy = False
        alone = self.cluster.size == 1 and self._heard() > self.cluster.generation
        while self.cluster.change or (self._hold and self.program.step >= self._hold_from) or alone:
            alone = False
            self.program.drain()
            if self.cluster.change and not self.cluster.assemble():
                continue
            self.driver.call(self.member.wait_newer, self.cluster.generation)
            self._form()

    def _interrupted(self, error: BaseException | None) -> bool:
        """An exchange has failed: form the next generation; whether the exchange counts."""
        number = self.cluster.generation
        if not self.cluster.abandoned():
            self.driver.begin(self.member.has_failed, number)
        self.driver.call(self.member.wait_newer, number)
        return self._form()

    def _heard(self) -> int:
        """The latest generation that this worker has heard of."""
        return self.most(self.member.latest.number)

    def most(self, value: int) -> int:
        """The largest ``value`` of all processes that hold this worker's model."""
        return value

    def _abandon(self, new: Generation) -> None:
        self.cluster.abort(self.cluster.generation + 1 if self.member.excluded else new.number)

    def _join(self) -> None:
        self.driver.call(self.member.join, self._terms)
        if self.member.over:
            say("the other workers have finished, so there is nothing left to join")
            self.driver.close()
            raise Left(0)

    def _form(self, lost: bool = False) -> bool:
        begun, again = time.monotonic(), False
        for _ in range(_MOST_TRIES):
            if lost or self.member.excluded or not self.member.inside:
                if self._meanwhile:
                    raise ReplicaLost(AWAY)
                if self.member.leaving and not (lost or self.member.latest.members or self.member.excluded or self._newcomer):
                    with self.driver.saving():
                        self.on_last()
                if not lost and (self.member.leaving or not self.member.excluded):  # it leaves, or another one of its replica
                    self.driver.begin(self.member.say_goodbye, self.member.latest.number)
                if self.member.leaving:
                    self.driver.close()
                    raise Left(0)
                again, lost, self._newcomer = True, False, True
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
        if self._given_in:  # the others may have gone on since it was given weights
            self._newcomer |= not generation.known(self.member.uid, self._given_in)
        cluster, newcomer = self.cluster, self._newcomer
        rank, size, parts = generation.rank(self.member.uid), len(generation.members), cluster.parts
        replicas, place = size // parts, rank // parts
        # Newcomers wait for the end of the others' step, however long; the others wait for newcomers that are there already.
        store = GenerationStore(self.driver, generation.number, math.inf if newcomer else BUILD_S)
        cluster.form(generation.number, store, rank, size, BUILD_S)
        own = [-1.0 if newcomer else cluster.done, cluster.held, cluster.kept is not None]
        own += [self.binding.weight, len(self._members), *self._told(), *self.stream.position]
        table = cluster.gather_everybody([float(value) for value in own])
        count, donor, known, lacks, begins = _agree(table, rank % parts, parts)
        joins = newcomer and donor != rank
        self.began = (rank, size) if begins else None if newcomer else self.began
        self._hand_over(donor, [r for r in range(rank % parts, size, parts) if not known[r]])
        self._form_replica(generation.number, store, place, table[place * parts : (place + 1) * parts])
        result = pass_on(cluster, donor, (lacks | ~known).nonzero().flatten().tolist() if lacks.any() else [], cluster.result)
        counts = not newcomer and cluster.done < count
        if newcomer:  # no longer one: others may go on from here where this one fails before it knows that all have the weights
            cluster.done, cluster.held, self._newcomer = count, False, False
            cluster.kept = None if result is None else Kept(result, 1)
        before, self._given_in = self._members, generation.number if newcomer or self._given_in else 0
        table[lacks, -1] = table[lacks, -2]  # an exchange counts that includes all they have computed
        places = [DataPosition(*map(int, row)) for row in table[known, _PLACE:].tolist()]
        if self.stream.missed(places):  # others have formed the generation before, in which this worker failed at the last moment
            self.stream.confirm()
            before = self._tried
        lost = tuple(r for r in range(len(before) // parts) if before[r * parts : (r + 1) * parts] not in generation.replicas)
        self.stream.propose(places, [] if generation.planned else lost, replicas, place)
        self._tried = generation.members
        found = self.program.regrouped(counts, self.binding.weights)
        if parts == 1 and ((table[:, 0] >= 0) & (table[:, 0] < count)).any():  # otherwise each has those of its part
            tell_flags(cluster, donor)
        cluster.wait_here()  # all have the weights
        scale = 1.0 if joins or not table[known, 3].any() else float(size / table[known, 3].sum()) * (float(known.sum()) / size)
        self.program.adopt(found, scale if abs(scale - 1.0) > 1e-9 else 1.0)
        was = int(table[donor if joins else rank, 4]) // parts
        self._rescaled *= (times := self.elastic.change(replicas, was))
        self.elastic.rescale(self.binding.optimizer, self.shared.all, times)
        cluster.kept = Kept(result, 1) if result is not None else cluster.kept
        cluster.done, cluster.held, self._given_in = count, False, 0
        self._hold, self._members, self._untidy = generation.hold, generation.members, True
        self._hold_from = 0 if parts == 1 else int((table[:, 6] + table[:, 7])[known].max())
        self.stream.confirm()
        self.driver.begin(self.member.has_formed, generation.number)
        seconds = time.monotonic() - begun
        entry = {"generation": generation.number, "workers": replicas, "step": self.program.step, "seconds": seconds}
        went, came = 0 if newcomer else len(lost), 0 if begins else int((~known).view(-1, parts).any(1).sum())
        self.events.append({**entry, "lost": 0 if generation.planned else went, "left": went * generation.planned, "joined": came})
        return counts

    # --- the state of a worker that joins --------------------------------------------------------------------------------------

    def _hand_over(self, donor: int, newcomers: list[int]) -> None:
        parts = self.binding, self.program, self.shared
        given = pass_on(self.cluster, donor, newcomers, lambda: {**state_of(*parts), "members": self._members})
        if given is not None:
            load_state(*parts, given)
            self._rescaled, self._members = 1.0, tuple(given["members"])

    def _told(self) -> list[float]:
        """What processes of a split model tell of themselves."""
        return [0.0, 0.0, 0.0]

    def _form_replica(self, number: int, store: GenerationStore, place: int, mates: Tensor) -> None:
        """Where a model is split, connect with the other processes of the replica ``place``, whose rows are ``mates``."""

    def share(self, name: str, one: Stateful) -> None:
        """Give a worker that joins this state, too; where this worker has just joined, take it."""
        optimizer = self.binding.optimizer
        if self._rescaled != 1.0 and getattr(one, "optimizer", None) is optimizer and hasattr(one, "base_lrs"):
            # A scheduler that was made before the job has the rates from before they followed the number of workers.
            one.base_lrs = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self.shared.add(name, one, lambda: self.elastic.rescale(None, [one], self._rescaled))


def _agree(table: Tensor, part: int, parts: int) -> tuple[int, int, Tensor, Tensor, bool]:
    """The number of exchanges that count, who gives its state, who has one, who lacks the result of the last exchange, and whether
    the training begins; by rows of all members: exchanges done (−1: a newcomer), whether it holds and keeps a result, and more.
    Where models are split, the donor is of the same part."""
    begins = bool((table[:, 0] < 0).all())
    for k in range(parts if table[:, 0].max() <= 0 else 0):
        if (table[k::parts, 0] < 0).all():
            table[k, 0] = 0.0  # with the first one's weights
    count = agreed([Position(int(done), bool(held), bool(kept)) for done, held, kept in table[:, :3].tolist()])
    known = table[:, 0] >= 0
    lacks = known & (table[:, 0] < count) & (table[:, 1] == 0)
    able = (table[:, 0] == count) & ((table[:, 2] > 0) | ~lacks.any()) & (torch.arange(len(table)) % parts == part)
    if not able.any() and known[part::parts].all():
        return count, -1, known, lacks, begins  # all hold what they need
    if not able.any():
        raise RuntimeError(f"Nobody has completed the last exchange of part {part}.")
    donor = int(able.nonzero()[0])
    return count, donor, known, lacks, begins


def elastic_runtime(cluster: ElasticCluster, found: RendezvousInfo, elastic: Elastic, keys: Keys | None) -> ElasticRuntime:
    """A worker of the elastic run whose rendezvous was ``found``."""
    return ElasticRuntime(cluster, member_driver(found, keys), elastic)


def member_driver(found: RendezvousInfo, keys: Keys | None, part: int = 0, parts: int = 1) -> MemberDriver:
    """The link to the rendezvous; signals make this worker leave."""
    driver = MemberDriver(found.address, found.job, keys, found.member, part, parts)
    driver.start()
    leave_on_signals(driver)
    return driver
