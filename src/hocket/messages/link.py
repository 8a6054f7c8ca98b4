"""Links on ZeroMQ: one ``Listener``, many ``Caller``s, envelopes both ways, and no peer that can take the others down.

A message arrives whole, in order and at most once; one that was under way when a link was cut may be lost, so whoever needs an
answer asks again. Links that are cut heal by themselves. Queues are counted in messages (``high_water`` per peer and direction),
messages in bytes (``most_bytes``): what a slow peer can make this process hold is their product.

Whatever is refused is counted in ``refused`` by reason, and answered with a REFUSAL, to each peer at most once a second.

A link belongs to one thread at a time.
"""

from __future__ import annotations

import errno
import secrets
import time
from collections import Counter, OrderedDict
from types import TracebackType
from typing import Self

import zmq

from hocket.errors import HocketError
from hocket.messages.address import bracketed, numeric_of, parts_of, stays_here, why_not
from hocket.messages.door import HANDSHAKE_FAILED, Door
from hocket.messages.end import End
from hocket.messages.frame import NO_JOB, Envelope, Frame, Kind, Refused, pack, unpack
from hocket.messages.keys import Keys

MOST_BYTES = 1 << 26
HIGH_WATER = 16
RECONNECT_S = 0.1
RECONNECT_MOST_S = 1.0
CONNECT_S = 2.0
"""How long one try to connect may take: the system itself would go on for two minutes, with pauses that double."""
LINGER_S = 1.0
"""How long ``close`` waits for what was sent to leave."""
ANSWER_EVERY_S = 1.0
_MOST_ANSWERED = 4096
_SPARE = 64
"""How many refused messages ``receive`` clears away after its time is up, lest a flood hide what stands behind it."""


class Listener:
    """The end that many callers reach, bound to ``address``, such as ``tcp://127.0.0.1:0``; port 0 takes any free one.

    ``address`` then tells the real one. Beyond this machine it wants keys. ``socket`` is for polling.
    """

    def __init__(
        self, address: str, job: bytes, keys: Keys | None = None, most_bytes: int = MOST_BYTES, high_water: int = HIGH_WATER
    ) -> None:
        host, port = parts_of(address)
        numeric = numeric_of(host)
        if keys is None and not stays_here(numeric):
            raise HocketError(
                f"{address} can be reached from other machines and nothing keeps strangers out: make keys with `hocket keys FILE`."
            )
        self._job, self._most = job, most_bytes
        self._refused: Counter[str] = Counter()
        self._answered: OrderedDict[bytes, float] = OrderedDict()
        self._door: Door | None = None
        self._end = End(zmq.ROUTER, job, most_bytes, high_water, ":" in numeric)
        self.socket = self._end.socket
        try:
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error instead of silence when a peer is gone or slow
            self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a caller that comes back finds its old, dead connection replaced
            if keys is not None:
                self._door = Door(self._end.context, self.socket, keys)
            self.socket.bind(f"tcp://{bracketed(numeric)}:{port}")
        except zmq.ZMQError as error:
            self.close(0)
            raise HocketError(why_not(address, error)) from None
        self.address: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def refused(self) -> Counter[str]:
        """How many messages (and, under ``key``, connections) were refused, by reason; a copy."""
        counts = self._refused.copy()
        if self._door is not None and self._door.turned_away:
            counts["key"] = self._door.turned_away
        return counts

    def receive(self, timeout_s: float) -> tuple[bytes, Envelope] | None:
        """The next message and who sent it, or None when the time is up."""
        deadline, spare = time.monotonic() + timeout_s, _SPARE
        while (frames := self._end.take(deadline)) is not None:
            peer = bytes(frames[0])
            try:
                return peer, unpack(frames[1:], self._job, self._most)
            except Refused as refusal:
                self._turn_away(peer, refusal)
            spare -= time.monotonic() >= deadline
            if spare <= 0:
                break
        return None

    def send(self, peer: bytes, envelope: Envelope) -> bool:
        """Hand a message to the link; False when the peer is gone or its queue is full. Do not write to its tensors any more."""
        return self._post(peer, pack(envelope, self._job))

    def close(self, linger_s: float = LINGER_S) -> None:
        """Let what was sent leave, for at most ``linger_s``, and free the port."""
        self._end.close(linger_s)
        if self._door is not None:
            self._door.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(LINGER_S if error is None else 0)

    def _post(self, peer: bytes, frames: list[Frame]) -> bool:
        try:
            return self._end.put([peer, *frames], 3, 0)
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return False
            raise

    def _turn_away(self, peer: bytes, refusal: Refused) -> None:
        self._refused[refusal.reason] += 1
        now = time.monotonic()
        while self._answered and now - next(iter(self._answered.values())) >= ANSWER_EVERY_S:
            self._answered.popitem(last=False)
        if peer in self._answered or len(self._answered) >= _MOST_ANSWERED:
            return
        self._answered[peer] = now
        note = {"reason": refusal.reason, "sentence": str(refusal)}
        self._post(peer, pack(Envelope(Kind.REFUSAL, note=note), NO_JOB))


class Caller:
    """The end that reaches out to a listener, and again whenever the link was cut.

    The listener knows it by ``identity`` (chosen at random when None), also after a cut. ``refused`` counts what came from the
    listener and was not understood, and under ``key`` the times that the listener's door stayed shut.

    After a cut TCP itself tries again with pauses that double, so that it may notice as late as the cut was long that the link is
    back. With ``redial_s`` a connection that acknowledges nothing for so long is given up and a new one is made; what was under way
    is lost, so this is for those who ask again. A listener that reads nothing for so long counts as cut off too, where the system
    tells them apart no more (Linux).
    """

    def __init__(
        self,
        address: str,
        job: bytes,
        keys: Keys | None = None,
        identity: bytes | None = None,
        most_bytes: int = MOST_BYTES,
        high_water: int = HIGH_WATER,
        redial_s: float | None = None,
    ) -> None:
        host, port = parts_of(address)
        if port == 0:
            raise HocketError(f"{address} names no port: call the address that the listener tells.")
        self.identity = b"c" + secrets.token_bytes(8) if identity is None else identity
        if not 1 <= len(self.identity) <= 255 or self.identity[0] == 0:
            raise HocketError(f"An identity has 1 to 255 bytes and does not begin with zero, got {self.identity!r}.")
        self.address, self._job, self._most = address, job, most_bytes
        self.refused: Counter[str] = Counter()
        self._end = End(zmq.DEALER, job, most_bytes, high_water, ":" in numeric_of(host))
        self.socket = self._end.socket
        self._events = self.socket.get_monitor_socket(HANDSHAKE_FAILED)
        try:
            self.socket.setsockopt(zmq.ROUTING_ID, self.identity)
            self.socket.setsockopt(zmq.RECONNECT_IVL, int(RECONNECT_S * 1000))
            self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(RECONNECT_MOST_S * 1000))
            self.socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_S * 1000))
            if redial_s is not None:
                self.socket.setsockopt(zmq.TCP_MAXRT, int(redial_s * 1000))
            if keys is not None:
                self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public.encode())
                self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.worker_public.encode())
                self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.worker_secret.encode())
            # By name: a listener that moves to another machine is looked up anew.
            self.socket.connect(f"tcp://{bracketed(host)}:{port}")
        except zmq.ZMQError as error:
            self.close(0)
            raise HocketError(why_not(address, error)) from None

    def send(self, envelope: Envelope, timeout_s: float) -> bool:
        """Hand a message to the link; False when its queue stays full. Do not write to its tensors any more."""
        if self._end.put(pack(envelope, self._job), 2, timeout_s):
            return True
        self._heed()
        return False

    def receive(self, timeout_s: float) -> Envelope | None:
        """The next message, or None when the time is up."""
        deadline, spare = time.monotonic() + timeout_s, _SPARE
        while (frames := self._end.take(deadline)) is not None:
            try:
                return self._open(frames)
            except Refused as refusal:
                self.refused[refusal.reason] += 1
            spare -= time.monotonic() >= deadline
            if spare <= 0:
                break
        self._heed()
        return None

    def shut_out(self) -> bool:
        """Whether a handshake has failed: the listener does not know our key, or we do not know its."""
        self._heed()
        return self.refused["key"] > 0

    def close(self, linger_s: float = LINGER_S) -> None:
        """Let what was sent leave, for at most ``linger_s``."""
        self._events.close(0)
        self._end.close(linger_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(LINGER_S if error is None else 0)

    def _open(self, frames: list[Frame]) -> Envelope:
        try:
            return unpack(frames, self._job, self._most)
        except Refused as refusal:
            if refusal.reason != "job":
                raise
            envelope = unpack(frames, NO_JOB, self._most)  # a refusal does not name the job
            if envelope.kind != Kind.REFUSAL:
                raise
            return envelope

    def _heed(self) -> None:
        """Count the handshakes that failed since the last time."""
        while self._events.poll(0):
            self._events.recv_multipart()
            self.refused["key"] += 1
