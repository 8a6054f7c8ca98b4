"""A worker's requests to the other workers: each has a number, is repeated until it is answered, and ends with its peer.

A peer that answers nothing for the liveness timeout is *silent*: nothing waits for it, it gets a ping per second, and it is back
with its first answer. A peer that said goodbye, or is known to be dead, has *left*. A process that takes a dead worker's place has
a larger *incarnation*, which every message carries. Time in which this process itself was suspended does not count against others,
and large messages have longer.

A PUSH (an exchange) is different from other requests: it changes its receiver, so it is sent once, and stays open until the
receiver has said whether it took it. Instead of repeating it, this worker asks about its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from hocket.errors import HocketError
from hocket.programs.base import Service, Task, Until, from_plain, to_plain, whole
from hocket.programs.gossip.state import JOINING, PHASES
from hocket.programs.server.wire import LIVENESS_TIMEOUT_S
from hocket.transport.frame import Envelope, Kind

CHECK_EVERY_S = 0.5
_CHECK = "check"
_REPEAT_S = 1.0
_PING_S = 1.0
_MAX_GAP_S = 1.0
"""Of the time between two checks no more counts against peers that were asked."""
_LATE_S = 1.0
"""A worker that was suspended refuses exchanges for so long: what it finds then may have waited for as long as it was away."""
_MIN_BYTES_PER_S = 10_000_000
"""A link of 100 Mbit/s: besides the timeout, tensors in both directions have the time that they take at this rate."""
_AT_ONCE = 4
"""Large answers are requested of so many peers at a time, for they share this worker's link."""


@dataclass(frozen=True)
class PeerConfig:
    """Worker ``worker`` of ``world``; ``kind`` is that of the gossip: rotating, ring, random or pushsum."""

    worker: int
    world: int
    kind: str = "rotating"
    seed: int = 0
    liveness_timeout_s: float = LIVENESS_TIMEOUT_S
    incarnation: int = 0
    """Larger than that of the process whose place this one takes; 0 for the first."""
    joins: bool = False
    """Whether it takes the place of a worker that has died, and gets its weights from those that live."""
    address: str | None = None
    """Where other workers reach this one; a replacement tells them."""
    greets: bool = True
    """Whether ``start`` waits for a sign of life of all other workers."""
    absent: tuple[int, ...] = ()
    """Workers that are gone already."""


@dataclass
class Peer:
    """Another worker as this one sees it."""

    incarnation: int = 0
    silent: bool = False
    left: bool = False
    met: bool = False
    """Whether it has ever answered."""
    heard: float = 0.0
    """When it last answered."""
    phase: str = JOINING
    """The last that it said of itself."""
    open: list[int] = field(default_factory=list)
    """The workers to which it has exchanges under way, as it said last."""
    address: str | None = None


@dataclass
class Request:
    """A message that wants an answer."""

    peer: int
    message: Envelope
    since: float
    sent: float
    allowance_s: float
    """What its size adds to the timeout."""
    version: int = 0
    """Of an exchange: that of the weights which were sent."""
    answer: Envelope | None = None
    lost: bool = False

    def state(self) -> dict[str, Any]:
        return {**vars(self), "message": to_plain(self.message), "answer": to_plain(self.answer)}

    @classmethod
    def load(cls, state: dict[str, Any]) -> Request:
        message = from_plain(state["message"])
        assert message is not None
        return cls(**{**state, "message": message, "answer": from_plain(state["answer"])})

    @property
    def exchange(self) -> bool:
        return self.message.kind == Kind.PUSH

    @property
    def answered(self) -> bool:
        return self.answer is not None or self.lost


class PeerLinks(Service):
    """The other workers, and what they were asked."""

    peer_kind, role = "Worker", "A worker"

    def __init__(self, config: PeerConfig) -> None:
        super().__init__()
        self.config, self.worker, self.world = config, config.worker, config.world
        self.own_number = config.worker
        self.peers = {peer: Peer(left=peer in config.absent) for peer in range(config.world) if peer != config.worker}
        self.requests: dict[int, Request] = {}
        self.closed = False
        """Whether this worker has left: it answers nothing any more."""
        self._number = 0
        self._checked = self._pinged = 0.0
        self._timed = False  # False on a perfect virtual network, which needs no timers
        self._late_until = float("-inf")

    # --- for programs --------------------------------------------------------------------------------------------------------

    @property
    def here(self) -> list[int]:
        """All other workers that are neither silent nor gone."""
        return [peer for peer in self.peers if self.reachable(peer)]

    def reachable(self, peer: int) -> bool:
        """Whether a request may be answered."""
        return not self.peers[peer].silent and not self.peers[peer].left

    @property
    def exchanges_open(self) -> list[Request]:
        """Exchanges of which it is not known whether the other worker took them."""
        return [request for request in self.requests.values() if request.exchange]

    def ask(
        self, peer: int, kind: Kind, metadata: dict[str, Any] | None = None, tensors: Sequence[Tensor] = (), expects: int = 0
    ) -> int:
        """Send a request whose answer has about ``expects`` bytes; its number, for :meth:`take`."""
        self._number += 1
        size = sum(tensor.nbytes for tensor in tensors) + expects
        open_s = sum(r.allowance_s for r in self.requests.values() if r.peer == peer and not r.answered)
        metadata = {**self._status(), "to": self.peers[peer].incarnation, **(metadata or {})}
        message = Envelope(kind, self.worker, peer, number=self._number, metadata=metadata, tensors=tuple(tensors))
        self.requests[self._number] = Request(peer, message, self.now, self.now, open_s + size / _MIN_BYTES_PER_S)
        self._send(peer, message)
        return self._number

    def take(self, number: int) -> Envelope | None:
        """The answer to a request; None where it was refused or is lost."""
        answer = self.requests.pop(number).answer
        return None if answer is None or answer.kind == Kind.REFUSAL else answer

    def ask_all(self, whom: Iterable[int], kind: Kind, expects: int = 0, metadata: dict[str, Any] | None = None) -> Task:
        """Ask these workers, a few at a time where large answers are expected; what they answered, by worker."""
        whom = list(whom)
        some = _AT_ONCE if expects else max(len(whom), 1)
        found: dict[int, Envelope] = {}
        for first in range(0, len(whom), some):
            numbers = {peer: self.ask(peer, kind, metadata, expects=some * expects) for peer in whom[first : first + some]}
            asked = [self.requests[number] for number in numbers.values()]
            yield Until(lambda asked=asked: all(request.answered for request in asked))  # type: ignore[misc]
            answers = {peer: self.take(number) for peer, number in numbers.items()}
            found |= {peer: answer for peer, answer in answers.items() if answer is not None}
        return found

    # --- answers -------------------------------------------------------------------------------------------------------------

    def _hear(self, peer: int, message: Envelope) -> None:
        """A peer has answered."""
        other, metadata = self.peers[peer], message.metadata
        if message.kind == Kind.REFUSAL and "incarnation" not in metadata:  # of the link, not of the peer
            if not other.met:
                raise HocketError(f"Worker {peer}: {metadata.get('sentence')}")
            self._give_up(peer)  # another process may listen on its port by now
            return
        incarnation = int(metadata.get("incarnation", other.incarnation))
        if incarnation < other.incarnation:
            return
        if message.kind == Kind.REFUSAL and metadata.get("reason") == "outdated":
            raise HocketError(f"Worker {peer}: {metadata.get('sentence')}")
        if incarnation > other.incarnation:
            self._replaced(peer, incarnation)
            other = self.peers[peer]
        other.met, other.silent, other.heard = True, False, self.now
        self._note_status(peer, metadata)
        if message.kind == Kind.GOODBYE:
            self._said_goodbye(peer, metadata)
            return
        request = self.requests.get(message.number)
        if request is None or request.peer != peer or request.answered:
            return
        if not request.exchange:
            request.answer = message
        elif message.kind in (Kind.REPLY, Kind.REFUSAL):
            del self.requests[message.number]
            self._settled(request, message)

    def _note_status(self, peer: int, metadata: Any) -> None:
        other, phase = self.peers[peer], metadata.get("phase")
        if phase in PHASES and PHASES.index(phase) >= PHASES.index(other.phase):  # it only goes on; messages may be out of order
            other.open = [whole(worker) for worker in metadata.get("open", [])]
            other.phase = phase

    def _status(self) -> dict[str, Any]:
        return {"incarnation": self.config.incarnation}

    # --- peers that come and go ----------------------------------------------------------------------------------------------

    def _replaced(self, peer: int, incarnation: int) -> None:
        """Another process is this worker from now on: what the one before it was asked is lost."""
        for request in self._open_to(peer):
            self._lose(request)
        known = self.peers[peer]
        self.peers[peer] = Peer(incarnation, met=known.met, heard=self.now, address=known.address)

    def _said_goodbye(self, peer: int, metadata: Any) -> None:
        """A peer has left; it said whether it took the last exchange that it saw."""
        number, taken = metadata.get("resolved") or (0, False)
        number = whole(number, 0, 1 << 62)
        self.peers[peer].left = True
        for request in self._open_to(peer):
            if request.exchange and not (taken and number >= request.message.number):
                del self.requests[request.message.number]
                self._settled(request, Envelope(Kind.REFUSAL, peer, number=request.message.number))
            else:
                self._lose(request, taken=True)

    def _give_up(self, peer: int) -> None:
        """Count a peer as silent: nothing waits for it."""
        self.peers[peer].silent = True
        for request in self._open_to(peer):
            if not request.exchange:
                request.lost = True

    def _lose(self, request: Request, taken: bool = False) -> None:
        request.lost = True
        if request.exchange:
            del self.requests[request.message.number]
            self._lost(request, taken)

    def _open_to(self, peer: int) -> list[Request]:
        return [r for r in self.requests.values() if r.peer == peer and not r.answered]

    def _settled(self, request: Request, message: Envelope) -> None:
        """The other worker took an exchange (REPLY), or did not and never will (REFUSAL)."""

    def _lost(self, request: Request, taken: bool) -> None:
        """The other worker is gone before it could complete an exchange; ``taken``: it said that it took it."""

    # --- time ----------------------------------------------------------------------------------------------------------------

    def on_timer(self, name: str) -> None:
        """Repeat requests, give up on silent peers, and ping them."""
        if self.closed or name != _CHECK:
            return
        self._notice_suspension()
        excused_s = max(self.now - self._checked - _MAX_GAP_S, 0.0) if self._timed else 0.0
        self._checked, self._timed = self.now, True
        for request in list(self.requests.values()):
            request.since += excused_s
            if not request.answered:
                self._tend(request)
        if self.now - self._pinged >= _PING_S:
            self._pinged = self.now
            for peer, other in self.peers.items():
                if other.silent and not other.left:
                    self._ping(peer)
        self._start_checks()

    def _start_checks(self) -> None:
        self._set_timer(_CHECK, self.now + CHECK_EVERY_S)

    def _notice_suspension(self) -> None:
        """Detect that this process was suspended: a check is late, or a message arrives long after a check was due."""
        if self._timed and self.now - self._checked > CHECK_EVERY_S + self.config.liveness_timeout_s / 2:
            self._late_until = self.now + _LATE_S

    def _tend(self, request: Request) -> None:
        other = self.peers[request.peer]
        if other.silent and request.exchange:
            return
        if self.now - max(request.since, other.heard) > self.config.liveness_timeout_s + request.allowance_s:
            self._give_up(request.peer)
        elif self.now - request.sent > _REPEAT_S + request.allowance_s:
            request.sent = self.now
            if request.exchange:
                self._ping(request.peer)
            else:
                self._send(request.peer, replace(request.message, metadata={**request.message.metadata, **self._status()}))

    def _ping(self, peer: int) -> None:
        """Ask a peer for a sign of life, and whether it took the open exchange; a replacement adds its address."""
        address = self.config.address
        kind, metadata = (Kind.HELLO, {"address": address}) if self.config.joins else (Kind.BEAT, dict[str, Any]())
        about = next((r.message.number for r in self.exchanges_open if r.peer == peer), None)
        metadata |= {**self._status(), "to": self.peers[peer].incarnation} | ({} if about is None else {"about": about})
        self._send(peer, Envelope(kind, self.worker, peer, metadata=metadata))
