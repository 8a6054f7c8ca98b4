"""Elastic members and their rendezvous under a fault schedule, and the invariants that they must keep.

Members of a generation first tell each other their addresses, by the rendezvous' store; a message of that may be lost like any
other. Exchanges are simulated: a collective of a generation ends, for each member at a time of its own, once all have entered it.
Those of gossip end for a member once its neighbour has entered them. They end in all three ways
(:class:`hocket.cluster.ending.Ending`). A
loss interrupts them for some members before the end and for others after it. Always: one list of members per number of a
generation; whoever forms a generation has the same exchanges behind it as its other members; newcomers get weights at the end of a
step alone; at the end all that live are members and go on.

With ``parts`` a model is split: so many processes are a replica. They compute in a pass that ends once all of them are in it, which
goes on when the generation changes; a member that waits in a pass forms the next generation meanwhile. Each part is exchanged
among those that hold it, and acknowledged by all.

Every exchange tells, as the one at the end of an epoch does, how many losses its members have heard of: at the end that is the
number that the rendezvous has told, one by one, whichever members are left.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from faults.simulated import QUIET_S, Fault, FaultyNetwork, Outcome, Schedule, trace_messages
from hocket.cluster.ending import Ending
from hocket.drivers.simulation import Call, Simulation
from hocket.programs.base import Say
from hocket.programs.elastic.generation import Generation, Position, agreed
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
    given_in: int = 0
    """The generation in which it was given weights, if it has not seen that one formed."""
    held: int | None = None
    """The generation of the exchange whose result it holds."""
    kept: bool = False
    """It can give the result of its last exchange to others."""
    told: dict[int, int] = field(default_factory=dict)
    """Under gossip, by exchange of which all have the results: the latest generation that anybody knew of then."""
    ready: bool = False
    """Under gossip: it has the result of the next exchange, and waits until all have those of the last one."""
    told_in: int = 0
    """The latest generation in whose store it has its address."""
    asked_in: int = 0
    """The latest generation of which it has asked for the others' addresses."""
    generation: int = 0
    change: bool = False
    """All members know that a planned generation follows."""
    work: int = 0
    """Which call it waits for; those of work that was abandoned come to nothing."""
    at_end: bool = True
    """It is at the end of a step."""
    leaves: bool = False
    part: int = 0
    joins: int = 0
    """How often it has joined."""
    passing: bool = False
    """It is in a pass."""
    computed: bool = False
    """Its pass has ended; the exchange has not begun."""


@dataclass
class Collective:
    """One operation of a generation that ends once all members are in it."""

    inside: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """By worker: its call, and what it has brought."""
    over: bool = False
    heard: set[int] = field(default_factory=set)
    """Under gossip: those that have their neighbour's part."""


class ElasticRun:
    """``workers`` workers of which at least ``least`` train; those that crash come back as newcomers."""

    def __init__(self, schedule: Schedule, workers: int, least: int, parts: int = 1, leave: bool = False) -> None:
        """``least`` counts replicas, each of ``parts`` workers. ``leave``: once all are told to leave; others begin anew."""
        self.parts, self.passes = parts, dict[tuple[Any, ...], set[int]]()
        self.schedule, self.rng = schedule, random.Random(schedule.seed ^ 0xE1A5)
        self.breaks = random.Random(schedule.seed ^ 0xB4EA)
        self.outcome = Outcome(schedule.seed, faults=len(schedule.faults) + len(schedule.partitions))
        self.simulation = Simulation(FaultyNetwork(schedule))
        self.simulation.on_call, self.simulation.on_idle, self.simulation.on_effect = self._called, self._idle, self._effect
        self.calls: dict[str, Callable[[], None]] = {}
        self.lists: dict[int, tuple[int, ...]] = {}
        self.collectives: dict[tuple[Any, ...], Collective] = {}
        self.workers: dict[int, Worker] = {}
        self.closed: set[int] = set()
        """Generations of which a member has ended its connections."""
        self.told_lost = 0
        """Losses that the rendezvous has told people."""
        self.counted: dict[tuple[int, int, int], int] = {}
        """By exchange, generation and part: the losses that those who made it have heard of."""
        self.uids, self.goal, self.named, self.planned = 0, 0, 0, 0
        self.endings = self.rng.choices(list(Ending) if parts == 1 else [Ending.ACKNOWLEDGED], k=_EVERY)
        if Ending.SHARED in self.endings:  # no strategy has both: who ends one that is OWN says nothing of the one before
            self.endings = [Ending.ACKNOWLEDGED if ending is Ending.OWN else ending for ending in self.endings]
        self.rendezvous = Rendezvous(least, workers // parts, workers // parts)
        self.simulation.add(RENDEZVOUS, self.rendezvous, b"rendezvous", {})
        self.simulation.carry_out(RENDEZVOUS, self.rendezvous.start(0.0))
        for place in range(workers):
            self._start(place)
        if leave:
            self._later(self.breaks.uniform(5.0, QUIET_S), self._all_leave)
        for fault in schedule.faults:
            self._later(fault.at - self.simulation.now, lambda fault=fault: self._fault(fault))

    # --- processes -----------------------------------------------------------------------------------------------------------

    def _start(self, place: int) -> None:
        key = ("worker", place)
        part = place % self.parts
        worker = self.workers[place] = Worker(Member(self.uids, HANG_S, part, self.parts), part=part)
        worker.member.host = f"host {place // self.parts % 2}"
        self.simulation.add(key, worker.member, f"worker {self.uids}".encode(), {0: RENDEZVOUS})
        self.uids += 1
        self._join(place)

    def _join(self, place: int) -> None:
        worker = self.workers[place]
        worker.log, worker.held, worker.generation, worker.change, worker.at_end = None, None, 0, False, True
        worker.given_in = 0
        worker.kept, worker.ready, worker.told = False, False, {}
        worker.passing, worker.computed = False, False
        worker.joins += 1
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
        gone = self.workers.pop(place)
        uid = gone.member.uid
        self.simulation.remove(("worker", place))
        seconds = 0.01 if self.breaks.random() < 0.3 else seconds
        for other in [at for at in self.workers if self.breaks.random() < 0.5]:
            self._break(other, gone.generation)
        if seen and self.rng.random() < 0.5:  # by whoever started it
            now = self.simulation.time(RENDEZVOUS)
            self.simulation.carry_out(RENDEZVOUS, self.rendezvous.member_lost(uid, now))
        self._later(seconds, lambda: None if place in self.workers else self._start(place))

    def _break_all(self) -> None:
        for place, worker in list(self.workers.items()):
            if worker.generation:
                self._break(place, worker.generation)

    def _break(self, place: int, number: int) -> None:
        """The connections of a worker break; what it waits for in generation ``number`` fails."""
        if (worker := self.workers.get(place)) is None:
            return
        uid, member = worker.member.uid, worker.member
        inside = {
            what
            for (generation, what, _), collective in self.collectives.items()
            if generation == number and not collective.over and collective.inside.get(uid, (-1, None))[0] == worker.work
        }
        if number != worker.generation or number != member.formed or not inside:
            return
        worker.generation, worker.change, worker.work = 0, False, worker.work + 1
        self._call(place, member.has_failed, number)
        at_end = "assembled" in inside
        self._call(place, member.wait_newer if at_end else member.wait_unplanned, number)

    def _called(self, call: Call) -> None:
        self.calls.pop(call.name)()

    def _later(self, seconds: float, do: Callable[[], None], place: int | None = None) -> None:
        """``do`` it later; a worker that is stopped, or gone by then, does it when it goes on, or never."""
        self.named += 1
        name = str(self.named)
        self.calls[name] = do
        self.simulation.put(self.simulation.now + seconds, Call(name, RENDEZVOUS if place is None else ("worker", place)))

    def _call(self, place: int, method: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        key = ("worker", place)
        self.simulation.carry_out(key, method(*arguments, now=self.simulation.time(key), **named))

    def _all_leave(self) -> None:
        for place, worker in self.workers.items():
            if worker.log is not None:
                worker.leaves = True
                self._call(place, worker.member.leave)

    # --- training ------------------------------------------------------------------------------------------------------------

    def _idle(self, key: Any) -> None:
        for generation in [self.rendezvous.generation, *(w.member.latest for w in self.workers.values())]:
            if self.lists.setdefault(generation.number, generation.members) != generation.members:
                self.violate(f"generation {generation.number} has the members {generation.members}, too")
        if (planned := self.rendezvous.generation).planned and planned.number > self.planned:
            self.planned = planned.number
            if self.simulation.now < QUIET_S and self.breaks.random() < 0.5:  # before it is formed, connections break
                self._later(self.breaks.uniform(0.0, 1.0), self._break_all)
        if key[0] == "worker" and key[1] in self.workers:
            self._look(key[1])

    def _effect(self, key: Any, effect: Any) -> None:
        self.told_lost += isinstance(effect, Say) and key == RENDEZVOUS and "is lost;" in effect.text
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
        elif worker.leaves and member.latest.planned and not member.inside:
            if not (member.latest.members or worker.at_end):
                self.violate("a worker that leaves as the last one saves in the middle of a step")
            self._call(place, member.say_goodbye, member.latest.number)
            self._crash(place, 5.0, seen=False)
            self.closed.add(member.formed)
            for other in list(self.workers):
                self._break(other, member.formed)
        elif member.inside and self._meets(place):
            worker.generation = member.latest.number
            worker.work += 1
            if worker.given_in and not member.latest.known(member.uid, worker.given_in):
                worker.log, worker.at_end = None, True
            position = Position(-1) if worker.log is None else Position(len(worker.log), self._holds(worker), worker.kept)
            # As it is now: a member that is stopped reads it later.
            present = replace(worker, log=None if worker.log is None else list(worker.log))
            self._enter(place, "positions", (position, present), self._positions)

    def _meets(self, place: int) -> bool:
        """Tell the others of the latest generation an address, and wait for theirs; whether all are there."""
        worker = self.workers[place]
        member, number = worker.member, worker.member.latest.number
        if worker.told_in != number:
            worker.told_in = number
            self._call(place, member.put, number, f"of {member.uid}", torch.zeros(1))
        elif worker.asked_in != number:
            worker.asked_in = number
            self._call(place, member.get, number, [f"of {uid}" for uid in member.latest.members])
        elif member.values is None:  # the generation is over
            self._call(place, member.has_failed, number)
            self._call(place, member.wait_newer, number)
        else:
            return True
        return False

    def _ending(self, worker: Worker) -> Ending:
        return self.endings[len(worker.log or ()) % _EVERY]

    def _holds(self, worker: Worker) -> bool:
        """Whether it can take the next exchange as completed; under gossip with what it has."""
        return worker.held is not None or self._ending(worker) is Ending.OWN

    def _enter(self, place: int, what: str, brought: Any, then: Callable[[int, list[Any]], None]) -> None:
        worker = self.workers[place]
        number, work = worker.generation, worker.work
        members = self.lists[number]
        count = -1 if what in ("positions", "formed") else len(worker.log or ())
        if what == "data":  # each part is exchanged by itself
            members, what = members[worker.part :: self.parts], f"data {worker.part}"
        collective = self.collectives.setdefault((number, what, count), Collective())
        collective.inside[worker.member.uid] = work, brought
        if number in self.closed:
            self._later(0.01, lambda: self._break(place, number), place)
        if what.startswith("data") and self._ending(worker) is Ending.OWN:
            at = members.index(worker.member.uid)
            for i in (at, (at + 1) % len(members)):  # each hears the one before it
                if {members[i], members[i - 1]} <= collective.inside.keys() and members[i] not in collective.heard:
                    collective.heard.add(members[i])
                    self._hear(members[i], members[i - 1], collective, then)
        elif set(members) <= collective.inside.keys():
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

    def _hear(self, uid: int, other: int, collective: Collective, then: Callable[[int, list[Any]], None]) -> None:
        places = {worker.member.uid: place for place, worker in self.workers.items()}
        if uid not in places or other not in places:
            return
        a, b = ("worker", places[uid]), ("worker", places[other])
        if self.simulation.network.apart(self.simulation.now, a, b):  # type: ignore[attr-defined]
            self._later(0.5, lambda: self._hear(uid, other, collective, then))
            return
        self._later(self.rng.uniform(0.001, 0.3), lambda: self._ended(uid, collective, [], then), places[uid])

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
            donor = next((other for other in donors if len(other.log or ()) == count and other.part == worker.part), None)
            if count and donor is None:
                self.violate(f"nobody has the weights of part {worker.part}")
            worker.log = taken = [] if donor is None else list(donor.log or ())  # others may go on from here without its knowing
            worker.given_in = worker.generation
        elif worker.given_in:
            worker.given_in = worker.generation
        elif len(worker.log) < count and worker.held is not None:
            taken = [*worker.log, worker.held]
        elif len(worker.log) < count:  # from one that has it, or, under gossip, without the mix
            able = (o for p, o in brought if p.done == count and (p.kept or self._ending(worker) is Ending.OWN))
            taken = [*worker.log, (next(able).log or [])[-1]]
        self._enter(place, "formed", taken, lambda place, logs: self._formed(place, taken, logs))

    def _formed(self, place: int, taken: list[int] | None, logs: list[Any]) -> None:
        worker = self.workers[place]
        if any(log != taken for log in logs):
            self.violate(f"members of generation {worker.generation} have different exchanges behind them: {logs}")
        behind = worker.log is not None and len(worker.log) < len(taken or ())
        worker.kept |= behind
        worker.log, worker.held, worker.change = list(taken or ()), None, False
        worker.ready, worker.told, worker.given_in = False, {}, 0
        self._call(place, worker.member.has_formed, worker.generation)
        if behind:
            self._completed(place)
        elif worker.computed:
            self._exchange(place)
        elif not worker.passing:
            self._compute(place)

    def _compute(self, place: int) -> None:
        if place not in self.workers:
            return
        worker, member = self.workers[place], self.workers[place].member
        generation = member.latest
        if worker.at_end and worker.change:
            self._enter(place, "assembled", None, lambda place, _: self._change(place))
            return
        if worker.at_end and generation.hold and generation.number == worker.generation:
            self._change(place)
            return
        work = worker.work
        speed = self.schedule.speeds[place % len(self.schedule.speeds)]

        def computed() -> None:
            if self.workers.get(place) is worker and worker.work == work:
                self._exchange(place)

        if self.parts > 1:
            self._pass(place, speed)
        else:
            self._later(speed * self.rng.uniform(0.2, 1.0), computed, place)

    def _pass(self, place: int, speed: float) -> None:
        """Compute together with the other processes of the replica, whatever generations come meanwhile."""
        worker = self.workers[place]
        worker.passing = True
        places = {other.member.uid: at for at, other in self.workers.items()}
        mates = [places.get(uid, -1) for uid in member_replica(self.lists[worker.generation], worker.member.uid, self.parts)]
        key = (
            *((at, self.workers[at].member.uid, self.workers[at].joins) if at >= 0 else at for at in mates),
            len(worker.log or ()),
        )
        self.passes.setdefault(key, set()).add(place)

        def ended(at: int, mate: Worker, joins: int) -> None:
            if self.workers.get(at) is mate and mate.joins == joins and mate.passing:
                mate.passing, mate.computed = False, True
                if mate.generation and mate.generation == mate.member.formed:
                    self._exchange(at)

        if self.passes[key] == set(mates):
            for at in mates:
                mate = self.workers[at]
                self._later(speed * self.rng.uniform(0.2, 1.0), partial(ended, at, mate, mate.joins), at)

    def _exchange(self, place: int) -> None:
        worker = self.workers[place]
        worker.at_end = worker.computed = False
        made = len(worker.log or ()), worker.generation, worker.part
        self.counted[made] = max(self.counted.get(made, 0), worker.member.lost)
        self._enter(place, "data", worker.member.latest.number, self._held)

    def _change(self, place: int) -> None:
        """At the end of a step: go over to the planned generation, or wait for one."""
        worker = self.workers[place]
        member = worker.member
        if member.latest.number <= worker.generation:
            work = worker.work
            again = self._change if worker.change else self._compute
            self._later(0.1, lambda: again(place) if self.workers.get(place) is worker and worker.work == work else None, place)
        elif member.uid in member.latest.members:
            worker.generation = 0
            self._look(place)
        else:
            assert worker.leaves or self.parts > 1
            self._call(place, member.say_goodbye, member.latest.number)
            if worker.leaves:
                self._crash(place, 5.0, seen=False)
            else:
                self._join(place)

    def _held(self, place: int, latest: list[Any]) -> None:
        worker = self.workers[place]
        if self._ending(worker) is Ending.SHARED:
            self._acknowledged(place, latest)
            return
        worker.held = worker.generation
        told = worker.member.latest.number
        if self._ending(worker) is Ending.ACKNOWLEDGED:
            self._enter(place, "ack", told, self._acknowledged)
            return
        worker.ready = True
        exchange = len(worker.log or ())
        self._enter(place, "ack", told, lambda place, latest: self._confirmed(place, exchange, max(latest)))
        self._take(place)

    def _confirmed(self, place: int, exchange: int, latest: int) -> None:
        """All have the results of an exchange after which this one has gone on, or is about to."""
        self.workers[place].told[exchange] = latest
        self._take(place)

    def _take(self, place: int) -> None:
        """Go on with a result of gossip, once all have those of the exchange before, if that was made here."""
        worker = self.workers[place]
        before, log = len(worker.log or ()) - 1, worker.log or [0]
        awaited = self.endings[before % _EVERY] is Ending.OWN and log[-1] == worker.generation
        if worker.ready and not (awaited and before not in worker.told):
            self._acknowledged(place, [worker.told.get(before, 0)])

    def _acknowledged(self, place: int, latest: list[int]) -> None:
        worker = self.workers[place]
        assert worker.log is not None
        worker.kept, worker.ready = self._ending(worker) is Ending.SHARED, False
        worker.log.append(worker.generation)
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
        for worker in () if outcome.violations else self.workers.values():
            made = [(exchange, generation, worker.part) for exchange, generation in enumerate(worker.log or ())]
            if self.counted[made[-1]] != self.told_lost:
                self.violate(f"{self.told_lost} losses are told, but {self.counted[made[-1]]} are counted")
        return outcome

    def _go_on(self) -> bool:
        counts = [len(worker.log or ()) for worker in self.workers.values()]
        self.goal = self.goal or max(counts) + 2 * _EVERY
        inside = {w.member.uid for w in self.workers.values()} == set(self.rendezvous.generation.members)
        return min(counts) >= self.goal and inside


def member_replica(members: tuple[int, ...], uid: int, parts: int) -> tuple[int, ...]:
    return Generation(0, members, parts=parts).replica(uid)


def run_schedule(
    seed: int, trace: Callable[[str], None] | None = None, workers: int = 4, least: int = 2, parts: int = 1, leave: bool = False
) -> Outcome:
    schedule = Schedule.draw(seed, workers, 1, servers_crash=False)
    run = ElasticRun(schedule, workers, least, parts, leave)
    if trace is not None:
        trace(str(schedule))
        trace_messages(run.simulation, trace)
    return run.run()
