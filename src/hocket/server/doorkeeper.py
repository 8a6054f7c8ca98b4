"""Who answers for a worker while it computes: a thread with a listener, which never waits for anybody but its next visitor.

=========  ==================================================================  =============================================
message    from another worker (or an observer)                                is answered by
=========  ==================================================================  =============================================
PUSH       pairs: a caller's weights                                           REPLY: this worker's, from before the mean
           push-sum: half of what another has, and its mass                    REPLY: it was added
BEAT       at any time                                                         ANSWER: where it stands; its ledger
HELLO      the address of one that takes a dead worker's place                 the same; calls go there from now on
FETCH      *mean*: what all have agreed on; else all that this worker holds    REPLY with it
=========  ==================================================================  =============================================

Whoever got no answer in time takes back what it sent. So a door that was itself away (stopped) for as much as half that time
refuses what lies before it, as ``late``: it may have been taken back, and would count twice. A link that was cut for longer may
still bring what was taken back: a door cannot tell. Wrong senders, kinds and shapes are refused, counted in ``refused``, and touch
nothing; one that joins takes and gives nothing before it has weights. One that leaves says goodbye to all who have come, so that
they need not wait.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import Counter
from queue import SimpleQueue

import zmq

from hocket.cluster.message import framed
from hocket.messages import Envelope, Kind, Listener
from hocket.messages.address import parts_of, stays_here
from hocket.server.desk import Turned
from hocket.server.holding import Holding, mass_of
from hocket.server.wire import OBSERVER

_TURN_S = 0.1
_LATE_S = 1.0
"""So long after its return a door takes what comes for what lay there: it may find it only after a while."""


class Doorkeeper:
    """Worker ``worker`` of ``world`` to all others; ``halves``: push-sum, else pairs."""

    def __init__(
        self, listener: Listener, holding: Holding, worker: int, world: int, halves: bool, liveness_timeout_s: float
    ) -> None:
        self.listener, self.holding, self.worker, self.world, self.halves = listener, holding, worker, world, halves
        self.given: set[int] = set()
        """Who has been given the mean."""
        self.newcomers: SimpleQueue[tuple[int, str]] = SimpleQueue()
        """Who has taken a dead worker's place, and where; for :class:`~hocket.server.peers.Peers`."""
        self._refused: Counter[str] = Counter()
        self._away_s = liveness_timeout_s / 2
        self._late_until = 0.0
        self._known: dict[int, bytes] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._stand, name="hocket-doorkeeper", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> Counter[str]:
        """How many messages were refused, by reason."""
        return self._refused + self.listener.refused

    def close(self) -> None:
        """Say goodbye and close the door."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        for peer in self._known.values():
            self.listener.send(peer, Envelope(Kind.GOODBYE, self.worker))
        self.listener.close()

    def _stand(self) -> None:
        turned = time.monotonic()
        while not self._over.is_set():
            try:
                got = self.listener.receive(_TURN_S)
            except zmq.ZMQError:
                return  # the process ends
            now = time.monotonic()
            if now - turned > _TURN_S + self._away_s:
                self._late_until = now + _LATE_S
            turned = now
            if got is not None:
                self._handle(*got)

    def _handle(self, peer: bytes, message: Envelope) -> None:
        takes = {Kind.PUSH: self._push, Kind.BEAT: self._beat, Kind.HELLO: self._hello, Kind.FETCH: self._fetch}
        try:
            if message.kind not in takes:
                raise Turned("kind", f"A worker does not take {message.kind.name}.")
            if message.sender != OBSERVER:
                if message.sender == self.worker or not 0 <= message.sender < self.world:
                    raise Turned("worker", f"There is no other worker {message.sender} in a job of {self.world}.")
                self._known[message.sender] = peer
            try:
                answer = takes[message.kind](message)
            except Turned:
                raise
            except Exception as error:  # whatever a peer sent, the door stays open
                raise Turned("shape", f"The message cannot be taken: {error}.") from None
        except Turned as turned:
            self._refused[turned.reason] += 1
            note = {"reason": turned.reason, "sentence": str(turned)}
            answer = Envelope(Kind.REFUSAL, self.worker, number=message.number, note=note)
        self.listener.send(peer, answer)

    def _push(self, message: Envelope) -> Envelope:
        if message.sender == OBSERVER or (not self.halves and (message.sender % 2 or not self.worker % 2)):
            raise Turned("worker", "Workers with an even number call, those with an odd number answer.")
        if time.monotonic() < self._late_until:
            raise Turned("late", "This worker was away, and what was sent to it meanwhile may have been taken back.")
        self._want_weights()
        if self.holding.mean is not None:
            raise Turned("over", "The training is over here.")
        if self.halves:
            if not message.tensors:
                raise ValueError("it is empty")
            *part, mass = message.tensors
            self.holding.take_in(self.holding.fitting(part), mass_of(mass))
            answer = Envelope(Kind.REPLY, self.worker, number=message.number)
        else:
            before = self.holding.average(self.holding.fitting(message.tensors))
            answer = Envelope(Kind.REPLY, self.worker, number=message.number, tensors=tuple(before))
        self.holding.sent(framed(answer.tensor_bytes))
        return answer

    def _beat(self, message: Envelope) -> Envelope:
        note = {"state": self.holding.state, "ledger": self.holding.account.describe()}
        return Envelope(Kind.ANSWER, self.worker, number=message.number, note=note)

    def _hello(self, message: Envelope) -> Envelope:
        if message.sender == OBSERVER:
            raise Turned("worker", "An observer takes nobody's place.")
        address = str(message.note["address"])
        host, port = parts_of(address)
        ipaddress.ip_address(host)  # a door looks up no names
        if port == 0 or "%" in host:
            raise ValueError(f"{address} cannot be called")
        if stays_here(parts_of(self.listener.address)[0]) and not stays_here(host):
            raise Turned("worker", f"This job does not leave this machine, and {address} does.")
        self.newcomers.put((message.sender, address))
        return self._beat(message)

    def _want_weights(self) -> None:
        if not self.holding.joined:
            raise Turned("early", "This worker has no weights yet.")

    def _fetch(self, message: Envelope) -> Envelope:
        self._want_weights()
        if not message.note.get("mean"):
            return Envelope(Kind.REPLY, self.worker, number=message.number, tensors=self.holding.packed())
        mean = self.holding.mean
        if mean is None:
            raise Turned("early", "The mean of all is not known here yet.")
        self.given.add(message.sender)
        note = {"here": mean.here, "mass": mean.mass, "buffers": mean.buffers is not None, "ledgers": mean.ledgers}
        tensors = mean.rows if mean.buffers is None else [*mean.rows, mean.buffers]
        return Envelope(Kind.REPLY, self.worker, number=message.number, note=note, tensors=tuple(tensors))
