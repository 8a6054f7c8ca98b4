"""The coordinator as a program without I/O: it holds the L-BFGS conversation, gives out portions, and has no parameters.

A worker is known by the ticket it was given. When it is silent for ``liveness_timeout_s`` it is lost, and what it computed that
does not count yet goes to others. If it speaks again, it gets another ticket, and forgets what it held under the first.

After every iteration the shards save their vectors and then the coordinator its state. When a shard was restarted, all shards load
that iteration again and the conversation goes on from it; a restarted coordinator does the same.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from hocket.errors import WorkerLost
from hocket.programs.base import Address, Finished, Service, Snapshot, Task, Until, event, whole
from hocket.sandblaster.lbfgs import Ask, Evaluate, Settings, State, lbfgs
from hocket.sandblaster.portions import Answer, Counts, Dispenser
from hocket.sandblaster.protocol import RESEND_S, OrderQueue, message_bytes
from hocket.sandblaster.vectors import Order, Terms, combine
from hocket.transport.frame import Envelope, Kind

GO_ON = "start again with the same folder (on the command line --resume) to go on from the last iteration"
JOIN_S = 60.0
"""How long the coordinator waits for shards and workers to come."""
SHARD_TIMEOUT_S = 20.0
"""The least time for which a shard may be silent: it may be under restart."""
_CHECK, _CHECK_EVERY_S = "check", 0.2
_MAX_ADDRESS = 300
_TICKET_BITS = 16
_NUMBERS = 20
"""Bits for the sessions of one coordinator, and for the evaluations of one session."""


class ShardSilent(WorkerLost):
    """A shard may run, but does not answer: it is replaced by another one, which resumes from the saved state."""


@dataclass(frozen=True)
class CoordinatorConfig:
    """The settings of a coordinator; ``incarnation`` says how many coordinators this run had before."""

    settings: Settings
    portions: int
    shards: int
    backups: bool = True
    exact: bool = False
    liveness_timeout_s: float = 5.0
    shard_timeout_s: float = SHARD_TIMEOUT_S
    incarnation: int = 0
    remedy: str = GO_ON


@dataclass
class _Peer:
    """A shard (from ``address`` on) or a worker (from ``free`` on) as the coordinator sees it."""

    identity: bytes
    seen: float
    order_queue: OrderQueue = field(default_factory=OrderQueue)
    address: str = ""
    incarnation: int = 0
    free: bool = True
    counted: list[int] = field(default_factory=list)
    """Its bundles that count, which it has not been told yet."""
    pushed: float = 0.0
    resend_at: float = 0.0


class Dispatch(Service):
    """The coordinator's peers: orders to shards, portions to workers, and who is silent; see ``protocol`` for the messages."""

    def __init__(self, config: CoordinatorConfig) -> None:
        super().__init__()
        self.config = config
        self._shards: dict[int, _Peer] = {}
        self._restarted = False
        """Whether a shard has lost its vectors in this session."""
        self._session = self._evaluation = self._asked = 0
        self._answers: dict[int, list[Terms]] = {}
        self._expected = 0
        """How many answers each shard owes."""
        self._workers: dict[int, _Peer] = {}
        self._tickets: dict[bytes, int] = {}
        self._next_ticket = count(config.incarnation << _TICKET_BITS)
        self._dispenser: Dispenser | None = None
        self._counts, self._bytes = Counts(), 0
        self._moved: dict[tuple[int, int], int] = {}  # by session and shard
        self._accompanied = 0.0

    # --- events --------------------------------------------------------------------------------------------------------------

    @event
    def peer_lost(self, identity: bytes, now: float) -> None:
        """That worker has died."""
        if identity in self._tickets:
            self._lose(self._tickets[identity])
        else:
            self._counts.lost += 1

    def on_message(self, sender: Address, message: Envelope) -> None:
        self._bytes += message_bytes(message)
        hello = self._from_shard if "address" in message.metadata else self._from_worker
        handlers = {
            Kind.BEAT: self._beat,
            Kind.REPLY: self._from_shard,
            Kind.PUSH: self._from_shard,
            Kind.ANSWER: self._from_worker,
        }
        self._serve(sender, message, {**handlers, Kind.HELLO: hello})

    def _beat(self, peer: bytes, message: Envelope) -> None:
        if message.sender in self._workers:
            self._workers[message.sender].seen = self.now

    def on_timer(self, name: str) -> None:
        """Look for silent peers."""
        self._set_timer(_CHECK, self.now + _CHECK_EVERY_S)
        for ticket, worker in list(self._workers.items()):
            if self.now - worker.seen > self.config.liveness_timeout_s:
                self._lose(ticket)
        for number, shard in self._shards.items():
            if self.now - shard.seen > max(2 * self.config.liveness_timeout_s, self.config.shard_timeout_s):
                raise ShardSilent(f"Shard {number} does not answer: {self.config.remedy}.", number)
        if self._workers or self._dispenser is None or self._dispenser.complete:
            self._accompanied = self.now
        elif self.now - self._accompanied > JOIN_S:
            raise WorkerLost(f"No worker has been connected for {JOIN_S:g} s: {self.config.remedy}.")

    # --- shards --------------------------------------------------------------------------------------------------------------

    def _order_shards(self, metadata: Mapping[str, Any]) -> None:
        for shard in self._shards.values():
            self._send(shard.identity, shard.order_queue.add(Envelope(Kind.ORDER, step=self._session, metadata=metadata), self.now))

    def _from_shard(self, identity: bytes, message: Envelope) -> None:
        number, metadata = whole(message.sender, 0, self.config.shards - 1), message.metadata
        shard = self._shards.get(number)
        if message.kind == Kind.HELLO:
            address, incarnation = metadata["address"], whole(metadata["incarnation"])
            if not isinstance(address, str) or len(address) > _MAX_ADDRESS:
                raise ValueError("it names no address")
            if shard is None or incarnation > shard.incarnation:
                self._restarted |= shard is not None
                shard = self._shards[number] = _Peer(identity, self.now, address=address, incarnation=incarnation)
        if shard is None or shard.identity != identity:
            return  # a process before this one
        shard.seen = self.now
        if message.kind == Kind.PUSH:
            self._staged(message)
        elif message.step == self._session:
            if message.kind == Kind.REPLY:
                moved, answers = (
                    whole(metadata["moved"], most=1 << 62),
                    [[float(t) for t in terms] for terms in metadata["answers"]],
                )
                if message.number == self._asked:
                    if len(answers) != self._expected:
                        raise ValueError(f"{len(answers)} answers to {self._expected} orders")
                    self._answers[number] = answers
                shard.order_queue.acknowledge(message.number)
                self._moved[self._session, number] = moved
            elif number in self._answers:
                shard.order_queue.acknowledge(message.number)
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
        ticket, loss = self._tickets.get(identity), float(message.metadata.get("loss", 0.0))
        if ticket is None:
            ticket = self._tickets[identity] = next(self._next_ticket)
            self._workers[ticket] = _Peer(identity, self.now)
            self._wake()
            return
        worker = self._workers[ticket]
        worker.seen = self.now
        current = (message.step, message.sender) == (self._evaluation, ticket)
        if current:
            worker.order_queue.acknowledge(message.number)
        if message.kind == Kind.ANSWER and current and self._dispenser is not None:
            self._report(ticket, worker, message.place, loss)
        elif worker.order_queue.sent == 0:  # the worker has no portion of this evaluation
            self._counts.wasted += message.kind == Kind.ANSWER and not worker.free
            worker.free = True
            self._wake()
        elif current and message.number == worker.order_queue.sent:
            self._resend_bundles(ticket, worker)
            if message.metadata.get("free") and not worker.free:
                worker.free = True
                self._wake()
        if message.kind == Kind.HELLO:
            self._repeat(worker)

    def _report(self, ticket: int, worker: _Peer, portion: int, loss: float) -> None:
        assert self._dispenser is not None
        answer = self._dispenser.report(ticket, portion, loss)
        if answer is not None:
            worker.free = answer.portion is None
            if not self._dispenser.complete:
                self._tell(ticket, answer, {"judged": portion, "keep": answer.keep})

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
        metadata = dict(more or {})
        if not worker.order_queue.sent:
            metadata["shards"] = [self._shards[shard].address for shard in sorted(self._shards)]
        if answer.bundle is not None:
            metadata["bundle"], worker.pushed, worker.resend_at = answer.bundle, self.now, self.now + RESEND_S
        if answer.portion is not None:
            metadata["portion"] = answer.portion
        if worker.counted:
            metadata["counted"], worker.counted = worker.counted, []
        self._send(
            worker.identity,
            worker.order_queue.add(Envelope(Kind.ORDER, ticket, step=self._evaluation, metadata=metadata), self.now),
        )

    def _resend_bundles(self, ticket: int, worker: _Peer) -> None:
        """Ask again for slices that have long not reached all shards: they may be lost."""
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
        for order in peer.order_queue.overdue(self.now):
            self._send(peer.identity, order)

    def _send(self, to: Address, message: Envelope) -> None:
        self._bytes += message_bytes(message)
        super()._send(to, message)


class _ShardRestarted(Exception):
    """A shard has lost its vectors."""


class SandblasterCoordinator(Dispatch):
    """Minimises from ``saved``, a :meth:`state_dict`, or from the beginning; ``metrics`` has one row per iteration."""

    def __init__(self, config: CoordinatorConfig, saved: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        self.state, self.metrics = State(), list[dict[str, Any]]()
        self._saved = saved
        self._session = config.incarnation << _NUMBERS
        self._begun, self._before = 0.0, dict[str, Any]()

    @event
    def start(self, now: float) -> Task:
        """Wait for the shards, then minimise."""
        self._begun = self._accompanied = now
        self._set_timer(_CHECK, now + _CHECK_EVERY_S)
        while True:
            try:
                yield from self._minimise()
                break
            except _ShardRestarted:
                self._dispenser = None
        for peer in (*self._workers.values(), *self._shards.values()):
            self._send(peer.identity, Envelope(Kind.GOODBYE))
        self._effects.append(Finished())

    def _spent(self) -> dict[str, Any]:
        moved = {"bytes_coordinator": self._bytes, "bytes_shards": sum(self._moved.values())}
        return {"seconds": self.now - self._begun, **moved, **asdict(self._counts)}

    def state_dict(self) -> dict[str, Any]:
        """The state and the metrics after the last iteration that all shards have saved; nothing before the first."""
        return self._saved or {}

    def end_state(self) -> dict[str, Any]:
        return {"state": self.state, "metrics": self.metrics}

    # --- the conversation ----------------------------------------------------------------------------------------------------

    def _minimise(self) -> Task:
        """Begin a session: from what was saved last, or from the beginning."""
        yield from self._join()
        if self._saved is not None:
            saved = copy.deepcopy(self._saved)
            self.state, self.metrics = State(**saved["state"]), saved["metrics"]
        else:
            self.state, self.metrics = State(), []
        conversation, answer = lbfgs(self.config.settings, self.state), None
        while True:
            try:
                request = conversation.send(answer)
            except StopIteration:
                break
            if isinstance(request, Ask):
                answer = yield from self._ask(request.orders)
            elif isinstance(request, Evaluate):
                answer = yield from self._evaluate(request)
            else:
                yield from self._mark()
        self._save()  # why it ended may be known only now

    def _join(self) -> Task:
        wanted = self.config.shards
        yield Until(lambda: len(self._shards) == wanted, self.now + JOIN_S)
        if len(self._shards) < wanted:
            raise WorkerLost(f"Only {len(self._shards)} of {wanted} shards connected within {JOIN_S:g} s: see their own output.")
        self._session, self._restarted = self._session + 1, False
        self._evaluation = self._session << _NUMBERS
        for shard in self._shards.values():
            shard.order_queue = OrderQueue()
        yield from self._ask(() if self._saved is None else (("load", self._saved["state"]["iteration"]),))

    def _mark(self) -> Task:
        """An iteration has ended."""
        state, spent = self.state, self._spent()
        row = {"iteration": state.iteration, "loss": state.loss, "accuracy": None, "test_loss": None}
        row["evaluations"] = state.evaluations - sum(row["evaluations"] for row in self.metrics)
        self.metrics.append({**row, **{name: spent[name] - self._before.get(name, 0) for name in spent}})
        yield from self._ask((("save", state.iteration),))
        self._before = spent
        self._save()

    def _save(self) -> None:
        self._saved = copy.deepcopy({"state": asdict(self.state), "metrics": self.metrics})
        self._effects.append(Snapshot())

    def _ask(self, orders: tuple[Order, ...]) -> Task:
        """Let all shards carry out ``orders``; returns one scalar each."""
        self._answers, self._expected = {}, len(orders)
        self._order_shards({"ask": orders})
        self._asked = self._shards[0].order_queue.sent
        yield from self._wait(lambda: len(self._answers) == len(self._shards))
        terms = zip(*(self._answers[shard] for shard in sorted(self._answers)), strict=True)
        return [combine(order, answers) for order, answers in zip(orders, terms, strict=True)]

    def _evaluate(self, request: Evaluate) -> Task:
        self._evaluation, self._dispenser = self._evaluation + 1, None
        for worker in self._workers.values():
            worker.order_queue, worker.counted = OrderQueue(), []
        yield from self._ask((*request.first, ("begin", self._evaluation, request.at)))
        config = self.config
        dispenser = self._dispenser = Dispenser(config.portions, config.shards, config.backups, config.exact, self._counts)
        self._wake()
        yield from self._wait(lambda: dispenser.complete)
        _, *scalars = yield from self._ask((("total", request.into), *request.then))
        return [dispenser.loss, *scalars]

    def _wait(self, condition: Callable[[], bool]) -> Task:
        yield Until(lambda: self._restarted or condition())
        if self._restarted:
            raise _ShardRestarted
