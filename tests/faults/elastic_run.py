"""Elastic members and their rendezvous under a fault schedule, and the invariants that they must keep.

Exchanges are simulated: a collective of a generation ends, for each member at a time of its own, once all have entered it. A
loss interrupts it for some members before its end and for others after it. Always: one list of members per number of a generation;
whoever forms a generation has the same exchanges behind it as its other members; newcomers get weights at the end of a step alone;
at the end all that live are members and go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from faults.simulated import QUIET_S, Fault, FaultyNetwork, Outcome, Schedule, trace_messages
from hocket.drivers.simulation import Call, Simulation
from hocket.programs.elastic.generation import Position, agreed
from hocket.programs.elastic.member import Abandon, Member
from hocket.programs.elastic.rendezvous import Rendezvous

HANG_S, MAX_EVENTS = QUIET_S + 240.0, 200_000
RENDEZVOUS = ("shard", 0)
_EVERY = 3
"""Exchanges of a step: only the last is at its end."""


@dataclass
class Worker:
    """A process: its member, and where its training stands."""

    member: Member
    log: list[int] | None = None
    """For each completed exchange the generation in which it was made; None: it has no weights yet."""
    held: int | None = None
    """The generation of the exchange whose result it holds."""
    generation: int = 0
    change: bool = False
    """All members know that a planned generation follows."""
    work: int = 0
    """Which call it waits for; those of work that was abandoned come to nothing."""
    at_end: bool = True
    """It is at the end of a step."""
    leaves: bool = False


@dataclass
class Collective:
    """One operation of a generation that ends once all members are in it."""

    inside: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """By worker: its call, and what it has brought."""
    over: bool = False


class ElasticRun:
    """``workers`` workers of which at least ``least`` train; those that crash come back as newcomers."""

    def __init__(self, schedule: Schedule, workers: int, least: int) -> None:
        self.schedule, self.rng = schedule, random.Random(schedule.seed ^ 0xE1A5)
        self.outcome = Outcome(schedule.seed, faults=len(schedule.faults) + len(schedule.partitions))
        self.simulation = Simulation(FaultyNetwork(schedule))
        self.simulation.on_call, self.simulation.on_idle, self.simulation.on_effect = self._called, self._idle, self._effect
        self.calls: dict[str, Callable[[], None]] = {}
        self.lists: dict[int, tuple[int, ...]] = {}
        self.collectives: dict[tuple[Any, ...], Collective] = {}
        self.workers: dict[int, Worker] = {}
        self.uids, self.goal, self.named = 0, 0, 0
        self.rendezvous = Rendezvous(least, workers, workers)
        self.simulation.add(RENDEZVOUS, self.rendezvous, b"rendezvous", {})
        self.simulation.carry_out(RENDEZVOUS, self.rendezvous.start(0.0))
        for place in range(workers):
            self._start(place)
        for fault in schedule.faults:
            self._later(fault.at - self.simulation.now, lambda fault=fault: self._fault(fault))

    # --- processes -----------------------------------------------------------------------------------------------------------

    def _start(self, place: int) -> None:
        key = ("worker", place)
        worker = self.workers[place] = Worker(Member(self.uids, give_up_s=HANG_S))
        self.simulation.add(key, worker.member, f"worker {self.uids}".encode(), {0: RENDEZVOUS})
        self.uids += 1
        self._join(place)

    def _join(self, place: int) -> None:
        worker = self.workers[place]
        worker.log, worker.held, worker.generation, worker.change, worker.at_end = None, None, 0, False, True
        worker.work += 1
        self._call(place, worker.member.join, "terms")

    def _fault(self, fault: Fault) -> None:
        kind, place = fault.node
        node = self.simulation.nodes.get(fault.node)
        if node is None:
            return
        if fault.kind == "stop":
            node.stopped_until = self.simulation.now + fault.seconds
        elif fault.kind == "jump":
            node.clock_offset_s += fault.seconds
        elif kind == "worker" and self.workers[place].log is not None and self.rng.random() < 0.3:
            self.workers[place].leaves = True
            self._call(place, self.workers[place].member.leave)
        elif kind == "worker":
            self._crash(place, fault.seconds if fault.kind == "crash" else 20.0)

    def _crash(self, place: int, seconds: float, seen: bool = True) -> None:
        uid = self.workers.pop(place).member.uid
        self.simulation.remove(("worker", place))
        if seen and self.rng.random() < 0.5:  # by whoever started it
            now = self.simulation.time(RENDEZVOUS)
            self.simulation.carry_out(RENDEZVOUS, self.rendezvous.member_lost(uid, now))
        self._later(seconds, lambda: None if place in self.workers else self._start(place))

    def _called(self, call: Call) -> None:
        self.calls.pop(call.name)()

    def _later(self, seconds: float, do: Callable[[], None], place: int | None = None) -> None:
        """``do`` it later; a worker that is stopped, or gone by then, does it when it goes on, or never."""
        self.named += 1
        name = str(self.named)
        self.calls[name] = do
        self.simulation.put(self.simulation.now + seconds, Call(name, RENDEZVOUS if place is None else ("worker", place)))

    def _call(self, place: int, method: Callable[..., Any], *arguments: Any) -> None:
        key = ("worker", place)
        self.simulation.carry_out(key, method(*arguments, now=self.simulation.time(key)))

    # --- training ------------------------------------------------------------------------------------------------------------

    def _idle(self, key: Any) -> None:
        for generation in [self.rendezvous.generation, *(w.member.latest for w in self.workers.values())]:
            if self.lists.setdefault(generation.number, generation.members) != generation.members:
                self.violate(f"generation {generation.number} has the members {generation.members}, too")
        if key[0] == "worker" and key[1] in self.workers:
            self._look(key[1])

    def _effect(self, key: Any, effect: Any) -> None:
        if isinstance(effect, Abandon) and key[1] in self.workers:
            worker = self.workers[key[1]]
            if effect.generation.number > worker.generation:
                worker.generation, worker.change = 0, False
                worker.work += 1

    def _look(self, place: int) -> None:
        """Begin what the worker can begin now."""
        worker = self.workers[place]
        member = worker.member
        if member.busy or worker.generation:
            return
        if member.excluded and worker.leaves:
            self._crash(place, 5.0)
        elif member.excluded:
            self._join(place)
        elif member.inside:
            worker.generation = member.latest.number
            worker.work += 1
            position = Position(-1) if worker.log is None else Position(len(worker.log), worker.held is not None)
            self._enter(place, "positions", (position, worker), self._positions)

    def _enter(self, place: int, what: str, brought: Any, then: Callable[[int, list[Any]], None]) -> None:
        worker = self.workers[place]
        number, work = worker.generation, worker.work
        members = self.lists[number]
        count = -1 if what in ("positions", "formed") else len(worker.log or ())
        collective = self.collectives.setdefault((number, what, count), Collective())
        collective.inside[worker.member.uid] = work, brought
        if set(members) <= collective.inside.keys():
            self._end(members, collective, then)

    def _end(self, members: tuple[int, ...], collective: Collective, then: Callable[[int, list[Any]], None]) -> None:
        now, network = self.simulation.now, self.simulation.network
        places = {worker.member.uid: place for place, worker in self.workers.items()}
        keys = [("worker", places[uid]) for uid in members if uid in places]
        if len(keys) < len(members) or collective.over:
            return
        if any(network.apart(now, a, b) for a in keys for b in keys):  # type: ignore[attr-defined]
            self._later(0.5, lambda: self._end(members, collective, then))
            return
        collective.over = True
        brought = [collective.inside[uid][1] for uid in members]
        for uid in members:
            self._later(self.rng.uniform(0.001, 0.3), lambda uid=uid: self._ended(uid, collective, brought, then), places[uid])

    def _ended(self, uid: int, collective: Collective, brought: list[Any], then: Callable[[int, list[Any]], None]) -> None:
        place = next((place for place, worker in self.workers.items() if worker.member.uid == uid), None)
        if place is not None and self.workers[place].work == collective.inside[uid][0]:
            then(place, brought)

    def _positions(self, place: int, brought: list[Any]) -> None:
        """All members of a new generation know how far the others are."""
        worker = self.workers[place]
        count = agreed([position for position, _ in brought])
        taken = worker.log
        if worker.log is None:
            donors = [other for position, other in brought if position.done >= 0]
            if any(not other.at_end for other in donors):
                self.violate("a newcomer gets weights in the middle of a step")
            donor = next((other for other in donors if len(other.log or ()) == count), None)
            taken = [] if donor is None else list(donor.log or ())
        elif len(worker.log) < count:
            assert worker.held is not None
            taken = [*worker.log, worker.held]
        self._enter(place, "formed", taken, lambda place, logs: self._formed(place, taken, logs))

    def _formed(self, place: int, taken: list[int] | None, logs: list[Any]) -> None:
        worker = self.workers[place]
        if any(log != taken for log in logs):
            self.violate(f"members of generation {worker.generation} have different exchanges behind them: {logs}")
        behind = worker.log is not None and len(worker.log) < len(taken or ())
        worker.log, worker.held, worker.change = list(taken or ()), None, False
        self._call(place, worker.member.has_formed, worker.generation)
        if behind:
            self._completed(place)
        else:
            self._compute(place)

    def _compute(self, place: int) -> None:
        worker, member = self.workers[place], self.workers[place].member
        generation = member.latest
        if worker.at_end and (worker.change or (generation.hold and generation.number == worker.generation)):
            self._change(place)
            return
        work = worker.work
        speed = self.schedule.speeds[place % len(self.schedule.speeds)]

        def computed() -> None:
            if self.workers.get(place) is worker and worker.work == work:
                worker.at_end = False
                self._enter(place, "data", None, self._held)

        self._later(speed * self.rng.uniform(0.2, 1.0), computed, place)

    def _change(self, place: int) -> None:
        """At the end of a step: go over to the planned generation, or wait for one."""
        worker = self.workers[place]
        member = worker.member
        if member.latest.number <= worker.generation:
            work = worker.work
            self._later(0.1, lambda: self._compute(place) if worker.work == work else None, place)
        elif member.uid in member.latest.members:
            worker.generation = 0
            self._look(place)
        else:
            assert worker.leaves
            self._call(place, member.say_goodbye, member.latest.number)
            self._crash(place, 5.0, seen=False)

    def _held(self, place: int, _: list[Any]) -> None:
        worker = self.workers[place]
        worker.held = worker.generation
        self._enter(place, "ack", worker.member.latest.number, self._acknowledged)

    def _acknowledged(self, place: int, latest: list[int]) -> None:
        worker = self.workers[place]
        assert worker.log is not None
        assert worker.held is not None
        worker.log.append(worker.held)
        worker.held, worker.change = None, worker.change or max(latest) > worker.generation
        self._completed(place)

    def _completed(self, place: int) -> None:
        worker = self.workers[place]
        worker.at_end = len(worker.log or ()) % _EVERY == 0
        self._compute(place)

    # --- invariants ----------------------------------------------------------------------------------------------------------

    def violate(self, sentence: str) -> None:
        self.outcome.violations.append(f"{self.simulation.now:.3f} s: {sentence}")

    def run(self) -> Outcome:
        """Until all workers are members, and have gone on after the last fault."""
        outcome, calm = self.outcome, QUIET_S + 30.0
        while not outcome.violations and not (self.simulation.now > calm and self._go_on()):
            if outcome.events > MAX_EVENTS or self.simulation.now > HANG_S or not self.simulation.step():
                now = {p: (w.generation, len(w.log or ()), w.member.latest) for p, w in self.workers.items()}
                self.violate(f"the run hangs: {now}, {self.rendezvous.generation}")
                break
            outcome.events += 1
        outcome.end_s = self.simulation.now
        return outcome

    def _go_on(self) -> bool:
        counts = [len(worker.log or ()) for worker in self.workers.values()]
        self.goal = self.goal or max(counts) + 2 * _EVERY
        inside = {w.member.uid for w in self.workers.values()} == set(self.rendezvous.generation.members)
        return min(counts) >= self.goal and inside


def run_schedule(seed: int, trace: Callable[[str], None] | None = None, workers: int = 4, least: int = 2) -> Outcome:
    schedule = Schedule.draw(seed, workers, 1, servers_crash=False)
    run = ElasticRun(schedule, workers, least)
    if trace is not None:
        trace(str(schedule))
        trace_messages(run.simulation, trace)
    return run.run()
