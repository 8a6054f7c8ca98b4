"""Authentication of callers: only peers that hold the job's worker key may connect; all others are counted.

ZeroMQ asks about each key over its authentication protocol (ZAP, rfc.zeromq.org/spec/27) and waits for the answer. A thread of its
own answers, since the listener's thread may be computing. If the thread dies, no peer can connect.

What peers that have not shown a key can make the process hold is bounded in sum: ``MOST_UNKNOWN`` connections, each of one frame
(``FRAME_BYTES``), for ``HANDSHAKE_S`` at most. Connections beyond are cut at once; a peer with a key connects again.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import threading
import time
from collections import deque

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from hocket.transport.keys import Keys

HANDSHAKE_S = 10.0
MOST_UNKNOWN = 256
_DOMAIN = b"hocket"
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""The events of a socket's monitor for peers without a key, with a wrong key, or with another protocol."""


class Authenticator:
    """Checks keys for a socket that is about to be bound; ``rejected`` counts unauthenticated connections."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], keys: Keys) -> None:
        self.rejected = 0
        self._admitted = z85.decode(keys.worker_public.encode())
        self._unknown: deque[float] = deque()
        """When the connections that have shown no key yet were accepted."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer no peer is admitted
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        self._questions = context.socket(zmq.REP)
        self._questions.linger = 0
        self._questions.bind("inproc://zeromq.zap.01")
        self._events = socket.get_monitor_socket(HANDSHAKE_FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._thread = threading.Thread(target=self._run, name="hocket-authenticator", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread ends, which it does with the context."""
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._questions, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    if socket is self._questions:
                        self._answer(socket.recv_multipart())
                    else:
                        event = parse_monitor_message(socket.recv_multipart())
                        self._note(event["event"], event["value"], event["endpoint"])
        except zmq.ZMQError:  # the context ends
            pass
        finally:
            self._questions.close(0)
            self._events.close(0)

    def _answer(self, question: list[bytes]) -> None:
        version, request, domain, _, _, mechanism, *credentials = question
        right = domain == _DOMAIN and mechanism == b"CURVE" and credentials == [self._admitted]
        if not right:
            self.rejected += 1
        status, text = (b"200", b"OK") if right else (b"400", b"wrong key")
        self._questions.send_multipart([version, request, status, text, b"worker" if right else b"", b""])

    def _note(self, event: int, value: int, endpoint: bytes) -> None:
        """Follow how many connections have shown no key; after ``HANDSHAKE_S`` ZeroMQ itself has cut them."""
        now, unknown = time.monotonic(), self._unknown
        while unknown and now - unknown[0] > HANDSHAKE_S:
            unknown.popleft()
        if event == zmq.EVENT_ACCEPTED:
            if len(unknown) < MOST_UNKNOWN:
                unknown.append(now)
            else:
                _cut(value, endpoint)
        elif unknown:
            unknown.popleft()
        # Wrong keys are counted where they are denied.
        self.rejected += event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)


def _cut(descriptor: int, endpoint: bytes) -> None:
    """Shut a connection down that was accepted at ``endpoint``; ZeroMQ closes it. By now its number may be another's."""
    with contextlib.suppress(OSError), sockets.fromfd(descriptor, sockets.AF_INET, sockets.SOCK_STREAM) as connection:
        if str(connection.getsockname()[1]).encode() == endpoint.rpartition(b":")[2]:
            connection.shutdown(sockets.SHUT_RDWR)
