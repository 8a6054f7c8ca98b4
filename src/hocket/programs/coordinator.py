"""The coordinator of a run without servers: it sends workers each other's addresses, dispatches mini-batches, and records results.

It holds no weights and takes no part in exchanges. Every request of a worker carries a number and gets one answer with it; a
request that comes again gets the same answer, and nothing is counted twice:

=========  =======================================================  ==========================================================
HELLO      its address and its incarnation                          WELCOME: all addresses (None: gone), once all are known;
                                                                    until then WAIT, once a second
FETCH      mini-batches done since the last one, its account        REPLY: the next mini-batch, and whether there are more
PUSH       the final mean, mini-batches done, its account           REPLY
=========  =======================================================  ==========================================================
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hocket.errors import HocketError
from hocket.programs.account import Account, added, checked, staleness_of
from hocket.programs.base import Address, Client, Effects, Link, Rejected, Service, Task, Until, event, whole
from hocket.programs.gossip.state import Mean, PeerState
from hocket.programs.server.members import BatchDispatcher
from hocket.transport.address import parts_of
from hocket.transport.frame import Envelope, Kind

_WAIT_EVERY_S = 1.0
_CHECK_EVERY_S = 0.5
_MAX_ADDRESS = 300
"""Letters: all workers' addresses travel in one message."""
_CHECK = "check"
COORDINATOR = 0
"""Its number among the peers of a :class:`CoordinatorClient`."""


@dataclass
class _Member:
    """One worker: which process it is, and the last request that was answered."""

    address: str
    incarnation: int = 0
    answered: int = -1
    answer: dict[str, Any] = field(default_factory=dict)
    waiting: tuple[bytes, int] | None = None
    """It waits for the addresses: who, and the number of its request."""
    before: dict[str, Any] | None = None
    """The account of the processes whose place it took."""


class Coordinator(Service):
    """Serves ``workers`` workers; a free worker takes the next of ``total`` mini-batches."""

    role = "A coordinator"

    def __init__(self, workers: int, total: int, like: PeerState | None = None) -> None:
        """``like``: the shapes of what workers hold, if this coordinator is to check the final mean."""
        super().__init__()
        self.workers, self.like = workers, like
        self.dispatcher = BatchDispatcher(total)
        self.figures: dict[str, dict[str, Any]] = {}
        self.means: dict[int, Mean] = {}
        """The final mean, as workers that have ended tell it."""
        self.gone: set[int] = set()
        self.lost = 0
        """Mini-batches that were held by workers that are gone; others do them."""
        self._members: dict[int, _Member] = {}
        self._notified = 0.0

    @property
    def worker_addresses(self) -> list[str | None] | None:
        """All workers' addresses, once all that live have told theirs."""
        if len(self._members.keys() | self.gone) < self.workers:
            return None
        return [None if w in self.gone else self._members[w].address for w in range(self.workers)]

    @property
    def incarnations(self) -> dict[int, int]:
        """Which process each worker is."""
        return {worker: member.incarnation for worker, member in self._members.items()}

    @property
    def staleness(self) -> dict[str, int]:
        """The staleness of all gradients, also those of workers that are gone."""
        return staleness_of(self.figures.values())

    @property
    def lost_exchanges(self) -> int:
        """Exchanges between workers that came to nothing, also those of workers that are gone."""
        return sum(int(account.get("lost", 0)) for account in self.figures.values())

    # --- events --------------------------------------------------------------------------------------------------------------

    @event
    def start(self, now: float) -> None:
        self._notified = now
        self._set_timer(_CHECK, now + _CHECK_EVERY_S)

    @event
    def worker_lost(self, worker: int, now: float) -> None:
        """A worker has died, or is silent for good: its mini-batches go to others."""
        self.gone.add(worker)
        self.lost += self.dispatcher.give_back(worker)
        self._welcome()

    def on_message(self, sender: Address, message: Envelope) -> None:
        self._serve(sender, message, {Kind.HELLO: self._hello, Kind.FETCH: self._fetch, Kind.PUSH: self._push})

    def _admit(self, message: Envelope) -> None:
        if not 0 <= message.sender < self.workers:
            raise Rejected("worker", f"There is no worker {message.sender} in a job of {self.workers}.")

    def on_timer(self, name: str) -> None:
        """Send WAIT to the waiting workers, so that they know that this coordinator lives."""
        self._set_timer(_CHECK, self.now + _CHECK_EVERY_S)
        if self.now - self._notified >= _WAIT_EVERY_S:
            self._notified = self.now
            for member in self._members.values():
                if member.waiting is not None:
                    self._answer(member.waiting[0], Kind.WAIT, member.waiting[1], {})

    # --- requests ------------------------------------------------------------------------------------------------------------

    def _hello(self, peer: bytes, message: Envelope) -> None:
        worker, incarnation, address = message.sender, whole(message.metadata["incarnation"]), message.metadata["address"]
        if not isinstance(address, str) or len(address) > _MAX_ADDRESS:
            raise ValueError("it names no address")
        parts_of(address)
        member = self._members.get(worker)
        if member is None or incarnation > member.incarnation:
            before = self.figures.get(str(worker))
            self.lost += self.dispatcher.give_back(worker)
            if incarnation > 0 and not self.means:  # also where the process before it died before it said hello
                self.gone.discard(worker)
            member = self._members[worker] = _Member(address, incarnation, before=before)
        self._check(member, worker, incarnation)
        member.waiting = peer, message.number
        self._welcome()

    def _welcome(self) -> None:
        addresses = self.worker_addresses
        for member in self._members.values():
            if addresses is not None and member.waiting is not None:
                (peer, number), member.waiting = member.waiting, None
                self._answer(peer, Kind.WELCOME, number, {"addresses": addresses})

    def _fetch(self, peer: bytes, message: Envelope) -> None:
        def dispatch() -> dict[str, Any]:
            gone = message.sender in self.gone  # the dead process had asked before
            return {"batch_ids": [] if gone else self.dispatcher.take(message.sender, 1), "over": self.dispatcher.empty}

        self._once(peer, message, dispatch)

    def _push(self, peer: bytes, message: Envelope) -> None:
        mean = Mean.read(message.metadata, message.tensors)
        if self.like is not None:
            own = self.like.buffers
            self.like.fitting(mean.rows)
            if mean.buffers is not None and (own is None or mean.buffers.shape != own.shape):
                raise ValueError(f"{mean.buffers.numel()} values in buffers, which this model does not have")

        def keep() -> dict[str, Any]:
            self.means[message.sender] = mean
            return {}

        self._once(peer, message, keep)

    def _once(self, peer: bytes, message: Envelope, act: Callable[[], dict[str, Any]]) -> None:
        """Act on a worker's request and answer it; a repeated request gets the same answer."""
        member = self._members.get(message.sender)
        if member is None:
            raise Rejected("hello", "This coordinator does not know this worker: say hello first.")
        self._check(member, message.sender, whole(message.metadata["incarnation"]))
        if message.number > member.answered:
            done, ledger = [whole(number) for number in message.metadata["done"]], checked(message.metadata["ledger"])
            self.dispatcher.done(message.sender, done)
            self.figures[str(message.sender)] = added(member.before or {}, ledger)
            member.answered, member.answer = message.number, act()
        if message.number == member.answered:
            self._answer(peer, Kind.REPLY, message.number, member.answer)

    def _check(self, member: _Member, worker: int, incarnation: int) -> None:
        if incarnation != member.incarnation:
            raise Rejected("outdated", f"Another process is worker {worker} now: this one can end.")


class CoordinatorClient(Client):
    """A worker's side of the coordinator; the next mini-batch is requested while the worker computes."""

    def __init__(self, worker: int, incarnation: int = 0) -> None:
        super().__init__()
        self.worker, self.incarnation = worker, incarnation
        self.account = Account()
        """The worker's, which goes along with every request."""
        self.worker_addresses: list[str | None] = []
        """All workers' addresses, after :meth:`join`; None where a worker has died already."""
        self.over = False
        """Set by whoever trains: it takes no more mini-batches, because the others have ended."""
        self._batch_ids: deque[int] = deque()
        self._taken: list[int] = []
        self._link = Link(COORDINATOR)
        self.links = [self._link]
        self._none_left = False
        self._checked = 0.0

    # --- events --------------------------------------------------------------------------------------------------------------

    @event
    def join(self, address: str, now: float) -> Task:
        """Send this worker's address; then :attr:`worker_addresses` has those of all workers."""
        self._ask(Kind.HELLO, {"address": address, "incarnation": self.incarnation})
        welcome = yield from self._wait()
        self.worker_addresses = list(welcome.metadata["addresses"])

    @event
    def take_batch(self, now: float) -> Task:
        """Fetch a mini-batch in advance, if there is one left; the last request is for those of a dead worker."""
        last = self.over
        while not self._batch_ids and not last:
            if not self.open:
                last = self._none_left
                self._ask(Kind.FETCH, self._report(self._taken))
                self._taken = []
            metadata = (yield from self._wait()).metadata
            self._batch_ids.extend(int(number) for number in metadata["batch_ids"])
            self._none_left = bool(metadata["over"])

    def next_batch(self, now: float) -> tuple[int | None, Effects]:
        """After :meth:`take_batch`: the number of the next mini-batch (None: there is none left); the one before is done."""
        self.now = max(now, self.now)
        number = self._batch_ids.popleft() if self._batch_ids else None
        if number is not None:
            self._taken.append(number)
            if not self._none_left and not self.open:
                self._ask(Kind.FETCH, self._report(self._taken[:-1]))
                self._taken = self._taken[-1:]
        return number, self._done()

    @event
    def deliver(self, mean: Mean, now: float, ledger: dict[str, Any] | None = None) -> Task:
        """Send the final mean, and the final figures (the account's, unless given)."""
        if self.open:
            yield from self._wait()
        metadata, tensors = mean.described()
        report = self._report(self._taken)
        self._ask(Kind.PUSH, {**metadata, **report, "ledger": ledger or report["ledger"]}, tensors)
        self._taken = []
        yield from self._wait()

    def _wait(self) -> Task:
        yield Until(self._answered)
        self._link.request = None
        return self._link.reply

    def describe_peer(self, peer: int) -> str:
        return "The coordinator"

    # --- messages ------------------------------------------------------------------------------------------------------------

    def _report(self, done: list[int]) -> dict[str, Any]:
        return {"done": list(done), "ledger": self.account.describe(self.now), "incarnation": self.incarnation}

    def _ask(self, kind: Kind, metadata: dict[str, Any], tensors: tuple[Any, ...] = ()) -> None:
        self._checked = self.now
        self._request([Envelope(kind, self.worker, metadata=metadata, tensors=tensors)])

    def on_message(self, sender: Address, message: Envelope) -> None:
        link = self._link
        link.heard = self.now
        if link.request is None or message.number != link.request.number:
            return
        if message.kind == Kind.REFUSAL:
            raise HocketError(f"The coordinator: {message.metadata.get('sentence')}")
        if message.kind != Kind.WAIT and link.reply is None:
            link.reply = message

    def on_timer(self, name: str) -> None:
        """Time in which this process was suspended does not count against the coordinator."""
        self._link.heard += max(self.now - self._checked - 2 * self.check_every_s, 0.0)
        self._checked = self.now
        super().on_timer(name)
