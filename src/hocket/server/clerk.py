"""The clerk of a run without servers: tells workers where the others are, deals mini-batches, and hears what came of it.

It holds no weights and takes no part in exchanges. Every request of a worker gets one answer with its number:

=========  =======================================================  ==========================================================
HELLO      the address of its door, and whether it takes a dead     WELCOME: everybody's (None: gone), once all are known;
           worker's place                                           until then WAIT, once a second
FETCH      mini-batches done since the last one, its ledger         REPLY: the next mini-batches, and whether there are more
PUSH       the mean that all have agreed on, its ledger             REPLY
=========  =======================================================  ==========================================================
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any

from torch import Tensor

from hocket.errors import HocketError, WorkerLost
from hocket.messages import Caller, Envelope, Keys, Kind, Listener
from hocket.server.account import Account, added, ages_of
from hocket.server.holding import Mean
from hocket.server.members import BatchDispatcher

_GIVE_UP_S = 60
"""Without a word from the clerk."""
_WAIT_EVERY_S = 1.0


class Clerk:
    """Serves ``workers`` workers; of ``total`` mini-batches, who is free takes the next."""

    def __init__(self, listener: Listener, workers: int, total: int) -> None:
        self.listener, self.workers = listener, workers
        self.dispatcher = BatchDispatcher(total)
        self.figures: dict[str, dict[str, Any]] = {}
        self.means: dict[int, Mean] = {}
        """What workers that have ended say that all have agreed on."""
        self.gone: set[int] = set()
        self.lost = 0
        """Mini-batches that were held by workers that are gone."""
        self.refused: Counter[str] = Counter()
        self._before: dict[str, dict[str, Any]] = {}
        """What those had done whose place a worker took."""
        self._doors: dict[int, str] = {}
        self._waiting: dict[int, tuple[bytes, int]] = {}
        self._told = time.monotonic()

    @property
    def addresses(self) -> list[str | None] | None:
        """Everybody's door, once all who live have told theirs."""
        if len(self._doors.keys() | self.gone) < self.workers:
            return None
        return [None if w in self.gone else self._doors[w] for w in range(self.workers)]

    @property
    def ages(self) -> dict[str, int]:
        """How old everybody's gradients were, also those of workers that are gone."""
        return ages_of(self.figures.values())

    @property
    def lost_exchanges(self) -> int:
        """Exchanges between workers that came to nothing, also those of workers that are gone."""
        return sum(int(account.get("lost", 0)) for account in self.figures.values())

    def turn(self, timeout_s: float) -> None:
        """Serve one request, if one comes in time."""
        got = self.listener.receive(timeout_s)
        self._hold()
        if got is None:
            return
        peer, message = got
        takes = {Kind.HELLO: self._hello, Kind.FETCH: self._fetch, Kind.PUSH: self._push}
        try:
            if message.kind not in takes or not 0 <= message.sender < self.workers:
                raise ValueError(f"a clerk does not take {message.kind.name} from {message.sender}")
            takes[message.kind](peer, message)
        except (ValueError, TypeError, KeyError) as error:  # whatever a peer sent, the clerk goes on
            self.refused["shape"] += 1
            note = {"reason": "shape", "sentence": f"The message cannot be taken: {error}."}
            self.listener.send(peer, Envelope(Kind.REFUSAL, number=message.number, note=note))

    def tell(self, **order: Any) -> None:
        """``gone=worker``: it has died, or is silent for good. What it held goes to others."""
        worker = order["gone"]
        self.gone.add(worker)
        self.lost += self.dispatcher.give_back(worker)
        self._welcome()

    def _hello(self, peer: bytes, message: Envelope) -> None:
        worker = message.sender
        self._doors[worker] = str(message.note["address"])
        self._waiting[worker] = peer, message.number
        if message.note.get("replaces"):
            if str(worker) in self.figures:
                self._before[str(worker)] = self.figures[str(worker)]
            if not self.means:
                self.gone.discard(worker)
        self._welcome()

    def _welcome(self) -> None:
        addresses = self.addresses
        if addresses is not None:
            for peer, number in self._waiting.values():
                self.listener.send(peer, Envelope(Kind.WELCOME, number=number, note={"addresses": addresses}))
            self._waiting = {}

    def _hold(self) -> None:
        now = time.monotonic()
        if now - self._told >= _WAIT_EVERY_S:
            self._told = now
            for peer, number in self._waiting.values():
                self.listener.send(peer, Envelope(Kind.WAIT, number=number))

    def _fetch(self, peer: bytes, message: Envelope) -> None:
        self._heed(message)
        batch_ids = [] if message.sender in self.gone else self.dispatcher.take(message.sender, 1)  # it had asked before it died
        note = {"batch_ids": batch_ids, "over": self.dispatcher.empty}
        self.listener.send(peer, Envelope(Kind.REPLY, number=message.number, note=note))

    def _push(self, peer: bytes, message: Envelope) -> None:
        self._heed(message)
        tensors, note = list(message.tensors), message.note
        buffers: Tensor | None = tensors.pop() if note["buffers"] else None
        self.means[message.sender] = Mean(tensors, buffers, [int(w) for w in note["here"]], float(note["mass"]))
        self.listener.send(peer, Envelope(Kind.REPLY, number=message.number))

    def _heed(self, message: Envelope) -> None:
        self.dispatcher.done(message.sender, [int(batch_id) for batch_id in message.note["done"]])
        worker = str(message.sender)
        self.figures[worker] = added(self._before.get(worker, {}), message.note["ledger"])


class ClerkLink:
    """A worker's side of the clerk; the next mini-batch is asked for while it computes. ``replaces``: one that died."""

    def __init__(self, address: str, job: bytes, worker: int, keys: Keys | None, most_bytes: int, replaces: bool = False) -> None:
        self.worker, self.replaces, self.account = worker, replaces, Account()
        self.over = False
        """Whether it takes no more mini-batches: the others have ended."""
        self._caller = Caller(address, job, keys, most_bytes=most_bytes)
        self._batch_ids: deque[int] = deque()
        self._done: list[int] = []
        self._current: int | None = None
        self._number = 0
        self._open = self._over = False

    def meet(self, address: str) -> list[str | None]:
        """Tell the address of our door; those of all others, None where one has died already."""
        self._ask(Kind.HELLO, {"address": address, "replaces": self.replaces})
        return list(self._answer().note["addresses"])

    def take(self) -> int | None:
        """The number of the next mini-batch; None when there is none left. With that the one before is done.

        Before it ends it asks once more: somebody who has died may have left some.
        """
        if self._current is not None:
            self._done.append(self._current)
        last = self.over
        while not self._batch_ids and not last:
            if not self._open:
                last = self._over
                self._want()
            note = self._answer().note
            self._batch_ids.extend(int(batch_id) for batch_id in note["batch_ids"])
            self._over = bool(note["over"])
        self._current = self._batch_ids.popleft() if self._batch_ids else None
        if self._current is not None and not self._over:
            self._want()
        return self._current

    def deliver(self, mean: Mean) -> None:
        """Tell what all have agreed on, and leave."""
        tensors = mean.rows if mean.buffers is None else [*mean.rows, mean.buffers]
        note = {"here": mean.here, "mass": mean.mass, "buffers": mean.buffers is not None}
        self._ask(Kind.PUSH, {**note, **self._report()}, tuple(tensors))
        self._answer()
        self._caller.close()

    def _want(self) -> None:
        self._ask(Kind.FETCH, self._report())

    def _report(self) -> dict[str, Any]:
        done, self._done = self._done, []
        return {"done": done, "ledger": self.account.describe()}

    def _ask(self, kind: Kind, note: dict[str, Any], tensors: tuple[Tensor, ...] = ()) -> None:
        self._number += 1
        self._open = True
        self._caller.send(Envelope(kind, self.worker, number=self._number, note=note, tensors=tensors), 0.0)

    def _answer(self) -> Envelope:
        begun = time.monotonic()
        silent = 0
        while silent < _GIVE_UP_S:  # by turns, so that time in which this process was stopped does not count
            answer = self._caller.receive(1.0)
            silent = silent + 1 if answer is None else 0
            if self._caller.refused["key"]:
                raise HocketError(f"The clerk at {self._caller.address} does not let us in: use the keys of its job.")
            if answer is not None and answer.kind is Kind.REFUSAL:
                raise HocketError(f"The clerk at {self._caller.address}: {answer.note.get('sentence')}")
            if answer is not None and answer.kind is not Kind.WAIT and answer.number == self._number:
                self._open = False
                return answer
        raise WorkerLost(f"The clerk at {self._caller.address} has not answered for {time.monotonic() - begun:.0f} s.")
