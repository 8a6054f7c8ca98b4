"""The coordinator's peers: orders to shards, portions to workers, and who is silent. See ``protocol`` for the messages.

A worker is known by the ticket it was given. When it is silent for ``liveness_timeout_s`` it is lost, and what it computed that does
not count yet goes to others. If it speaks again, it gets another ticket, and forgets what it held under the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hocket.errors import WorkerLost
from hocket.messages.frame import Envelope, Kind
from hocket.programs.base import Address, Effects, Program
from hocket.sandblaster.lbfgs import Settings
from hocket.sandblaster.portions import Answer, Counts, Dispenser
from hocket.sandblaster.protocol import RESEND_S, Outbox, message_bytes

GO_ON = "start again with the same folder (on the command line --resume) to go on from the last iteration"
JOIN_S = 60.0
"""How long the coordinator waits for shards and workers to come."""
SHARD_TIMEOUT_S = 20.0
"""The least time for which a shard may be silent: it may be under restart."""
_CHECK, _CHECK_EVERY_S = "check", 0.2
_TICKET_BITS = 16


@dataclass(frozen=True)
class CoordinatorConfig:
    """What a coordinator is told; ``incarnation`` says how many coordinators this run had before."""

    settings: Settings
    portions: int
    shards: int
    backups: bool = True
    exact: bool = False
    liveness_timeout_s: float = 5.0
    incarnation: int = 0
    remedy: str = GO_ON


@dataclass
class _Peer:
    """A shard, or a worker, as the coordinator sees it."""

    identity: bytes
    seen: float
    outbox: Outbox = field(default_factory=Outbox)


@dataclass
class _Shard(_Peer):
    address: str = ""
    incarnation: int = 0


@dataclass
class _Worker(_Peer):
    free: bool = True
    counted: list[int] = field(default_factory=list)
    """Its bundles that count, which it has not been told yet."""
    pushed: float = 0.0
    resend_at: float = 0.0


class Dispatch(Program):
    """Gives orders and portions; :class:`~hocket.sandblaster.coordinator.SandblasterCoordinator` says which."""

    def __init__(self, config: CoordinatorConfig) -> None:
        super().__init__()
        self.config = config
        self._shards: dict[int, _Shard] = {}
        self._restarted = False
        """Whether a shard has lost its vectors in this session."""
        self._session = self._evaluation = self._asked = 0
        self._answers: dict[int, Any] = {}
        self._workers: dict[int, _Worker] = {}
        self._tickets: dict[bytes, int] = {}
        self._next_ticket = count(config.incarnation << _TICKET_BITS)
        self._dispenser: Dispenser | None = None
        self._counts, self._bytes = Counts(), 0
        self._moved: dict[tuple[int, int], int] = {}  # by session and shard
        self._accompanied = 0.0

    # --- events --------------------------------------------------------------------------------------------------------------

    def peer_lost(self, identity: bytes, now: float) -> Effects:
        """That worker is known to be dead."""
        self.now = max(now, self.now)
        if identity in self._tickets:
            self._lose(self._tickets[identity])
        else:
            self._counts.lost += 1
        return self._done()

    def on_message(self, sender: Address, message: Envelope) -> None:
        assert isinstance(sender, bytes)
        self._bytes += message_bytes(message)
        if message.kind == Kind.BEAT:
            if message.sender in self._workers:
                self._workers[message.sender].seen = self.now
        elif message.kind in (Kind.REPLY, Kind.PUSH) or "address" in message.note:
            self._from_shard(sender, message)
        else:
            self._from_worker(sender, message)

    def _watch(self) -> None:
        """From now on see who is silent."""
        self._accompanied = self.now
        self._set_timer(_CHECK, self.now + _CHECK_EVERY_S)

    def on_timer(self, name: str) -> None:
        self._set_timer(_CHECK, self.now + _CHECK_EVERY_S)
        for ticket, worker in list(self._workers.items()):
            if self.now - worker.seen > self.config.liveness_timeout_s:
                self._lose(ticket)
        for number, shard in self._shards.items():
            if self.now - shard.seen > max(2 * self.config.liveness_timeout_s, SHARD_TIMEOUT_S):
                raise WorkerLost(f"Shard {number} is silent: {self.config.remedy}.", number)
        if self._workers or self._dispenser is None or self._dispenser.complete:
            self._accompanied = self.now
        elif self.now - self._accompanied > JOIN_S:
            raise WorkerLost(f"There has been no worker for {JOIN_S:g} s: {self.config.remedy}.")

    # --- shards --------------------------------------------------------------------------------------------------------------

    def _order_shards(self, note: Mapping[str, Any]) -> None:
        for shard in self._shards.values():
            self._send(shard.identity, shard.outbox.add(Envelope(Kind.ORDER, step=self._session, note=note), self.now))

    def _from_shard(self, identity: bytes, message: Envelope) -> None:
        number, note = message.sender, message.note
        shard = self._shards.get(number)
        if message.kind == Kind.HELLO and (shard is None or note["incarnation"] > shard.incarnation):
            self._restarted |= shard is not None
            shard = self._shards[number] = _Shard(identity, self.now, address=note["address"], incarnation=note["incarnation"])
        if shard is None or shard.identity != identity:
            return  # a process before this one
        shard.seen = self.now
        if message.kind == Kind.PUSH:
            self._staged(message)
        elif message.step == self._session:
            if message.kind == Kind.REPLY:
                shard.outbox.acknowledge(message.number)
                self._moved[self._session, number] = note["moved"]
                if message.number == self._asked:
                    self._answers[number] = note["answers"]
            elif number in self._answers:
                shard.outbox.acknowledge(message.number)
        if message.kind == Kind.HELLO:
            self._repeat(shard)

    def _staged(self, message: Envelope) -> None:
        ticket, number = message.place, message.number
        if self._dispenser is None or message.step != self._evaluation:
            return
        orders = self._dispenser.staged(ticket, number, message.sender)
        if orders:
            self._order_shards({"orders": orders})
            self._workers[ticket].counted.append(number)
            if (bundle := self._dispenser.bundle(ticket)) is not None:
                self._tell(ticket, Answer(bundle=bundle))

    # --- workers -------------------------------------------------------------------------------------------------------------

    def _from_worker(self, identity: bytes, message: Envelope) -> None:
        ticket = self._tickets.get(identity)
        if ticket is None:
            ticket = self._tickets[identity] = next(self._next_ticket)
            self._workers[ticket] = _Worker(identity, self.now)
            self._wake()
            return
        worker = self._workers[ticket]
        worker.seen = self.now
        current = (message.step, message.sender) == (self._evaluation, ticket)
        if current:
            worker.outbox.acknowledge(message.number)
        if message.kind == Kind.ANSWER and current and self._dispenser is not None:
            self._report(ticket, worker, message)
        elif worker.outbox.sent == 0:  # it has nothing of this evaluation
            self._counts.wasted += message.kind == Kind.ANSWER and not worker.free
            worker.free = True
            self._wake()
        elif current and message.number == worker.outbox.sent:
            self._resend_bundles(ticket, worker)
            if message.note.get("free") and not worker.free:
                worker.free = True
                self._wake()
        if message.kind == Kind.HELLO:
            self._repeat(worker)

    def _report(self, ticket: int, worker: _Worker, message: Envelope) -> None:
        assert self._dispenser is not None
        answer = self._dispenser.report(ticket, message.place, float(message.note["loss"]))
        if answer is not None:
            worker.free = answer.portion is None
            if not self._dispenser.complete:
                self._tell(ticket, answer, {"judged": message.place, "keep": answer.keep})

    def _wake(self) -> None:
        """Give portions to free workers."""
        if self._dispenser is None:
            return
        for ticket, worker in sorted(self._workers.items()):
            if worker.free and (portion := self._dispenser.next(ticket)) is not None:
                worker.free = False
                self._tell(ticket, Answer(portion=portion))

    def _tell(self, ticket: int, answer: Answer, more: Mapping[str, Any] | None = None) -> None:
        worker = self._workers[ticket]
        note = dict(more or {})
        if not worker.outbox.sent:
            note["shards"] = [self._shards[shard].address for shard in sorted(self._shards)]
        if answer.bundle is not None:
            note["bundle"], worker.pushed, worker.resend_at = answer.bundle, self.now, self.now + RESEND_S
        if answer.portion is not None:
            note["portion"] = answer.portion
        if worker.counted:
            note["counted"], worker.counted = worker.counted, []
        self._send(worker.identity, worker.outbox.add(Envelope(Kind.ORDER, ticket, step=self._evaluation, note=note), self.now))

    def _resend_bundles(self, ticket: int, worker: _Worker) -> None:
        """Slices that have not reached all shards for long may be lost."""
        if self._dispenser is not None and self.now > worker.resend_at and (numbers := self._dispenser.under_way(ticket)):
            worker.resend_at = 2 * self.now - worker.pushed
            self._tell(ticket, Answer(), {"again": numbers})

    def _lose(self, ticket: int) -> None:
        del self._tickets[self._workers.pop(ticket).identity]
        if self._dispenser is None:
            self._counts.lost += 1
            return
        if orders := self._dispenser.lost(ticket):
            self._order_shards({"orders": orders})
        self._wake()

    # --- both ----------------------------------------------------------------------------------------------------------------

    def _repeat(self, peer: _Peer) -> None:
        for order in peer.outbox.overdue(self.now):
            self._send(peer.identity, order)

    def _send(self, to: Address, message: Envelope) -> None:
        self._bytes += message_bytes(message)
        super()._send(to, message)
