"""Shard servers behind real links, in one thread of the test's own process."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Self

from hocket.cluster.layout import Layout
from hocket.drivers.server_runtime import ServerRuntime
from hocket.drivers.snapshots import Snapshots
from hocket.drivers.sockets import SocketDriver
from hocket.programs.base import Address, Effects
from hocket.programs.server.requests import WorkerConfig
from hocket.programs.server.shard_server import ShardServer
from hocket.strategy import Strategy
from hocket.transport import Envelope, Listener

JOB = bytes(range(16))


class WatchedServer(ShardServer):
    """Every message goes through :meth:`ShardServers.handle`."""

    def __init__(self, owner: ShardServers, place: int, **options: Any) -> None:
        super().__init__(place, **options)
        self._owner = owner

    def message(self, sender: Address, message: Envelope, now: float) -> Effects:
        assert isinstance(sender, bytes)
        return self._owner.handle(self.place, sender, message, now)

    def take(self, sender: bytes, message: Envelope, now: float) -> Effects:
        """What a shard server does with a message."""
        return super().message(sender, message, now)


class ShardServers:
    """``count`` of them; what comes to one is handled under ``lock``, by :meth:`handle`."""

    def __init__(self, count: int) -> None:
        self.listeners = [Listener("tcp://127.0.0.1:0", JOB) for _ in range(count)]
        self.drivers = [self.driver(place) for place in range(count)]
        self.lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def driver(self, place: int, snapshots: Snapshots | None = None, **options: Any) -> SocketDriver:
        server = WatchedServer(self, place, **options)
        driver = SocketDriver(server, listener=self.listeners[place], snapshots=snapshots)
        driver.carry_out(server.start(time.monotonic(), None if snapshots is None else snapshots.load()))
        return driver

    @property
    def servers(self) -> list[WatchedServer]:
        return [driver.program for driver in self.drivers]  # type: ignore[misc]

    @property
    def addresses(self) -> Sequence[str]:
        return [listener.address for listener in self.listeners]

    def handle(self, place: int, sender: bytes, message: Envelope, now: float) -> Effects:
        return self.servers[place].take(sender, message, now)

    def tell(self, place: int, sender: bytes, message: Envelope) -> None:
        """Another process sends a message to a server."""
        self.drivers[place].carry_out(self.servers[place].take(sender, message, time.monotonic()))

    def runtime(self, strategy: str, layout: Layout, worker: int, world: int, **options: Any) -> ServerRuntime:
        """A worker's side of these servers."""
        return ServerRuntime(self.addresses, JOB, WorkerConfig(Strategy.parse(strategy), layout, worker, world, **options))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for listener in self.listeners:
            listener.close()

    def _serve(self) -> None:
        while not self._over.is_set():
            for place in range(len(self.listeners)):
                with self.lock:
                    self.drivers[place].poll(0.005)
                time.sleep(0.0005)  # for those who wait for the lock
