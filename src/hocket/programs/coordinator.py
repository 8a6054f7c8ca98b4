"""The coordinator of a run without servers: it tells workers where the others are, dispatches mini-batches, and records results.

It holds no weights and takes no part in exchanges. Every request of a worker carries a number and gets one answer with it; a
request that comes again gets the same answer, and nothing is counted twice:

=========  =======================================================  ==========================================================
HELLO      its address and its incarnation                          WELCOME: all addresses (None: gone), once all are known;
                                                                    until then WAIT, once a second
FETCH      mini-batches done since the last one, its account        REPLY: the next mini-batch, and whether there are more
PUSH       the final mean, mini-batches done, its account           REPLY
=========  =======================================================  ==========================================================
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from hocket.errors import HocketError, WorkerLost
from hocket.programs.account import Account, added, staleness_of
from hocket.programs.base import Address, Effects, Program, Rejected, Task, Until
from hocket.programs.gossip.state import Mean
from hocket.programs.server.members import BatchDispatcher
from hocket.transport.frame import Envelope, Kind

_WAIT_EVERY_S = 1.0
_CHECK_EVERY_S = 0.5
_REPEAT_S = 2.0
_GIVE_UP_S = 60.0
"""Without a message from the coordinator."""
_CHECK = "check"
COORDINATOR = 0
"""Its number among the peers of a :class:`CoordinatorClient`."""


@dataclass
class _Member:
    """One worker: which process it is, and the last request that was answered."""

    address: str
    incarnation: int = 0
    answered: int = -1
    answer: Envelope | None = None
    waiting: tuple[bytes, int] | None = None
    """It waits for the addresses: who, and the number of its request."""
    before: dict[str, Any] | None = None
    """The account of the processes whose place it took."""


class Coordinator(Program):
    """Serves ``workers`` workers; a free worker takes the next of ``total`` mini-batches."""

    def __init__(self, workers: int, total: int) -> None:
        super().__init__()
        self.workers = workers
        self.dispatcher = BatchDispatcher(total)
        self.figures: dict[str, dict[str, Any]] = {}
        self.means: dict[int, Mean] = {}
        """The final mean, as workers that have ended tell it."""
        self.gone: set[int] = set()
        self.lost = 0
        """Mini-batches that were held by workers that are gone; others do them."""
        self.refused: Counter[str] = Counter()
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

    def start(self, now: float) -> Effects:
        """Begin to serve."""
        self.now = self._notified = now
        self._set_timer(_CHECK, now + _CHECK_EVERY_S)
        return self._done()

    def worker_lost(self, worker: int, now: float) -> Effects:
        """A worker has died, or is silent for good: its mini-batches go to others."""
        self.now = max(now, self.now)
        self.gone.add(worker)
        self.lost += self.dispatcher.give_back(worker)
        self._welcome()
        return self._done()

    def on_message(self, sender: Address, message: Envelope) -> None:
        assert isinstance(sender, bytes)
        handlers = {Kind.HELLO: self._hello, Kind.FETCH: self._fetch, Kind.PUSH: self._push}
        try:
            if message.kind not in handlers or not 0 <= message.sender < self.workers:
                raise Rejected("worker", f"A coordinator does not accept {message.kind.name} from {message.sender}.")
            try:
                handlers[message.kind](sender, message)
            except (ValueError, TypeError, KeyError, IndexError) as error:  # whatever a peer sent, the coordinator goes on
                raise Rejected("shape", f"The message cannot be read: {error}.") from None
        except Rejected as rejected:
            self.refused[rejected.reason] += 1
            metadata = {"reason": rejected.reason, "sentence": str(rejected)}
            self._send(sender, Envelope(Kind.REFUSAL, number=message.number, metadata=metadata))

    def on_timer(self, name: str) -> None:
        """Tell those who wait that this coordinator lives."""
        self._set_timer(_CHECK, self.now + _CHECK_EVERY_S)
        if self.now - self._notified >= _WAIT_EVERY_S:
            self._notified = self.now
            for member in self._members.values():
                if member.waiting is not None:
                    peer, number = member.waiting
                    self._send(peer, Envelope(Kind.WAIT, number=number))

    # --- requests ------------------------------------------------------------------------------------------------------------

    def _hello(self, peer: bytes, message: Envelope) -> None:
        worker, incarnation, address = message.sender, int(message.metadata["incarnation"]), str(message.metadata["address"])
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
                peer, number = member.waiting
                member.waiting = None
                self._send(peer, Envelope(Kind.WELCOME, number=number, metadata={"addresses": addresses}))

    def _fetch(self, peer: bytes, message: Envelope) -> None:
        member = self._known(message)
        if message.number > member.answered:
            self._note_done(member, message)
            gone = message.sender in self.gone  # it had asked before it died
            numbers = [] if gone else self.dispatcher.take(message.sender, 1)
            metadata = {"batch_ids": numbers, "over": self.dispatcher.empty}
            member.answered, member.answer = message.number, Envelope(Kind.REPLY, number=message.number, metadata=metadata)
        self._answer_again(peer, member, message)

    def _push(self, peer: bytes, message: Envelope) -> None:
        member = self._known(message)
        if message.number > member.answered:
            tensors, metadata = list(message.tensors), message.metadata
            buffers = tensors.pop() if metadata["buffers"] else None
            mean = Mean(tensors, buffers, [int(w) for w in metadata["here"]], float(metadata["push_sum_weight"]))
            self._note_done(member, message)
            self.means[message.sender] = mean
            member.answered, member.answer = message.number, Envelope(Kind.REPLY, number=message.number)
        self._answer_again(peer, member, message)

    def _answer_again(self, peer: bytes, member: _Member, message: Envelope) -> None:
        if message.number == member.answered and member.answer is not None:
            self._send(peer, member.answer)

    def _known(self, message: Envelope) -> _Member:
        member = self._members.get(message.sender)
        if member is None:
            raise Rejected("hello", "This coordinator does not know this worker: say hello first.")
        self._check(member, message.sender, int(message.metadata["incarnation"]))
        return member

    def _check(self, member: _Member, worker: int, incarnation: int) -> None:
        if incarnation != member.incarnation:
            raise Rejected("outdated", f"Another process is worker {worker} now: this one can end.")

    def _note_done(self, member: _Member, message: Envelope) -> None:
        self.dispatcher.done(message.sender, [int(number) for number in message.metadata["done"]])
        self.figures[str(message.sender)] = added(member.before or {}, message.metadata["ledger"])


class CoordinatorClient(Program):
    """A worker's side of the coordinator; the next mini-batch is requested while the worker computes."""

    peer_kind = "Coordinator"

    def __init__(self, worker: int, incarnation: int = 0, account: Account | None = None) -> None:
        super().__init__()
        self.worker, self.incarnation = worker, incarnation
        self.account = Account() if account is None else account
        """The worker's, which goes along with every request."""
        self.worker_addresses: list[str | None] = []
        """All workers' addresses, after :meth:`join`; None where a worker has died already."""
        self.over = False
        """Set by whoever trains: it takes no more mini-batches, because the others have ended."""
        self._batch_ids: deque[int] = deque()
        self._taken: list[int] = []
        self._number = 0
        self._request: Envelope | None = None
        self._answer: Envelope | None = None
        self._none_left = False
        self._heard = self._sent = self._checked = 0.0

    # --- events --------------------------------------------------------------------------------------------------------------

    def join(self, address: str, now: float) -> Effects:
        """Tell where this worker is; then :attr:`addresses` has those of all."""
        return self._run(self._join(address), now)

    def take_batch(self, now: float) -> Effects:
        """Make sure that a mini-batch lies ready, if there is one left."""
        return self._run(self._ensure_batch(), now)

    def next_batch(self, now: float) -> tuple[int | None, Effects]:
        """After :meth:`take_batch`: the number of the next mini-batch (None: there is none left); the one before is done."""
        self.now = max(now, self.now)
        number = self._batch_ids.popleft() if self._batch_ids else None
        if number is not None:
            self._taken.append(number)
            if not self._none_left and self._request is None:
                self._ask(Kind.FETCH, self._report(self._taken[:-1]))
                self._taken = self._taken[-1:]
        return number, self._done()

    def deliver(self, mean: Mean, now: float, ledger: dict[str, Any] | None = None) -> Effects:
        """Tell the final mean, and the final figures (the account's, unless given)."""
        return self._run(self._deliver(mean, ledger), now)

    # --- tasks ---------------------------------------------------------------------------------------------------------------

    def _join(self, address: str) -> Task:
        self._ask(Kind.HELLO, {"address": address, "incarnation": self.incarnation})
        welcome = yield from self._wait()
        self.worker_addresses = list(welcome.metadata["addresses"])

    def _ensure_batch(self) -> Task:
        """Before it ends it asks once more: a worker that has died may have left some."""
        last = self.over
        while not self._batch_ids and not last:
            if self._request is None:
                last = self._none_left
                self._ask(Kind.FETCH, self._report(self._taken))
                self._taken = []
            metadata = (yield from self._wait()).metadata
            self._batch_ids.extend(int(number) for number in metadata["batch_ids"])
            self._none_left = bool(metadata["over"])

    def _deliver(self, mean: Mean, ledger: dict[str, Any] | None) -> Task:
        if self._request is not None:
            yield from self._wait()
        tensors = mean.rows if mean.buffers is None else [*mean.rows, mean.buffers]
        metadata = {"here": mean.here, "push_sum_weight": mean.push_sum_weight, "buffers": mean.buffers is not None}
        report = self._report(self._taken)
        self._ask(Kind.PUSH, {**metadata, **report, "ledger": ledger or report["ledger"]}, tuple(tensors))
        self._taken = []
        yield from self._wait()

    def _wait(self) -> Task:
        yield Until(lambda: self._answer is not None)
        answer, self._answer, self._request = self._answer, None, None
        return answer

    # --- messages ------------------------------------------------------------------------------------------------------------

    def _report(self, done: list[int]) -> dict[str, Any]:
        return {"done": list(done), "ledger": self.account.describe(self.now), "incarnation": self.incarnation}

    def _ask(self, kind: Kind, metadata: dict[str, Any], tensors: tuple[Any, ...] = ()) -> None:
        self._number += 1
        self._request = Envelope(kind, self.worker, number=self._number, metadata=metadata, tensors=tensors)
        self._heard = self._sent = self._checked = self.now
        self._send(COORDINATOR, self._request)
        self._set_timer(_CHECK, self.now + _CHECK_EVERY_S)

    def on_message(self, sender: Address, message: Envelope) -> None:
        self._heard = self.now
        if self._request is None or message.number != self._request.number:
            return
        if message.kind == Kind.REFUSAL:
            raise HocketError(f"The coordinator: {message.metadata.get('sentence')}")
        if message.kind != Kind.WAIT and self._answer is None:
            self._answer = message

    def on_timer(self, name: str) -> None:
        """Repeat what got no answer."""
        if self._request is None or self._answer is not None:
            return
        self._heard += max(self.now - self._checked - 2 * _CHECK_EVERY_S, 0.0)  # time in which this process was suspended
        self._checked = self.now
        if self.now - self._heard > _GIVE_UP_S:
            raise WorkerLost(f"The coordinator has not answered for {_GIVE_UP_S:g} s.")
        if self.now - max(self._sent, self._heard) > _REPEAT_S:
            self._sent = self.now
            self._send(COORDINATOR, self._request)
        self._set_timer(_CHECK, self.now + _CHECK_EVERY_S)
