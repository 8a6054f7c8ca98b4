"""Made-up bytes against what listens and is no program: part of benchmarks/fuzz_messages.py.

- The agents of a launcher's job (:mod:`hocket.drivers.store_agents`) read what anybody has put into the job's store: orders that
  the first process has not signed start nothing, and whatever stands there ends in one sentence.
- The exit of a tunnel gets messages of those who have the keys, and bytes of those who have not.
- The page of ``hocket watch`` gets requests of HTTP.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
import zmq

from hocket.drivers import store_agents
from hocket.drivers.store_agents import StoreAgent, StoreMachines, job_secret
from hocket.errors import HocketError
from hocket.report.server import Server, _Handler
from hocket.transport import Keys
from hocket.transport.tunnel import Tunnel

SECRET = b"only the job's"
ODD = (
    b"",
    b"\xff\xfe",
    b"\x00",
    b"9" * 40,
    b"-1",
    b"null",
    b"[]",
    b"{}",
    b'{"a": 1}',
    b"[1, 2]",
    b"[" * 5000,
    b"1e999",
    "é".encode(),
    b"x" * 70_000,
)


def spoilt(dice: random.Random, content: bytes) -> bytes:
    """The same bytes with something else in them."""
    changed = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        at, choice = dice.randrange(len(changed) + 1), dice.randrange(6)
        if choice == 0:
            del changed[at : at + dice.randint(1, 20)]
        elif choice == 1:
            changed[at:at] = dice.randbytes(dice.choice((1, 5, 300)))
        elif choice == 2:
            changed[at:at] = dice.choice(ODD)
        elif choice == 3:
            changed[at:at] = changed[: dice.randint(0, 50)]
        elif at < len(changed):
            changed[at] = dice.randrange(256)
    return bytes(changed)


class Bytes(ABC):
    """A listener of bytes."""

    name = ""

    def __init__(self) -> None:
        self.found, self.crashes, self.sent = Counter[str](), list[str](), 0

    @abstractmethod
    def fuzz(self, count: int, seed: int) -> None:
        """Hand it so many."""

    def told(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in sorted(self.found.items()))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """What is raised here is a crash, but for a sentence to people."""
        try:
            yield
        except HocketError:
            self.found["refused"] += 1
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.crashes.append(f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}: {str(error)[:120]}")


class Agents(Bytes):
    """An agent and the first process, whose store others write into."""

    name = "agents of a launcher's job"

    def fuzz(self, count: int, seed: int) -> None:
        dice, store, carried = random.Random(f"{self.name} {seed}"), dist.HashStore(), list[Any]()
        agent = StoreAgent(store, 1, "127.0.0.1", SECRET)
        own = StoreAgent(store, 0, "127.0.0.1", SECRET).agent
        agent._carry_out = lambda *order: bool(carried.append(order))  # type: ignore[method-assign,func-returns-value]
        machines = StoreMachines(store, 2, own, SECRET)
        process = machines.start(1, ["-m", "hocket.drivers.shard_process"], {})
        (key,), right = ["order/1/0"], store.get("order/1/0")
        place = store.get("place/1")
        try:
            for _ in range(count):
                self.sent += 1
                self._attempt(dice, store, agent, machines, process, key, right)
                if carried:
                    self.crashes.append(f"an order was carried out that nobody has signed: {carried}")
                    return
                store.set("place/1", place)
            store.set(key, right)
            with self.watched():
                agent.turn(0.0)
            if len(carried) != 1:
                self.crashes.append("a right order was not carried out")
        finally:
            agent.agent.shutdown()
            own.shutdown()

    def _attempt(
        self, dice: random.Random, store: Any, agent: StoreAgent, machines: StoreMachines, process: Any, key: str, right: bytes
    ) -> None:
        choice = dice.randrange(5)
        junk = dice.choice(ODD) if dice.random() < 0.3 else dice.randbytes(dice.randint(1, 60))
        if choice < 2:
            text = junk if dice.random() < 0.2 else spoilt(dice, right)
            if text != right:
                store.set(key, text)
                with self.watched():
                    agent.turn(0.0)
                    self.found["taken"] += 1
        elif choice == 2:
            store.set("place/1", junk if dice.random() < 0.3 else spoilt(dice, store.get("place/1")))
            with self.watched():
                store_agents._place(store, 1)
                self.found["taken"] += 1
        elif choice == 3:
            name = process._name
            store.set(f"line/{name}/{len(process._known)}", junk)
            store.set(f"ended/{name}", dice.choice((junk, b"0", b"-9")))
            with self.watched():
                process.look()
                self.found["taken"] += 1
            process._known.clear()
            for used in (f"ended/{name}", f"line/{name}/0"):
                store.delete_key(used)
        else:
            store.set("secret", dice.choice((junk, b"/tmp/hocket-none", b"/dev/null", b"/tmp", b"/tmp/hocket-\x00")))
            with self.watched(), job_secret(store, 1, None):
                self.crashes.append("a secret was read from a file that is none")


class TunnelExit(Bytes):
    """The exit of a tunnel to a server that gives back what it gets."""

    name = "tunnel"

    def fuzz(self, count: int, seed: int) -> None:
        dice, keys = random.Random(f"{self.name} {seed}"), Keys.make()
        failed = list[str]()
        hook, threading.excepthook = (
            threading.excepthook,
            lambda raised: failed.append(f"{raised.exc_type.__name__}: {raised.exc_value}"),
        )
        try:
            with _Echo() as echo:
                address = Tunnel(keys).serve("tcp://127.0.0.1:0", echo.port)
                self._flood(dice, keys, address, count)
                entrance = Tunnel(keys).enter(address)
                with socket.create_connection(("127.0.0.1", entrance), 20) as client:
                    client.sendall(b"right")
                    if client.recv(5, socket.MSG_WAITALL) != b"right":
                        self.crashes.append("a right connection was not carried")
        except OSError as error:
            self.crashes.append(f"a right connection was not carried: {error}")
        finally:
            threading.excepthook = hook
        self.crashes += failed

    def _flood(self, dice: random.Random, keys: Keys, address: str, count: int) -> None:
        names = [b"n%d" % k for k in range(20)]
        where = urlsplit(address)
        with zmq.Context() as context:
            dealer = Tunnel(keys)._dealer(context, address)
            dealer.setsockopt(zmq.SNDHWM, 1000)
            dealer.setsockopt(zmq.SNDTIMEO, 20_000)
            dealer.setsockopt(zmq.LINGER, 5000)
            dealer.connect(address)
            for k in range(count):
                self.sent += 1
                name = dice.choice(names)
                odd = (
                    [name],
                    [b"", b"x"],
                    [name, b"x", b"y"],
                    [dice.randbytes(300), b"x"],
                    [b"x" * 70_000, b"x"],
                    [b""],
                    [b""] * 3,
                )
                frames = dice.choice(([name, dice.randbytes(dice.randint(0, 300))], [name, b""], dice.choice(odd)))
                dealer.send_multipart(frames)
                self.found["messages"] += 1
                while dealer.poll(0):
                    dealer.recv_multipart()
                if k % 200 == 0:
                    self.found["connections without keys"] += 1
                    with contextlib.suppress(OSError), socket.create_connection((where.hostname, where.port), 5) as raw:
                        raw.sendall(dice.choice((b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03", dice.randbytes(200))))
            dealer.close()


class _Echo:
    """A server that gives back what it gets."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._server.getsockname()[1]

    def __enter__(self) -> _Echo:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._give_back, args=(self._server.accept()[0],), daemon=True).start()

    def _give_back(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            while data := client.recv(4096):
                client.sendall(data)


class _Page:
    """Stands for the page; its files are no messages."""

    closed = False

    def html(self) -> str:
        return "<p>the page</p>"

    def wait(self, version: int, seconds: float) -> tuple[int, str]:
        return version + 1, json.dumps({})

    def follow(self) -> None:
        """Nothing changes."""

    def close(self) -> None:
        self.closed = True


class WatchPage(Bytes):
    """The server of ``hocket watch``; a share of the requests comes over real connections."""

    name = "page of hocket watch"
    RIGHT = (
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1:8765\r\n\r\n",
        b"GET /events HTTP/1.1\r\nHost: localhost:8765\r\nAccept: text/event-stream\r\nLast-Event-ID: 3\r\n\r\n",
        b"GET /?a=b HTTP/1.0\r\nHost: [::1]:8765\r\n\r\n",
        b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc",
    )
    PIECES = (
        *(
            b"\r\n",
            b"\r",
            b"\n",
            b"Host: ",
            b"Host: [",
            b"Host: [::1",
            b"Host: 0x7f.1",
            b"Host: localhost@evil",
            b"GET ",
            b"HTTP/9.9",
        ),
        *(b"//", b"/../", b"%00", b":", b"HTTP/1.1\r\n" * 3, b"X: y\r\n" * 200, b"A" * 70_000, b"Host: " + b"a" * 66_000),
        *(b"Expect: 100-continue\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n", b"/events"),
    )

    def fuzz(self, count: int, seed: int) -> None:
        dice = random.Random(f"{self.name} {seed}")
        page: Any = _Page()
        with _Watched(page, self) as server:
            for k in range(count):
                self.sent += 1
                request = self._request(dice)
                if k % 50 == 0:
                    self._over_connection(server, request)
                else:
                    self._in_process(server, request)
            self._still_serves(server)

    def _request(self, dice: random.Random) -> bytes:
        request = dice.choice(self.RIGHT)
        if dice.random() < 0.6:
            at = dice.randrange(len(request))
            request = request[:at] + dice.choice(self.PIECES) + request[at:]
        return request if dice.random() < 0.1 else spoilt(dice, request)

    def _in_process(self, server: Server, request: bytes) -> None:
        """The handler of one request, on a connection of this process."""
        client, served = socket.socketpair()
        with client, served:
            for end in (client, served):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            if b"events" in request:  # a stream goes on until its client is gone
                client.close()
            with self.watched(), contextlib.suppress(OSError):
                _Handler(served, ("127.0.0.1", 1), server)
            served.shutdown(socket.SHUT_RDWR) if served.fileno() >= 0 else None
            with contextlib.suppress(OSError):
                answer = client.recv(12)
                self.found[answer[9:].decode() if answer.startswith(b"HTTP/1.") else "without a status" if answer else "none"] += 1

    def _over_connection(self, server: Server, request: bytes) -> None:
        with contextlib.suppress(OSError), socket.create_connection(server.server_address[:2], 5) as client:
            client.sendall(request)
        self.found["over a connection"] += 1

    def _still_serves(self, server: Server) -> None:
        with socket.create_connection(server.server_address[:2], 20) as client:
            client.sendall(self.RIGHT[0])
            if b" 200 " not in client.recv(100):
                self.crashes.append("a right request was not answered")


class _Watched(Server):
    """Serves in a thread, and notes what goes wrong in a request."""

    def __init__(self, page: Any, owner: Bytes) -> None:
        super().__init__(page, port=0)
        self._owner = owner
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        with self._owner.watched(), contextlib.suppress(OSError):
            raise

    def server_close(self) -> None:
        self.shutdown()
        super().server_close()
