"""Links on ZeroMQ: one ``Listener``, many ``Caller``s, envelopes in both directions; a faulty peer does not affect others.

A message arrives complete, in order and at most once; one in flight when a connection breaks may be lost, so a caller that needs an
answer repeats its request. Connections are restored automatically. Queues are limited in messages (``high_water`` per peer and
direction), messages in bytes (``most_bytes``): a slow peer can make this process hold at most their product.

Refused messages are counted in ``refused`` by reason, and answered with a REFUSAL, to each peer at most once a second.

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
from hocket.transport.address import bracketed, numeric_of, parts_of, stays_here, why_not
from hocket.transport.authenticator import HANDSHAKE_FAILED, Authenticator
from hocket.transport.frame import NO_JOB, Envelope, Frame, Kind, Refused, pack, unpack
from hocket.transport.keys import Keys
from hocket.transport.link_socket import LinkSocket

MOST_BYTES = 1 << 26
HIGH_WATER = 16
RECONNECT_S = 0.1
RECONNECT_MOST_S = 1.0
CONNECT_S = 2.0
"""How long one try to connect may take: the system itself would try for two minutes, with pauses that double."""
LINGER_S = 1.0
"""How long ``close`` waits until queued messages are sent."""
ANSWER_EVERY_S = 1.0
_MOST_ANSWERED = 4096
_SHUT_OUT = 3
_SPARE = 64
"""How many refused messages ``receive`` discards after its time is up, so that a flood does not hide the messages behind it."""


class Listener:
    """The end to which many callers connect, bound to ``address``, such as ``tcp://127.0.0.1:0``; port 0 takes any free one.

    ``address`` then has the actual port. An address that other machines can reach needs keys. ``socket`` is for polling.
    """

    def __init__(
        self, address: str, job: bytes, keys: Keys | None = None, most_bytes: int = MOST_BYTES, high_water: int = HIGH_WATER
    ) -> None:
        host, port = parts_of(address)
        numeric = numeric_of(host)
        if keys is None and not stays_here(numeric):
            raise HocketError(
                f"{address} can be reached from other machines and would accept any peer: make keys with `hocket keys FILE`."
            )
        self._job, self._most = job, most_bytes
        self._refused: Counter[str] = Counter()
        self._answered: OrderedDict[bytes, float] = OrderedDict()
        self._authenticator: Authenticator | None = None
        self._link_socket = LinkSocket(zmq.ROUTER, job, most_bytes, high_water, ":" in numeric)
        self.socket = self._link_socket.socket
        try:
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error, not a silent drop, when a peer is gone or slow
            self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # the connection of a caller that returns replaces its dead one
            if keys is not None:
                self._authenticator = Authenticator(self._link_socket.context, self.socket, keys)
            self.socket.bind(f"tcp://{bracketed(numeric)}:{port}")
        except zmq.ZMQError as error:
            self.close(0)
            raise HocketError(why_not(address, error)) from None
        self.address: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def refused(self) -> Counter[str]:
        """How many messages (and, under ``key``, connections) were refused, by reason; a copy."""
        counts = self._refused.copy()
        if self._authenticator is not None and self._authenticator.rejected:
            counts["key"] = self._authenticator.rejected
        return counts

    def receive(self, timeout_s: float) -> tuple[bytes, Envelope] | None:
        """The next message and who sent it, or None when the time is up."""
        deadline, spare = time.monotonic() + timeout_s, _SPARE
        while (frames := self._link_socket.take(deadline)) is not None:
            peer = bytes(frames[0])
            try:
                return peer, unpack(frames[1:], self._job, self._most)
            except Refused as refusal:
                self._reject(peer, refusal)
            spare -= time.monotonic() >= deadline
            if spare <= 0:
                break
        return None

    def send(self, peer: bytes, envelope: Envelope) -> bool:
        """Queue a message; False when the peer is gone or its queue is full. Do not write to its tensors afterwards."""
        return self._queue(peer, pack(envelope, self._job))

    def close(self, linger_s: float = LINGER_S) -> None:
        """Close and free the port, after waiting at most ``linger_s`` until queued messages are sent."""
        self._link_socket.close(linger_s)
        if self._authenticator is not None:
            self._authenticator.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(LINGER_S if error is None else 0)

    def _queue(self, peer: bytes, frames: list[Frame]) -> bool:
        try:
            return self._link_socket.put([peer, *frames], 3, 0)
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return False
            raise

    def _reject(self, peer: bytes, refusal: Refused) -> None:
        self._refused[refusal.reason] += 1
        now = time.monotonic()
        while self._answered and now - next(iter(self._answered.values())) >= ANSWER_EVERY_S:
            self._answered.popitem(last=False)
        if peer in self._answered or len(self._answered) >= _MOST_ANSWERED:
            return
        self._answered[peer] = now
        metadata = {"reason": refusal.reason, "sentence": str(refusal)}
        self._queue(peer, pack(Envelope(Kind.REFUSAL, metadata=metadata), NO_JOB))


class Caller:
    """The end that connects to a listener, and connects again whenever the connection breaks.

    The listener identifies it by ``identity`` (random when None), also after a new connection. ``refused`` counts invalid messages
    from the listener by reason, and under ``key`` failed authentications.

    After an interruption TCP retries with pauses that double, so it may notice the end of a long interruption late. With
    ``redial_s`` a connection without acknowledgements for so long is replaced by a new one; messages in flight are lost, so use it
    where requests are repeated. On Linux a listener that reads nothing for so long counts as disconnected, too.
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
            raise HocketError(f"{address} names no port: use the listener's own address attribute.")
        numeric = numeric_of(host)
        if keys is None and not stays_here(numeric):
            raise HocketError(
                f"{address} is on another machine, and without keys anyone on the way could answer: use the keys of the job."
            )
        self.identity = b"c" + secrets.token_bytes(8) if identity is None else identity
        if not 1 <= len(self.identity) <= 255 or self.identity[0] == 0:
            raise HocketError(f"An identity has 1 to 255 bytes and does not begin with zero, got {self.identity!r}.")
        self.address, self._job, self._most = address, job, most_bytes
        self.refused: Counter[str] = Counter()
        self._link_socket = LinkSocket(zmq.DEALER, job, most_bytes, high_water, ":" in numeric)
        self.socket = self._link_socket.socket
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
            # By name: the address of a listener that moves to another machine is looked up again.
            self.socket.connect(f"tcp://{bracketed(host)}:{port}")
        except zmq.ZMQError as error:
            self.close(0)
            raise HocketError(why_not(address, error)) from None

    def send(self, envelope: Envelope, timeout_s: float) -> bool:
        """Queue a message; False when the queue stays full. Do not write to its tensors afterwards."""
        if self._link_socket.put(pack(envelope, self._job), 2, timeout_s):
            return True
        self._count_failed_handshakes()
        return False

    def receive(self, timeout_s: float) -> Envelope | None:
        """The next message, or None when the time is up."""
        deadline, spare = time.monotonic() + timeout_s, _SPARE
        while (frames := self._link_socket.take(deadline)) is not None:
            try:
                return self._open(frames)
            except Refused as refusal:
                self.refused[refusal.reason] += 1
            spare -= time.monotonic() >= deadline
            if spare <= 0:
                break
        self._count_failed_handshakes()
        return None

    def shut_out(self) -> bool:
        """Whether handshakes fail again and again: the listener does not know our key, or we do not know its.

        One also fails where the listener dies during it.
        """
        self._count_failed_handshakes()
        return self.refused["key"] >= _SHUT_OUT

    def close(self, linger_s: float = LINGER_S) -> None:
        """Close, after waiting at most ``linger_s`` until queued messages are sent."""
        self._events.close(0)
        self._link_socket.close(linger_s)

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
            envelope = unpack(frames, NO_JOB, self._most)  # a refusal does not contain the job's id
            if envelope.kind != Kind.REFUSAL:
                raise
            return envelope

    def _count_failed_handshakes(self) -> None:
        """Count the handshakes that failed since the last call."""
        while self._events.poll(0):
            self._events.recv_multipart()
            self.refused["key"] += 1
