"""A tunnel between the loopbacks of two machines, over a keyed link: for torch's store, which accepts any connection.

The store listens on its machine's loopback only. Beside it is the exit of the tunnel, a ZeroMQ socket that admits callers with the
job's keys alone; every other process has an entrance, a port of its own loopback. A connection to an entrance becomes one from the
exit to the store, and the bytes of both directions travel encrypted:

    client → [entrance] ═══ DEALER, CURVE ═══ ROUTER [exit] → store

A message on the link is the connection's name and some bytes; none at all say that the connection is closed. If the link breaks,
all connections through it are closed, as they would be without a tunnel.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from hocket.errors import HocketError
from hocket.transport.address import bracketed, numeric_of, parts_of, why_not
from hocket.transport.authenticator import Authenticator
from hocket.transport.frame import FRAME_BYTES
from hocket.transport.keys import Keys

_IDENTITY_BYTES = 9
_NAME_BYTES = 64
"""Of a connection: a peer's identity, and what its socket names the connection."""
_LOOPBACK = "tcp://127.0.0.1"


class Tunnel:
    """Opens ends of tunnels, authenticated by ``keys``; they last as long as the process."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    @classmethod
    def with_keys(cls, path: Path) -> Tunnel:
        return cls(Keys.read(path))

    def serve(self, address: str, port: int) -> str:
        """An exit at ``address`` (``tcp://HOST:PORT``, port 0 for any free one) to ``port`` of this loopback; where it listens."""
        host, own = parts_of(address)
        context = zmq.Context(io_threads=1)
        router, stream = _socket(context, zmq.ROUTER, ":" in host), _socket(context, zmq.STREAM)
        router.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)
        stream.setsockopt(zmq.RECONNECT_IVL, -1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        Authenticator(context, router, self._keys)
        try:
            router.bind(f"tcp://{bracketed(numeric_of(host))}:{own}")
        except zmq.ZMQError as error:
            raise HocketError(why_not(address, error)) from None
        listens = router.getsockopt_string(zmq.LAST_ENDPOINT)
        _forward(_Exit(router, stream, f"{_LOOPBACK}:{port}"), {router: "from_link", stream: "from_stream"})
        return listens

    def reaches(self, address: str, within_s: float) -> bool:
        """Whether an exit with the same keys listens at ``address``: an entrance would wait for one for ever."""
        with zmq.Context(io_threads=1) as context, self._dealer(context, address) as dealer:
            let_in = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            dealer.connect(address)
            found = bool(let_in.poll(int(within_s * 1000)))
            dealer.disable_monitor()
            let_in.close(0)
            return found

    def enter(self, address: str) -> int:
        """A port of this loopback that leads to the exit at ``address``."""
        context = zmq.Context(io_threads=1)
        dealer, stream = self._dealer(context, address), _socket(context, zmq.STREAM)
        broken = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stream.bind(f"{_LOOPBACK}:*")
        dealer.connect(address)
        end = _Entrance(dealer, stream)
        _forward(end, {dealer: "from_link", stream: "from_stream", broken: "link_broke"})
        return parts_of(stream.getsockopt_string(zmq.LAST_ENDPOINT))[1]

    def _dealer(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> Any:
        """A socket connected to the exit at ``address`` with the keys."""
        dealer = _socket(context, zmq.DEALER, ":" in numeric_of(parts_of(address)[0]))
        dealer.setsockopt(zmq.ROUTING_ID, b"t" + secrets.token_bytes(_IDENTITY_BYTES - 1))
        dealer.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server_public.encode())
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.worker_public.encode())
        dealer.setsockopt(zmq.CURVE_SECRETKEY, self._keys.worker_secret.encode())
        return dealer


class _Entrance:
    """Clients connect to ``stream``; a client's first and last message there is empty, and so is what closes its connection."""

    def __init__(self, dealer: Any, stream: Any) -> None:
        self._dealer, self._stream = dealer, stream
        self._open: set[bytes] = set()

    def from_stream(self, name: bytes, data: bytes) -> None:
        if not data and name not in self._open:
            self._open.add(name)
            return
        if not data:
            self._open.discard(name)
        self._dealer.send_multipart([name, data])

    def from_link(self, name: bytes, data: bytes) -> None:
        if name in self._open:
            self._stream.send_multipart([name, data])

    def link_broke(self, *_: bytes) -> None:
        for name in self._open:
            with contextlib.suppress(zmq.ZMQError):
                self._stream.send_multipart([name, b""])


class _Exit:
    """Connects ``stream`` to ``target`` for each connection that comes through ``router``."""

    def __init__(self, router: Any, stream: Any, target: str) -> None:
        self._router, self._stream, self._target = router, stream, target
        self._open: dict[bytes, bool] = {}
        """Connections by peer and name, and whether they have come about."""

    def from_link(self, peer: bytes, name: bytes, data: bytes) -> None:
        name = peer + name
        if name not in self._open and data and len(name) <= _NAME_BYTES:
            self._stream.setsockopt(zmq.CONNECT_ROUTING_ID, name)
            self._stream.connect(self._target)
            self._open[name] = False
        if name in self._open:
            self._stream.send_multipart([name, data])

    def from_stream(self, name: bytes, data: bytes) -> None:
        if not data and not self._open.get(name, True):
            self._open[name] = True
            return
        if not data:
            self._open.pop(name, None)
        self._router.send_multipart([name[:_IDENTITY_BYTES], name[_IDENTITY_BYTES:], data])


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, six: bool = False) -> zmq.Socket[bytes]:
    """A socket with unbounded queues: only peers with keys reach it, and a stream must not lose bytes."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.IPV6, six)
    return socket


def _forward(end: Any, sockets: dict[zmq.Socket[bytes], str]) -> None:
    """Hand what arrives at ``sockets`` to these methods of ``end``, in a thread, until the process ends."""
    handlers: dict[Any, Callable[..., None]] = {socket: getattr(end, name) for socket, name in sockets.items()}
    poller = zmq.Poller()
    for socket in handlers:
        poller.register(socket, zmq.POLLIN)

    def run() -> None:
        while True:
            for socket, _ in poller.poll():
                frames = socket.recv_multipart()
                with contextlib.suppress(zmq.ZMQError, TypeError):  # the peer is gone, or the message is empty
                    handlers[socket](*frames)

    threading.Thread(target=run, name="hocket-tunnel", daemon=True).start()
