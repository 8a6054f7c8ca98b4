"""A worker's links to all other workers' doors: questions with a number, and answers that are awaited for a patience at most.

A worker that does not answer in time is *silent*: its link is replaced (so that nothing that waits in this process arrives later;
what has left it may), it is asked nothing but signs of life, and is back with the first. One that has said goodbye has *left*. A
*newcomer* takes the place of one that has died, at another address: what the dead one was asked is lost. Time in which this process
itself did not look (it computed, or was stopped) does not count against others, and what is large has longer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import zmq
from torch import Tensor

from hocket.errors import HocketError
from hocket.messages import Caller, Envelope, Keys, Kind
from hocket.server.doorkeeper import Doorkeeper
from hocket.server.holding import ENDED, OVER, Holding, Mean, Part, mean_of

_PING_S = 1.0
_MOST_GAP_S = 1.0
"""Of the time between two looks at the links no more counts against those who have been asked."""
_PAUSE_S = 0.05
_SLOWEST_BYTES_PER_S = 10_000_000
"""What a link of 100 Mbit/s carries: besides the patience, tensors there and back have the time that they take at this rate."""
_AT_ONCE = 4
"""Of so many is all that they hold asked for at a time; they share our link."""
_MOST_LEDGERS_BYTES = 48 * 1024
"""More might not fit into a note."""


@dataclass
class _Question:
    peer: int
    since: float
    size: int
    liveness_timeout_s: float
    answer: Envelope | None = None
    lost: bool = False

    @property
    def open(self) -> bool:
        return self.answer is None and not self.lost


class Peers:
    """Worker ``worker``'s links to the doors at ``addresses``, in worker order; its own, and None, are passed over."""

    def __init__(
        self,
        addresses: Sequence[str | None],
        job: bytes,
        worker: int,
        keys: Keys | None,
        most_bytes: int,
        liveness_timeout_s: float,
        newcomers: SimpleQueue[tuple[int, str]] | None = None,
    ) -> None:
        """``newcomers``: where a door tells of those who have taken a dead worker's place."""
        self._newcomers = SimpleQueue() if newcomers is None else newcomers
        self.door: str | None = None
        """Where this worker is to be found, if it has taken a dead one's place: some may not know it yet."""
        self.addresses, self.worker, self.liveness_timeout_s = list(addresses), worker, liveness_timeout_s
        self.silent: set[int] = set()
        self.left: set[int] = {peer for peer, address in enumerate(addresses) if address is None}
        self._met: set[int] = set()
        """Who has ever answered."""
        self._options: tuple[bytes, Keys | None, int] = job, keys, most_bytes
        self._links: dict[int, Caller] = {}
        self._poller = zmq.Poller()
        self._questions: dict[int, _Question] = {}
        self._number = 0
        self._looked = self._pinged = time.monotonic()

    @property
    def here(self) -> list[int]:
        """All others who are neither silent nor gone."""
        return [p for p in range(len(self.addresses)) if p != self.worker and self.reachable(p)]

    def reachable(self, peer: int) -> bool:
        """Whether there is a point in asking."""
        return peer not in self.silent and peer not in self.left

    # --- questions -----------------------------------------------------------------------------------------------------------

    def ask(
        self, peer: int, kind: Kind, note: dict[str, Any] | None = None, tensors: Sequence[Tensor] = (), expects: int = 0
    ) -> int:
        """Send a question, to which ``expects`` bytes are the answer; its number, for :meth:`answered` and :meth:`take`."""
        self._number += 1
        size = sum(tensor.nbytes for tensor in tensors) + expects
        before = sum(question.size for question in self._questions.values() if question.open and question.peer == peer)
        liveness_timeout_s = self.liveness_timeout_s + (before + size) / _SLOWEST_BYTES_PER_S
        envelope = Envelope(kind, self.worker, peer, number=self._number, note=note or {}, tensors=tuple(tensors))
        self._questions[self._number] = _Question(peer, time.monotonic(), size, liveness_timeout_s)
        if not self._link(peer).send(envelope, 0.0):
            self._give_up(peer)  # whoever lets a queue grow full has not looked at it for long
        return self._number

    def answered(self, number: int) -> bool:
        """Whether there is an answer, or will be none."""
        return not self._questions[number].open

    def take(self, number: int) -> Envelope | None:
        """The REPLY or ANSWER to a question; None where it was refused or is lost."""
        answer = self._questions.pop(number).answer
        return None if answer is None or answer.kind is Kind.REFUSAL else answer

    def wait(self, numbers: Iterable[int]) -> None:
        """Until all these are answered or lost."""
        numbers = list(numbers)
        while not all(self.answered(number) for number in numbers):
            self.turn(_PAUSE_S)

    def ask_all(self, kind: Kind, expects: int = 0, note: dict[str, Any] | None = None) -> dict[int, Envelope]:
        """Ask all who are here, a few at a time where large answers are expected; what they answered."""
        self.turn(0.0)
        here = self.here
        some = _AT_ONCE if expects else max(len(here), 1)
        found: dict[int, Envelope | None] = {}
        for first in range(0, len(here), some):
            numbers = {peer: self.ask(peer, kind, note, expects=some * expects) for peer in here[first : first + some]}
            self.wait(numbers.values())
            found |= {peer: self.take(number) for peer, number in numbers.items()}
        return {peer: answer for peer, answer in found.items() if answer is not None}

    def call_back(self) -> None:
        """Ask all who are silent for a sign of life, and wait for it: whoever lives is here after this."""
        kind, note = self._sign()
        numbers = [self.ask(peer, kind, note) for peer in sorted(self.silent - self.left)]
        self.wait(numbers)
        for number in numbers:
            self.take(number)

    def turn(self, timeout_s: float) -> None:
        """Look at all links once."""
        while not self._newcomers.empty():
            peer, address = self._newcomers.get()
            if address != self.addresses[peer]:  # it may say so more than once
                self.move(peer, address)
            self.left.discard(peer)
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if gap > _MOST_GAP_S:
            for question in self._questions.values():
                question.since += gap - _MOST_GAP_S
        self._ping(now)
        ready = {socket for socket, _ in self._poller.poll(int(1000 * timeout_s))}
        for peer, link in list(self._links.items()):
            while link.socket in ready and self._links.get(peer) is link and (message := link.receive(0.0)) is not None:
                self._hear(peer, message)
        for question in list(self._questions.values()):
            if question.open and now - question.since > question.liveness_timeout_s:
                self._give_up(question.peer)

    def greet(self) -> None:
        """Ask everybody for a sign of life: who holds other keys, or is of another job, is told so before anything begins."""
        self.ask_all(Kind.BEAT)

    def move(self, peer: int, address: str | None) -> None:
        """Another process is worker ``peer`` from now on, with a door at ``address``; None: nobody is."""
        self._give_up(peer)
        self.addresses[peer] = address
        self.silent.discard(peer)
        (self.left.add if address is None else self.left.discard)(peer)

    def close(self) -> None:
        """Let go of all links."""
        for link in self._links.values():
            link.close(0)
        self._links = {}

    def _hear(self, peer: int, message: Envelope) -> None:
        if message.kind is Kind.REFUSAL and message.number == 0:
            self._shut_out(peer, f"Worker {peer} at {self.addresses[peer]}: {message.note.get('sentence')}")
            return
        self._met.add(peer)
        self.silent.discard(peer)
        if message.kind is Kind.GOODBYE:
            self.left.add(peer)
            self._lose(peer)
        elif (question := self._questions.get(message.number)) is not None and question.peer == peer:
            question.answer = message

    def _ping(self, now: float) -> None:
        if now - self._pinged < _PING_S:
            return
        self._pinged = now
        for peer, link in list(self._links.items()):
            if (message := link.receive(0.0)) is not None:  # only where nothing comes does a link count failed handshakes
                self._hear(peer, message)
            elif link.refused["key"]:
                self._shut_out(peer, f"Worker {peer} at {link.address} does not let us in: use the keys of its job.")
        kind, note = self._sign()
        for peer in self.silent - self.left:
            self._link(peer).send(Envelope(kind, self.worker, peer, note=note), 0.0)

    def _sign(self) -> tuple[Kind, dict[str, Any]]:
        """A sign of life; a newcomer's says where it is."""
        return (Kind.BEAT, {}) if self.door is None else (Kind.HELLO, {"address": self.door})

    def _shut_out(self, peer: int, why: str) -> None:
        """Who has never answered is told what is wrong; where one who has is gone, a stranger may have taken its port."""
        if peer not in self._met:
            raise HocketError(why)
        self._give_up(peer)

    def _give_up(self, peer: int) -> None:
        self.silent.add(peer)
        self._lose(peer)
        link = self._links.pop(peer, None)
        if link is not None:
            self._poller.unregister(link.socket)
            link.close(0)

    def _lose(self, peer: int) -> None:
        for question in self._questions.values():
            question.lost = question.lost or (question.peer == peer and question.open)

    def _link(self, peer: int) -> Caller:
        if peer not in self._links:
            address = self.addresses[peer]
            assert address is not None
            job, keys, most_bytes = self._options
            self._links[peer] = Caller(address, job, keys, most_bytes=most_bytes)
            self._poller.register(self._links[peer].socket, zmq.POLLIN)
        return self._links[peer]


# --- what all know together ----------------------------------------------------------------------------------------------------


def gather(peers: Peers, like: Holding) -> dict[int, Part]:
    """What all others who answer hold now, of the same shape as ``like``."""
    return {peer: like.unpacked(answer.tensors) for peer, answer in peers.ask_all(Kind.FETCH, like.bytes).items()}


def look_around(peers: Peers, holding: Holding) -> Mean:
    """The mean of what everybody who answers holds now; no two workers need see the same."""
    return mean_of({**gather(peers, holding), peers.worker: holding.unpacked(holding.packed())})


def join(peers: Peers, holding: Holding, address: str) -> Mean:
    """Take the place of a worker that has died, with a door at ``address``; what it begins with.

    It tells everybody where it is, asks all for what they hold, and begins at the mean of it, ``Σ x / Σ ω``, with a mass of 1 as
    everybody had at first. So it moves the mean no further than what is under way just then, and takes nothing from anybody. What
    the dead one held is lost, with its mass, which is 1 on average over the workers: so ``Σ ω`` stays about their number. (Were it
    to take a half from somebody instead, each death would take mass away for good, and updates, which weigh ``1/ω``, would weigh
    ever more.) Where the training is over, it takes what all have agreed on.
    """
    peers.door = address  # who does not hear it now is told with every sign of life
    notes = {peer: answer.note for peer, answer in peers.ask_all(Kind.HELLO, note={"address": address}).items()}
    knows = _who_knows(notes)
    if knows is not None:
        holding.mean = _fetch_mean(peers, holding, knows)
    parts = {} if holding.mean is not None else gather(peers, holding)
    if holding.mean is None and not parts:
        raise HocketError(
            f"Worker {peers.worker} was to go on for one that died, but no other worker is alive to take weights from: start again."
        )
    mean = holding.mean or mean_of(parts)
    holding.begin_at(mean.rows)
    return mean


def agree(peers: Peers, holding: Holding, door: Doorkeeper) -> Mean:
    """The mean over all who live, the same on all of them; each calls this when it has ended, with nothing of it under way.

    Who was silent is called back first. The first of those who live waits until all others have ended too (from then on nobody
    changes anything), asks everybody for what it holds and takes the mean, unless somebody has one by then; the others ask around
    until somebody knows it. It stays until all who took part have it, have left, or are silent. Should it die before, the next one
    does the same. Where links are cut so that two groups cannot reach each other, each comes to a mean of its own. Who joined when
    the others had agreed already has what they agreed on.
    """
    holding.ended = True
    peers.call_back()
    mean, knows = holding.mean, None
    while mean is None:
        notes = _notes(peers)
        knows = _who_knows(notes)
        if knows is not None:
            mean = _fetch_mean(peers, holding, knows)
        elif all(peers.worker < peer and note["state"] == ENDED for peer, note in notes.items()):
            mean = _take_mean(peers, holding, notes)
        if mean is None:
            time.sleep(_PAUSE_S)
    holding.mean = mean
    while not _have_it(peers, mean.here if knows is None else door.given):
        time.sleep(_PAUSE_S)
    return mean


def _notes(peers: Peers) -> dict[int, Mapping[str, Any]]:
    return {peer: answer.note for peer, answer in peers.ask_all(Kind.BEAT).items()}


def _have_it(peers: Peers, whom: Collection[int]) -> bool:
    """Whether all of these who answer know the mean."""
    return not whom or all(note["state"] == OVER for peer, note in _notes(peers).items() if peer in whom)


def _who_knows(notes: Mapping[int, Mapping[str, Any]]) -> int | None:
    return next((peer for peer, note in notes.items() if note["state"] == OVER), None)


def _take_mean(peers: Peers, holding: Holding, notes: dict[int, Mapping[str, Any]]) -> Mean | None:
    parts = gather(peers, holding)
    if not sorted(notes) == sorted(parts) == peers.here:
        return None  # somebody has died or come back meanwhile: look again who lives
    last = _notes(peers)
    if _who_knows(last) is not None or sorted(last) != sorted(parts):
        return None  # take that one's, or look again
    mean = mean_of({**parts, peers.worker: holding.unpacked(holding.packed())})
    ledgers = {str(peer): dict(note["ledger"]) for peer, note in notes.items()} | {str(peers.worker): holding.account.describe()}
    return mean if len(json.dumps(ledgers)) > _MOST_LEDGERS_BYTES else replace(mean, ledgers=ledgers)


def _fetch_mean(peers: Peers, holding: Holding, peer: int) -> Mean | None:
    number = peers.ask(peer, Kind.FETCH, {"mean": True}, expects=len(peers.addresses) * holding.bytes)  # all fetch it at once
    peers.wait([number])
    answer = peers.take(number)
    if answer is None:
        return None
    rows = holding.fitting(answer.tensors[: len(holding.x)])
    buffers = answer.tensors[-1] if answer.note["buffers"] else None
    return Mean(rows, buffers, [int(w) for w in answer.note["here"]], float(answer.note["mass"]), dict(answer.note["ledgers"]))
