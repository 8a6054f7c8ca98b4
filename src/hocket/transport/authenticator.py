"""Authentication of callers: only peers that hold the job's worker key may connect; all others are counted.

ZeroMQ asks about each key over its authentication protocol (ZAP, rfc.zeromq.org/spec/27) and waits for the answer. A thread of its
own answers, since the listener's thread may be computing. If the thread dies, no peer can connect.
"""

from __future__ import annotations

import threading

import zmq
from zmq.utils import z85

from hocket.transport.keys import Keys

_DOMAIN = b"hocket"
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""The events of a socket's monitor for peers without a key, with a wrong key, or with another protocol."""


class Authenticator:
    """Checks keys for a socket that is about to be bound; ``rejected`` counts unauthenticated connections."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], keys: Keys) -> None:
        self.rejected = 0
        self._admitted = z85.decode(keys.worker_public.encode())
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer no peer is admitted
        self._questions = context.socket(zmq.REP)
        self._questions.linger = 0
        self._questions.bind("inproc://zeromq.zap.01")
        # Wrong keys are counted where they are denied; the monitor reports peers that sent no key.
        self._events = socket.get_monitor_socket(HANDSHAKE_FAILED & ~zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._thread = threading.Thread(target=self._run, name="hocket-authenticator", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread; it ends with the context."""
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
                        socket.recv_multipart()
                        self.rejected += 1
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
