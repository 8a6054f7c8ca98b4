"""A worker's part in one generation of members after another: it joins, forms each group with the others, agrees with them on the
exchange in progress, gives or takes state, and leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hocket.cluster.elastic import ElasticCluster
from hocket.cluster.elastic_exchange import Kept, tell_flags
from hocket.cluster.replica import ReplicaLost
from hocket.data.elastic_stream import SampleStream
from hocket.drivers.elastic import GenerationStore, MemberDriver
from hocket.drivers.processes import release_memory, say
from hocket.errors import WorkerLost
from hocket.programs.elastic.generation import Generation
from hocket.train.elastic import Elastic, Stateful
from hocket.train.handover import Shared, load_state, pass_on, state_of
from hocket.train.runtimes.elastic_view import AWAY, ElasticView, Rejoined
from hocket.train.runtimes.member_table import MemberState, MemberTable

BUILD_S = 20.0
"""How long members of a generation that have all come wait for each other's connections."""
_MOST_TRIES = 50


class Left(SystemExit):
    """This worker has handed over and left; the others go on."""


class Regrouping(ElasticView):
    """The part of :class:`~hocket.train.runtimes.elastic.ElasticRuntime` that makes no steps."""

    def __init__(self, cluster: ElasticCluster, driver: MemberDriver, elastic: Elastic) -> None:
        super().__init__(cluster)
        self.alone = False
        self.driver, self.member, self.elastic = driver, driver.program, elastic
        self.stream = SampleStream()  # which samples this worker computes
        self.shared = Shared(samples=self.stream)
        self.common = ""  # what the terms of the run are beside strategy and seed, where that is not the layout
        self._terms = ""
        self._rescaled = 1.0  # since the state of another worker was taken
        self._newcomer, self._hold, self._meanwhile, self._members = True, False, False, tuple[int, ...]()
        self._untidy, self._given_in, self._hold_from = False, 0, 0
        self._failed = -1, 0  # the exchanges that were completed when one failed last, and how many times in a row that one did
        self.began: tuple[int, int] | None = None  # its place and the number of workers, where the run began with it
        self.on_last: Callable[[], None] = lambda: None  # called where all leave, at the end of a step
        cluster.latest_generation = lambda: self.member.latest.number
        cluster.abandoned = lambda: (
            self.member.excluded or (self.member.latest.number > self.cluster.generation and not self.member.latest.planned)
        )
        cluster.on_change = self._interrupted
        driver.on_abandon = self._abandon
        driver.watch(cluster.progress)
        cluster.progress.reports = lambda: list(self.member.reports)

    # --- generations ------------------------------------------------------------------------------------------------------------

    def _end_of_step(self) -> None:
        """Where workers join and leave; with too few, wait for more."""
        if self._untidy:
            release_memory()
            self._untidy = False
        alone = self.cluster.size == 1 and self._heard() > self.cluster.generation
        while self.cluster.change or (self._hold and self.program.step >= self._hold_from) or alone:
            alone = False
            self.program.drain()
            if self.cluster.change and not self.cluster.assemble() and not self.cluster.abandoned():
                self.driver.begin(self.member.has_failed, self.cluster.generation)
            self._ask(self.member.wait_newer, self.cluster.generation)
            self._form()

    def _ask(self, method: Callable[..., Any], argument: Any) -> None:
        """Wait for the rendezvous."""
        self.cluster.progress.wait_for_rendezvous(partial(self.driver.call, method, argument))

    def _interrupted(self, error: BaseException | None) -> bool:
        """An exchange has failed: form the next generation; whether the exchange counts."""
        number, (done, times) = self.cluster.generation, self._failed
        self._failed = self.cluster.done, times + 1 if done == self.cluster.done else 1
        if self._failed[1] > _MOST_TRIES:
            raise WorkerLost(f"The same exchange has failed {self._failed[1]} times in a row, the last time with: {error}")
        if not self.cluster.abandoned():
            self.driver.begin(self.member.has_failed, number)
        self._ask(self.member.wait_unplanned, number)
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
        self._ask(self.member.join, self._terms)
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
                        self._stay_until_all_have_ended()
                if not lost and (self.member.leaving or not self.member.excluded):  # it leaves, or another one of its replica
                    self.driver.begin(self.member.say_goodbye, self.member.latest.number)
                if self.member.leaving:
                    self.driver.close()
                    raise Left(0)
                again, lost, self._newcomer = True, False, True
                self.program.abandon()
                self._join()
            generation = self.member.latest
            counts = self._try_form(generation, begun)
            if counts is None:
                continue
            if again:
                raise Rejoined
            return counts
        raise WorkerLost(f"The workers could not form a group in {_MOST_TRIES} tries; see the rendezvous' output.")

    def _stay_until_all_have_ended(self) -> None:
        """Somebody was lost while all saved before they leave: those that live form one more generation, for whoever lacks the
        result of the last exchange."""
        while self.member.inside:
            generation = self.member.latest
            if self.cluster.generation < generation.number:
                self._try_form(generation, time.monotonic())
            else:
                self._ask(self.member.wait_newer, generation.number)

    def _try_form(self, generation: Generation, begun: float) -> bool | None:
        """Whether the exchange under way counts; None where the generation could not be formed, and a later one is there."""
        try:
            with self.cluster.uncounted(), self.cluster.progress.forming(generation.number, self.cluster.parts == 1):
                return self._form_one(generation, begun)
        except WorkerLost:
            raise
        except RuntimeError:
            self.driver.begin(self.member.has_failed, generation.number)
            self._ask(self.member.wait_newer, generation.number)
            return None

    def _form_one(self, generation: Generation, begun: float) -> bool:
        if self._given_in:  # the others may have gone on since it was given weights
            self._newcomer |= not generation.known(self.member.uid, self._given_in)
        cluster, newcomer = self.cluster, self._newcomer
        table = self._meet(generation)
        joins = newcomer and table.donor != table.rank
        self.began = (table.rank, len(table.rows)) if table.begins else None if newcomer else self.began
        self._hand_over(table)
        result = pass_on(cluster, table.donor, table.without_result, cluster.result)
        cluster.wait_here()  # connections are made in a short time, so all begin together
        self._form_replica(generation.number, self._store(generation), table)
        counts = not newcomer and cluster.done < table.count
        if newcomer:  # no longer one: others may go on from here where this one fails before it knows that all have the weights
            cluster.done, cluster.held, self._newcomer = table.count, False, False
            cluster.kept = None if result is None else Kept(result, 1)
        self._given_in = generation.number if newcomer or self._given_in else 0
        if self.stream.missed(table.positions):  # others have formed the one in which this worker failed at the last moment
            self.stream.confirm()
        firsts = [replica[0] for replica in generation.replicas]
        self.stream.propose(table.positions, firsts, cluster.rank, lost=not generation.planned)
        gone = sum(replica not in generation.replicas for replica in replace(generation, members=self._members).replicas)
        found = self.program.regrouped(counts, self.binding.weights)
        if cluster.parts == 1 and table.somebody_behind:  # otherwise each has those of its part
            tell_flags(cluster, table.donor)
        cluster.wait_here()  # all have the weights
        self.program.adopt(found, table.scale(joins))
        self._rescaled *= (times := self.elastic.change(cluster.size, table.before(joins)))
        self.elastic.rescale(self.binding.optimizer, self.shared.all, times)
        cluster.kept = Kept(result, 1) if result is not None else cluster.kept
        cluster.done, cluster.held, self._given_in = table.count, False, 0
        self._hold, self._members, self._untidy = generation.hold, generation.members, True
        self._hold_from = table.hold_from
        self.stream.confirm()
        self.driver.begin(self.member.has_formed, generation.number)
        self._note(generation, time.monotonic() - begun, 0 if newcomer else gone, table.joined)
        return counts

    def _meet(self, generation: Generation) -> MemberTable:
        """Connect with the members of a generation, and tell each other how far all are."""
        cluster, newcomer, store = self.cluster, self._newcomer, self._store(generation)
        rank, size = generation.rank(self.member.uid), len(generation.members)
        # Newcomers wait for the end of the others' step, however long; the others wait for newcomers that are there already.
        meet = partial(store.meet, generation.members)
        if newcomer:
            cluster.progress.wait_for_rendezvous(meet)
        else:
            cluster.wait_for_members(meet, f"the members of generation {generation.number}")
        cluster.form(generation.number, store, rank, size, BUILD_S, generation.host_size)
        done = -1.0 if newcomer else cluster.done
        held, keeps, weight = cluster.held, cluster.kept is not None, self.binding.weight
        own = MemberState(done, held, keeps, weight, len(self._members), cluster.of_figures, **self._further_state())
        self.stream.turn()
        rows = cluster.gather_everybody([float(value) for value in (*own, *self.stream.position)])
        return MemberTable(rows, rank, cluster.parts)

    def _store(self, generation: Generation) -> GenerationStore:
        return GenerationStore(self.driver, generation.number, BUILD_S)

    # --- the state of a worker that joins --------------------------------------------------------------------------------------

    def _hand_over(self, table: MemberTable) -> None:
        parts = self.binding, self.program, self.shared
        given = pass_on(self.cluster, table.donor, table.newcomers, lambda: {**state_of(*parts), "members": self._members})
        if given is not None:
            load_state(*parts, given)
            self._rescaled, self._members = 1.0, tuple(given["members"])

    def _further_state(self) -> dict[str, float]:
        """What processes of a split model tell of themselves."""
        return {}

    def _form_replica(self, number: int, store: GenerationStore, table: MemberTable) -> None:
        """Where a model is split, connect with the other processes of the replica."""

    def share(self, name: str, one: Stateful) -> None:
        """Give a worker that joins this state, too; where this worker has just joined, take it."""
        optimizer = self.binding.optimizer
        if self._rescaled != 1.0 and getattr(one, "optimizer", None) is optimizer and hasattr(one, "base_lrs"):
            # A scheduler that was made before the job has the rates from before they followed the number of workers.
            one.base_lrs = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self.shared.add(name, one, lambda: self.elastic.rescale(None, [one], self._rescaled))
