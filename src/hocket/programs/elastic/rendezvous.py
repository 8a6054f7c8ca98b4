"""The rendezvous of an elastic run: decides who the members are, one generation after another. It holds no weights.

There is one rendezvous per run, outside of all workers (in the launcher, or in a process of its own), so no two generations have
one number, and no part of the workers goes on without it; docs/decisions/19 says why there is no vote. Members repeat their whole
state in every BEAT, and every answer is the whole latest generation, so a message that is lost, repeated or overtaken does no harm:

=========  ==============================================================  ===================================================
BEAT       attempt to join, generation formed, generation that failed,     ORDER: the latest generation, whether this member
           whether it leaves or has finished, its terms, its host, where   is still known, whether all have finished; also
           its training thread stands                                      sent when the generation changes; who is late
PUSH       a value of the generation's store (to set or to add)            REPLY
FETCH      names in the store                                              REPLY, once all are there
GOODBYE                                                                    (none)
=========  ==============================================================  ===================================================

The store is where members of a generation exchange the addresses of their process group.

Where a model is split, each member holds one of its parts, as its BEAT says. A replica is one process for each part: it becomes a
member, is counted, leaves and is lost as a whole. Processes of a lost replica that live are newcomers: they wait for processes that
hold the other parts.

A message is read as a whole before it changes anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hocket.programs.base import Address, Rejected, Say, Service, event, whole
from hocket.programs.elastic.generation import Generation
from hocket.programs.elastic.waits import HANG_TIMEOUT_S, Waits, read_standing, standing_of
from hocket.transport.frame import Envelope, Kind

CHECK_EVERY_S = 0.25
_CHECK = "check"
_MOST_VALUES, _MOST_BYTES = 16_384, 1 << 27
"""In the store of a generation: values, and their bytes with those of their names."""
_MOST_MEMBERS = 2048
_MOST_NAME = 255
"""An order names all of them."""
_MOST_PARTS = 4096
"""Processes of a replica."""
_QUIET_S = 0.75
"""Three beats: nobody is let in while a member is silent for longer."""
_SILENT_S = 1.5
"""After an exchange has failed, a member that was silent for so long is the one that is lost."""


@dataclass
class _Member:
    peer: bytes
    attempt: int
    heard: float
    part: int = 0
    host: str = ""
    standing: dict[str, Any] = field(default_factory=dict)
    """Where its training thread stands."""
    last: int = -1
    """The number of its latest BEAT."""
    formed: int = 0
    failed: int = 0
    leaving: bool = False
    dropped: bool = False
    """Its replica leaves because of another process; it joins again."""
    finished: bool = False
    answered: int = -1
    """Its last request to the store, and the answer."""
    answer: tuple[Tensor, ...] = ()
    fetch: tuple[int, int, list[str]] | None = None
    """It waits for these names: number of the request, generation, names."""


class _Beat(NamedTuple):
    """What a BEAT says."""

    attempt: int
    formed: int
    failed: int
    leaving: bool
    finished: bool
    terms: str
    part: int
    parts: int
    host: str
    standing: dict[str, Any]
    """Where its training thread stands."""
    reported: int
    """The latest report of late members that it has."""

    @classmethod
    def read(cls, message: Envelope, newest: int) -> _Beat:
        """ValueError where one of its fields is none; ``newest`` is the number of the latest generation."""
        told = message.metadata
        whole(message.sender)
        whole(message.number)
        flags = told["leaving"], told["finished"]
        if not all(isinstance(flag, bool) for flag in flags) or not isinstance(told["terms"], str):
            raise ValueError("booleans and a text were expected")
        attempt = whole(told["attempt"], -1)  # -1: it has not joined yet
        numbers = attempt, whole(told["formed"], 0, newest), whole(told["failed"], 0, newest)
        part, parts = whole(told.get("part", 0)), whole(told.get("parts", 1))
        if not isinstance(host := told.get("host", ""), str):
            raise ValueError("a text was expected")
        standing, reported = read_standing(told.get("standing", {})), whole(told.get("reported", 0))
        return cls(*numbers, *flags, told["terms"], part, parts, host[:_MOST_NAME], standing, reported)


class Rendezvous(Service):
    """Of ``least`` to ``most`` replicas; the run begins with ``expected`` ones, or after ``gather_s`` with fewer. A member whose
    training thread keeps others waiting for ``hang_timeout_s`` is lost."""

    role = "The rendezvous"

    def __init__(
        self,
        least: int,
        most: int,
        expected: int = 0,
        liveness_timeout_s: float = 5.0,
        gather_s: float = 30.0,
        hang_timeout_s: float = HANG_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self._waits = Waits(hang_timeout_s)
        self.least, self.most, self.expected = least, most, max(expected, least)
        self.liveness_timeout_s, self.gather_s = liveness_timeout_s, gather_s
        self.generation = Generation()
        self.lost = 0
        """Replicas of which a process died or was silent."""
        self.over = False
        """All members have finished."""
        self._members: dict[int, _Member] = {}
        self._removed: dict[int, int] = {}
        """The attempt of members that are no longer there: a late BEAT does not bring them back."""
        self._formed = self.generation
        self._announced = {self.generation.number: self.generation}
        self._parts = 1
        self._terms: str | None = None
        self._store: dict[str, Tensor] = {}
        self._held = 0
        """Bytes in the store."""
        self._checked, self._first, self._broken = 0.0, 0.0, 0.0

    @property
    def members(self) -> list[int]:
        """Everybody who beats, members of the generation or waiting."""
        return list(self._members)

    # --- events --------------------------------------------------------------------------------------------------------------

    @event
    def start(self, now: float) -> None:
        self._checked = now
        self._set_timer(_CHECK, now + CHECK_EVERY_S)

    @event
    def member_lost(self, member: int, now: float) -> None:
        """The process of a member has ended, as whoever started it knows."""
        self._remove([member])

    def on_message(self, sender: Address, message: Envelope) -> None:
        handlers = {Kind.BEAT: self._beat, Kind.PUSH: self._push, Kind.FETCH: self._fetch, Kind.GOODBYE: self._goodbye}
        self._serve(sender, message, handlers)

    def on_timer(self, name: str) -> None:
        """Look for silent members; let waiting ones in."""
        gap = max(self.now - self._checked - 4 * CHECK_EVERY_S, 0.0)  # this process was stopped: nobody else is to blame
        self._checked = self.now
        for member in self._members.values():
            member.heard += gap
        broken = self._broken and self.now - self._broken > _SILENT_S
        limit = _SILENT_S if broken else self.liveness_timeout_s
        self._remove([uid for uid, member in self._members.items() if self.now - member.heard > limit])
        if broken and self._broken:  # all members live: a connection was cut
            self._announce(self._standing(), planned=False)
        self._look_for_hung()
        self._let_in()
        self._set_timer(_CHECK, self.now + CHECK_EVERY_S)

    # --- messages ------------------------------------------------------------------------------------------------------------

    def _beat(self, peer: bytes, message: Envelope) -> None:
        uid, told = message.sender, _Beat.read(message, self.generation.number)
        member = self._members.get(uid)
        if member is None or told.attempt > member.attempt:
            if told.attempt <= self._removed.get(uid, -1):
                self._answer(peer, Kind.ORDER, message.number, {**self.generation.described(), "known": False})
                return
            self._check_newcomer(told)
            if member is not None:
                self._remove([uid])
            self._terms, self._parts = told.terms, told.parts
            member = self._members[uid] = _Member(peer, told.attempt, self.now, told.part, told.host)
            self._first = self._first or self.now
        if told.attempt < member.attempt or message.number <= member.last:
            return
        member.peer, member.heard, member.last = peer, self.now, message.number
        member.formed, member.leaving = max(member.formed, told.formed), member.leaving or told.leaving
        if member.formed in self._announced and member.formed > self._formed.number:
            self._formed, self._broken = self._announced[member.formed], 0.0  # what has failed in it is said again
        if not self._broken and any(told.failed == one.number and uid in one.members for one in self._under_way):
            self._broken = self.now
        member.finished, member.standing = told.finished, told.standing
        if member.finished and self.generation.planned and self._formed != self.generation and uid in self._formed.members:
            self._announce(self._standing(), planned=False)  # no step follows at whose end others could join
        self.over |= all(uid in self._members and self._members[uid].finished for uid in self.generation.members or [-1])
        news = self._waits.news(told.reported)
        self._answer(peer, Kind.ORDER, message.number, {**self.generation.described(), "known": True, **news})

    def _status(self) -> dict[str, Any]:
        return {"over": self.over}

    def _goodbye(self, peer: bytes, message: Envelope) -> None:
        member, told = self._members.get(message.sender), message.metadata
        attempt, before = whole(told["attempt"], -1), whole(told["before"])
        if member is not None and attempt == member.attempt:
            in_order = before == self.generation.number and message.sender not in self.generation.members
            self._remove([message.sender], in_order)

    def _check_newcomer(self, told: _Beat) -> None:
        """The first member decides what all must have in common."""
        terms, parts = (self._terms, self._parts) if self._members else (told.terms, told.parts)
        if told.terms != terms:
            raise Rejected("terms", f"This run has {terms}, but a worker that joins has {told.terms}: start it as the others.")
        if told.parts != parts or not 0 <= told.part < parts <= _MOST_PARTS:
            raise Rejected("parts", f"Replicas of this run have {parts} parts, this worker's {told.parts}: use the same mesh.")
        if len(self._members) >= _MOST_MEMBERS:
            raise Rejected("size", f"This run has {_MOST_MEMBERS} workers already: start fewer.")

    # --- generations ---------------------------------------------------------------------------------------------------------

    def _remove(self, gone: Sequence[int], in_order: bool = False) -> None:
        """``in_order``: it has left at the end of a step, before a generation without it; the others do not wait for it. The
        replicas of those that are lost are lost with them: what lives of them joins again."""
        found = [uid for uid in gone if uid in self._members]
        missing = list(dict.fromkeys(hit for uid in found for one in self._under_way if (hit := one.replica(uid))))
        if not in_order and not self.over:
            found += [uid for replica in missing for uid in replica if uid in self._members and uid not in found]
        for uid in found:
            self._removed[uid] = self._members.pop(uid).attempt
        if missing and not in_order and not self.over:
            self.lost += len(missing)
            left = self._standing()
            said = ", and with it its replica," * (self._parts > 1) + f" is lost; {len(left)} go on"
            self._effects += [Say(f"worker {next(uid for uid in found if uid in one)}{said}") for one in missing]
            self._announce(left, planned=False)

    @property
    def _under_way(self) -> tuple[Generation, ...]:
        """Until a planned generation is formed, its members exchange with those of the one before."""
        return (self.generation, self._formed) if self.generation.planned else (self.generation,)

    def _look_for_hung(self) -> None:
        """Members that others wait for: all are told of them, and after a long time they are lost."""
        if self.over:
            return
        uids = list(dict.fromkeys([*self.generation.members, *self._formed.members]))
        found = [(uid, self._members[uid]) for uid in uids if uid in self._members]
        table = [standing_of(k, k // self._parts, m.standing, self.now - m.heard, m.host) for k, (_, m) in enumerate(found)]
        if hung := [found[one.rank][0] for one in self._waits.look(table)]:
            self._effects.append(Say(f"others have waited {self._waits.hang_timeout_s:g} s for worker {hung[0]}: it is given up"))
            self._remove(hung)

    def _standing(self) -> list[tuple[int, ...]]:
        """Those of the latest generation that live and have weights for sure: newcomers may not, before anybody has formed it."""
        base = self._formed if self._formed.members else self.generation
        listed = self.generation.replicas or base.replicas  # all leave: they end the step together
        return [one for one in base.replicas if one in listed and all(uid in self._members for uid in one)]

    def _let_in(self) -> None:
        """A planned generation, where all members have formed the latest one and somebody waits or leaves; or the first."""
        current, members = self.generation, self._members
        if self.over or any(member.finished for member in members.values()):
            return
        if self._broken or any(self.now - members[uid].heard > _QUIET_S for uid in current.members if uid in members):
            return  # one of them may be lost: a process that was started in its place would be let in with it, and dropped with it
        staying = [one for one in current.replicas if all(uid in members and not members[uid].leaving for uid in one)]
        waiting = [uid for uid, m in members.items() if uid not in current.members and not m.leaving and not m.dropped]
        complete = list(zip(*([uid for uid in waiting if members[uid].part == part] for part in range(self._parts)), strict=False))
        if not staying and complete:  # whoever leaves last hands over first
            staying = [one for one in current.replicas if all(uid in members for uid in one)][:1]
        joined = self._by_host([*staying, *complete[: max(self.most - len(staying), 0)]])
        if not current.members:
            enough = self.least if self.now - self._first > self.gather_s else min(self.expected, self.most)
            if len(joined) >= enough and not any(uid in members for uid in self._formed.members):  # those have ended their step
                self._formed = current
                self._announce(joined, planned=False)
        elif tuple(joined) != current.replicas and all(members[uid].formed == current.number for uid in current.members):
            if joined or self._parts == 1:
                self._announce(joined, planned=True)
            else:  # nobody is left to whom the last replica could hand over
                self._remove(current.members)

    def _by_host(self, replicas: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Those of one host next to each other, in the order in which hosts come; a replica may be on several hosts."""
        places = {host: place for place, host in enumerate(dict.fromkeys(map(self._host, replicas)))}
        return sorted(replicas, key=lambda replica: places[self._host(replica)])

    def _host(self, replica: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self._members[uid].host for uid in replica)

    def _announce(self, replicas: Sequence[tuple[int, ...]], planned: bool) -> None:
        before, members, hold = self.generation, tuple(uid for one in replicas for uid in one), len(replicas) < self.least
        host_size = math.gcd(*Counter(map(self._host, replicas)).values())
        new = self.generation = Generation.after(before, members, planned, hold, self._parts, host_size, self.lost)
        self._announced = {n: g for n, g in self._announced.items() if n >= self._formed.number} | {new.number: new}
        if not members:
            self._formed, self._first = self._formed if planned else self.generation, 0.0  # nobody has the weights any more
        for uid in before.members if planned else ():
            if uid in self._members and uid not in members:
                self._members[uid].dropped = True
        self._broken, self._store, self._held = 0.0, {}, 0
        for member in self._members.values():
            member.fetch = None
            self._answer(member.peer, Kind.ORDER, -1, {**self.generation.described(), "known": True})

    # --- the store of a generation -------------------------------------------------------------------------------------------

    def _push(self, peer: bytes, message: Envelope) -> None:
        member, told = self._member(message), message.metadata
        number = whole(message.number)
        if whole(told["generation"]) != self.generation.number or number <= member.answered:
            if number == member.answered:
                self._reply(peer, message.number, member.answer)
            return
        (name,), (value,), adds = _names([told["name"]]), message.tensors, bool(told["adds"])
        if adds:
            value = _number(value) + _number(self._store.get(name, torch.zeros(1, dtype=torch.int64)))
        before = self._store.get(name)
        held = self._held + value.nbytes + (len(name.encode()) if before is None else -before.nbytes)
        if (before is None and len(self._store) >= _MOST_VALUES) or held > _MOST_BYTES:
            raise Rejected("size", f"The store holds {_MOST_VALUES} values and {_MOST_BYTES} bytes at most.")
        self._store[name], self._held = value.clone(), held
        member.answered, member.answer = message.number, (self._store[name],) if adds else ()
        self._reply(peer, message.number, member.answer)
        for other in self._members.values():
            self._look_up(other)

    def _fetch(self, peer: bytes, message: Envelope) -> None:
        member, told = self._member(message), message.metadata
        names, number = _names(told["names"]), whole(told["generation"])
        if number == self.generation.number:
            member.peer, member.fetch = peer, (message.number, number, names)
            self._look_up(member)

    def _look_up(self, member: _Member) -> None:
        if member.fetch is not None and all(name in self._store for name in member.fetch[2]):
            (number, _, names), member.fetch = member.fetch, None
            self._reply(member.peer, number, tuple(self._store[name] for name in names))

    def _member(self, message: Envelope) -> _Member:
        if message.sender not in self._members:
            raise Rejected("member", "This worker is no member: it joins with a BEAT.")
        return self._members[message.sender]

    def _reply(self, peer: bytes, number: int, tensors: tuple[Tensor, ...]) -> None:
        self._answer(peer, Kind.REPLY, number, {}, tensors)


def _names(told: Any) -> list[str]:
    """Names in the store, each once; ValueError where there is something else."""
    if not isinstance(told, list) or not all(isinstance(name, str) for name in told) or len(set(told)) < len(told):
        raise ValueError("names were expected, each once")
    return told


def _number(value: Tensor) -> Tensor:
    """A value of the store that can be added to."""
    if value.dtype != torch.int64 or value.numel() != 1:
        raise ValueError("a whole number was expected")
    return value
