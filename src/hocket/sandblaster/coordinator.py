"""The coordinator on real processes: it listens, passes orders to shards and portions to workers, and holds no parameters.

    shard → coordinator    HELLO {number, address}, REPLY (answers to an order), PUSH (a bundle is staged here)
    worker → coordinator   HELLO, BEAT {link} (from a thread and a link of its own), ANSWER (a portion's loss)
    coordinator → shard    ORDER {orders | save | load}, GOODBYE
    coordinator → worker   ORDER {ticket, judged, keep, bundle, portion, shards}, GOODBYE

``step`` is the evaluation in all of them. Evaluations and orders are numbered upwards from the clock, so that what belongs to a
coordinator before this one is out of date everywhere.

A worker is known by the ticket it was given. When it is silent for ``liveness_timeout_s`` it is lost, and what it did that does not
count yet goes to others. Should it speak again, it gets another ticket, and with that forgets what it held under the first. Shards
hold the truth: without one of them a coordinator ends, and another goes on from what all of them have on disk.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import count
from typing import Any

from hocket.errors import WorkerLost
from hocket.messages.frame import Envelope, Kind
from hocket.messages.link import Listener
from hocket.sandblaster.figures import Figures
from hocket.sandblaster.lbfgs import Evaluate
from hocket.sandblaster.portions import Answer, Counts, Dispenser
from hocket.sandblaster.vectors import Order, combine

TICK_S = 0.1
NO_ANSWER = 0
"""The number of orders that want none."""
JOIN_S = 60.0
"""How long it waits for shards and workers to come."""
GO_ON = "start again with the same folder (on the command line --resume) to go on from the last iteration"


class ProcessWorld:
    """Shards and workers at the other ends of a listener."""

    def __init__(
        self,
        listener: Listener,
        portions: int,
        shards: int,
        *,
        backups: bool = True,
        exact: bool = False,
        liveness_timeout_s: float = 5.0,
        remedy: str = GO_ON,
    ) -> None:
        self._remedy = remedy
        self._listener, self._portions, self._backups, self._exact, self._patience = (
            listener,
            portions,
            backups,
            exact,
            liveness_timeout_s,
        )
        self._begun = time.monotonic()
        self._counts, self._bytes = Counts(), 0
        self._shards: dict[int, bytes] = {}
        self._addresses: dict[int, str] = {}
        self._moved = [0] * shards
        self._workers: dict[int, bytes] = {}  # by ticket
        self._tickets: dict[bytes, int] = {}
        self._given = count()
        self._seen: dict[bytes, float] = {}
        self._idle: set[int] = set()
        self._evaluation = self._number = time.time_ns()
        self._dispenser: Dispenser | None = None
        self._answers: dict[int, Any] = {}
        deadline = time.monotonic() + JOIN_S
        while len(self._shards) < shards:
            if time.monotonic() > deadline:
                raise WorkerLost(f"Only {len(self._shards)} of {shards} shards came within {JOIN_S:g} s: look at their output.")
            self._step()

    @property
    def figures(self) -> Figures:
        """What has been spent so far; seconds are those of this coordinator's clock."""
        return Figures(time.monotonic() - self._begun, self._bytes, sum(self._moved), replace(self._counts))

    def ask(self, orders: tuple[Order, ...]) -> list[float]:
        """See :class:`World`."""
        answers = self._request({"orders": orders})
        return [combine(order, terms) for order, terms in zip(orders, zip(*answers, strict=True), strict=True)]

    def evaluate(self, request: Evaluate) -> list[float]:
        """See :class:`World`."""
        self._evaluation += 1
        self.ask((*request.first, ("begin", self._evaluation, request.at)))
        dispenser = Dispenser(self._portions, len(self._shards), self._backups, self._exact, self._counts)
        self._dispenser = dispenser
        self._wake()
        alone = time.monotonic()
        while not dispenser.complete:
            self._step()
            if self._workers:
                alone = time.monotonic()
            elif time.monotonic() - alone > JOIN_S:
                raise WorkerLost(f"There has been no worker for {JOIN_S:g} s: {self._remedy}.")
        self._dispenser = None
        _, *scalars = self.ask((("total", request.into), *request.then))
        return [dispenser.loss, *scalars]

    def save(self, iteration: int) -> None:
        """Have every shard write its vectors to disk."""
        self._request({"save": iteration})

    def load(self, iteration: int) -> None:
        """Have every shard read them again."""
        self._request({"load": iteration})

    def farewell(self) -> None:
        """Send everyone home."""
        for peer in (*self._workers.values(), *self._shards.values()):
            self._send(peer, Envelope(Kind.GOODBYE))

    # To shards.

    def _request(self, note: dict[str, Any]) -> list[Any]:
        """What every shard answers."""
        self._number += 1
        self._answers = {}
        self._order_shards(self._number, note)
        while len(self._answers) < len(self._shards):
            self._step()
            for shard, peer in self._shards.items():
                if shard not in self._answers and time.monotonic() - self._seen[peer] > 2 * self._patience:
                    raise WorkerLost(f"Shard {shard} is silent: {self._remedy}.", shard)
        return [self._answers[shard] for shard in sorted(self._shards)]

    def _order(self, orders: list[Order]) -> None:
        if orders:
            self._order_shards(NO_ANSWER, {"orders": orders})

    def _order_shards(self, number: int, note: dict[str, Any]) -> None:
        for shard, peer in self._shards.items():
            if not self._send(peer, Envelope(Kind.ORDER, number=number, note=note)):
                raise WorkerLost(f"Shard {shard} takes no orders any more: {self._remedy}.", shard)

    # To workers.

    def _wake(self) -> None:
        """Something to do for those who have nothing."""
        for worker in sorted(self._idle):
            if self._dispenser is not None and (portion := self._dispenser.next(worker)) is not None:
                self._idle.discard(worker)
                self._tell(worker, Answer(portion=portion))

    def _tell(self, worker: int, answer: Answer, judged: int | None = None) -> None:
        addresses = [self._addresses[shard] for shard in sorted(self._addresses)]
        note = {**vars(answer), "ticket": worker, "judged": judged, "shards": addresses}
        peer = self._workers.get(worker)
        if peer is not None and not self._send(peer, Envelope(Kind.ORDER, step=self._evaluation, note=note)):
            self._lose(worker)

    def _lose(self, worker: int) -> None:
        del self._tickets[self._workers.pop(worker)]
        self._idle.discard(worker)
        if self._dispenser is None:
            self._counts.lost += 1
            return
        self._order(self._dispenser.lost(worker))
        self._wake()

    # From anyone.

    def _step(self) -> None:
        """Take one message. Only when none is waiting, see who is silent: signs of life may stand in the queue."""
        received = self._listener.receive(0)
        if received is None:
            for worker, peer in list(self._workers.items()):
                if time.monotonic() - self._seen[peer] > self._patience:
                    self._lose(worker)
            received = self._listener.receive(TICK_S)
        if received is None:
            return
        peer, message = received
        self._bytes += _bytes(message)
        if message.kind in (Kind.REPLY, Kind.PUSH) or "address" in message.note:
            self._seen[peer] = time.monotonic()
            self._from_shard(peer, message)
        else:
            self._from_worker(peer, message)

    def _from_shard(self, peer: bytes, message: Envelope) -> None:
        if message.kind == Kind.HELLO:
            self._shards[message.sender], self._addresses[message.sender] = peer, str(message.note["address"])
        elif message.kind == Kind.REPLY and message.number == self._number:
            self._answers[message.sender] = message.note.get("answers")
            self._moved[message.sender] = int(message.note["moved"])
        elif message.kind == Kind.PUSH and self._dispenser is not None and message.step == self._evaluation:
            worker = message.place
            orders = self._dispenser.staged(worker, message.number, message.sender)
            self._order(orders)
            if orders and (more := self._dispenser.bundle(worker)) is not None:
                self._tell(worker, Answer(bundle=more))

    def _from_worker(self, peer: bytes, message: Envelope) -> None:
        if message.kind == Kind.BEAT:
            self._seen[str(message.note["link"]).encode()] = time.monotonic()
            return
        self._seen[peer] = time.monotonic()
        if peer not in self._tickets:
            worker = self._tickets[peer] = next(self._given)
            self._workers[worker] = peer
            self._idle.add(worker)
            self._wake()
        elif message.kind == Kind.ANSWER and message.sender == self._tickets[peer]:
            self._report(message.sender, message)

    def _report(self, worker: int, message: Envelope) -> None:
        if self._dispenser is None or message.step != self._evaluation:
            self._counts.wasted += 1
            self._idle.add(worker)
            self._wake()
            return
        answer = self._dispenser.report(worker, message.place, float(message.note["loss"]))
        if answer.portion is None:
            self._idle.add(worker)
        self._tell(worker, answer, message.place)

    def _send(self, peer: bytes, message: Envelope) -> bool:
        self._bytes += _bytes(message)
        return self._listener.send(peer, message)


def _bytes(message: Envelope) -> int:
    return 56 + len(json.dumps(message.note, separators=(",", ":")))
