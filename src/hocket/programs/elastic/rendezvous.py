"""The rendezvous of an elastic run: decides who the members are, one generation after another. It holds no weights.

There is one rendezvous per run, outside of all workers (in the launcher, or in a process of its own), so no two generations have
one number, and no part of the workers goes on without it; docs/decisions/19 says why there is no vote. Members repeat their whole
state in every BEAT, and every answer is the whole latest generation, so a message that is lost, repeated or overtaken does no harm:

=========  ==============================================================  ===================================================
BEAT       attempt to join, generation formed, generation that failed,     ORDER: the latest generation, whether this member
           whether it leaves or has finished, its terms                    is still known, whether all have finished; also
                                                                           sent when the generation changes
PUSH       a value of the generation's store (to set or to add)            REPLY
FETCH      names in the store                                              REPLY, once all are there
GOODBYE                                                                    (none)
=========  ==============================================================  ===================================================

The store is where members of a generation exchange the addresses of their process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.programs.base import Address, Rejected, Say, Service, event
from hocket.programs.elastic.generation import Generation
from hocket.transport.frame import Envelope, Kind

CHECK_EVERY_S = 0.25
_CHECK = "check"
_MOST_VALUES = 4096
"""Values in the store of a generation."""
_SILENT_S = 1.5
"""After an exchange has failed, a member that was silent for so long is the one that is lost."""


@dataclass
class _Member:
    peer: bytes
    attempt: int
    heard: float
    last: int = -1
    """The number of its latest BEAT."""
    formed: int = 0
    failed: int = 0
    leaving: bool = False
    finished: bool = False
    answered: int = -1
    """Its last request to the store, and the answer."""
    answer: Any = None
    fetch: tuple[int, int, list[str]] | None = None
    """It waits for these names: number of the request, generation, names."""


class Rendezvous(Service):
    """Of ``least`` to ``most`` members; the run begins with ``expected`` ones, or after ``gather_s`` with fewer."""

    role = "The rendezvous"

    def __init__(self, least: int, most: int, expected: int = 0, liveness_timeout_s: float = 5.0, gather_s: float = 30.0) -> None:
        super().__init__()
        self.least, self.most, self.expected = least, most, max(expected, least)
        self.liveness_timeout_s, self.gather_s = liveness_timeout_s, gather_s
        self.generation = Generation()
        self.lost = 0
        """Members that died or were silent."""
        self.over = False
        """All members have finished."""
        self._members: dict[int, _Member] = {}
        self._removed: dict[int, int] = {}
        """The attempt of members that are no longer there: a late BEAT does not bring them back."""
        self._formed = self.generation
        self._announced = {self.generation.number: self.generation}
        self._terms: str | None = None
        self._store: dict[str, Tensor] = {}
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
        self._let_in()
        self._set_timer(_CHECK, self.now + CHECK_EVERY_S)

    # --- messages ------------------------------------------------------------------------------------------------------------

    def _beat(self, peer: bytes, message: Envelope) -> None:
        uid, told = message.sender, message.metadata
        attempt, member = int(told["attempt"]), self._members.get(uid)
        if member is None or attempt > member.attempt:
            if attempt <= self._removed.get(uid, -1):
                self._answer(peer, Kind.ORDER, message.number, {**self.generation.described(), "known": False})
                return
            self._check_terms(str(told["terms"]))
            if member is not None:
                self._remove([uid])
            member = self._members[uid] = _Member(peer, attempt, self.now)
            self._first = self._first or self.now
        if attempt < member.attempt or message.number <= member.last:
            return
        member.peer, member.heard, member.last = peer, self.now, message.number
        member.formed, member.leaving = max(member.formed, int(told["formed"])), member.leaving or bool(told["leaving"])
        if member.formed in self._announced and member.formed > self._formed.number:
            self._formed = self._announced[member.formed]
        if int(told["failed"]) == self.generation.number and uid in self.generation.members and not self._broken:
            self._broken = self.now
        member.finished = bool(told["finished"])
        if member.finished and self.generation.planned and self._formed != self.generation and uid in self._formed.members:
            self._announce(self._standing(), planned=False)  # no step follows at whose end others could join
        self.over |= all(uid in self._members and self._members[uid].finished for uid in self.generation.members or [-1])
        self._answer(peer, Kind.ORDER, message.number, {**self.generation.described(), "known": True})

    def _status(self) -> dict[str, Any]:
        return {"over": self.over}

    def _goodbye(self, peer: bytes, message: Envelope) -> None:
        member = self._members.get(message.sender)
        if member is not None and int(message.metadata["attempt"]) == member.attempt:
            self._remove([message.sender], in_order=int(message.metadata["before"]) == self.generation.number)

    def _check_terms(self, terms: str) -> None:
        if self._terms is None or not self._members:
            self._terms = terms
        if terms != self._terms:
            raise Rejected("terms", f"This run has {self._terms}, but a worker that joins has {terms}: start it as the others.")

    # --- generations ---------------------------------------------------------------------------------------------------------

    def _remove(self, gone: Sequence[int], in_order: bool = False) -> None:
        """``in_order``: it has left at the end of a step, before a generation without it; the others do not wait for it."""
        found = [uid for uid in gone if uid in self._members]
        for uid in found:
            self._removed[uid] = self._members.pop(uid).attempt
        # Until a planned generation is formed, its members exchange with those of the one before.
        missing = [uid for uid in found if uid in self.generation.members or uid in self._formed.members]
        if missing and not in_order and not self.over:
            self.lost += len(missing)
            left = self._standing()
            self._effects.append(Say(f"worker {missing[0]} is lost; {len(left)} go on"))
            self._announce(left, planned=False)

    def _standing(self) -> list[int]:
        """Those of the latest generation that live and have weights for sure: newcomers may not, before anybody has formed it."""
        base = self.generation if self._formed == self.generation or not self._formed.members else self._formed
        return [uid for uid in base.members if uid in self._members and uid in self.generation.members]

    def _let_in(self) -> None:
        """A planned generation, where all members have formed the latest one and somebody waits or leaves; or the first."""
        current, members = self.generation, self._members
        if self.over or any(member.finished for member in members.values()):
            return
        staying = [uid for uid in current.members if uid in members and not members[uid].leaving]
        waiting = [uid for uid, m in members.items() if uid not in current.members and not m.leaving]
        joined = [*staying, *waiting[: max(self.most - len(staying), 0)]]
        if not current.members:
            if len(joined) >= min(self.expected, self.most) or (
                len(joined) >= self.least and self.now - self._first > self.gather_s
            ):
                self._announce(joined, planned=False)
        elif tuple(joined) != current.members and all(members[uid].formed == current.number for uid in current.members):
            self._announce(joined, planned=True)

    def _announce(self, members: Sequence[int], planned: bool) -> None:
        number = self.generation.number + 1
        self.generation = Generation(number, tuple(members), planned, hold=len(members) < self.least)
        self._announced = {n: g for n, g in self._announced.items() if n >= self._formed.number} | {number: self.generation}
        if not members:
            self._formed, self._first = self.generation, 0.0  # nobody has the weights any more
        self._broken, self._store = 0.0, {}
        for member in self._members.values():
            member.fetch = None
            self._answer(member.peer, Kind.ORDER, -1, {**self.generation.described(), "known": True})

    # --- the store of a generation -------------------------------------------------------------------------------------------

    def _push(self, peer: bytes, message: Envelope) -> None:
        member, told = self._member(message), message.metadata
        if int(told["generation"]) != self.generation.number or message.number <= member.answered:
            if message.number == member.answered:
                self._reply(peer, message.number, member.answer)
            return
        name, (value,) = str(told["name"]), message.tensors
        if len(self._store) >= _MOST_VALUES and name not in self._store:
            raise Rejected("size", f"The store has {_MOST_VALUES} values already.")
        if told["adds"]:
            value = value + self._store.get(name, torch.zeros(1, dtype=torch.int64))
        self._store[name] = value.clone()
        member.answered, member.answer = message.number, (self._store[name],) if told["adds"] else ()
        self._reply(peer, message.number, member.answer)
        for other in self._members.values():
            self._look_up(other)

    def _fetch(self, peer: bytes, message: Envelope) -> None:
        member, told = self._member(message), message.metadata
        if int(told["generation"]) == self.generation.number:
            member.peer, member.fetch = peer, (message.number, self.generation.number, [str(name) for name in told["names"]])
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
