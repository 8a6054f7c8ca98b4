"""Desks of shards behind real links, in one thread of the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Self

from hocket.messages import Envelope, Listener
from hocket.server.desk import Desk

JOB = bytes(range(16))


class Desks:
    """``count`` of them; what comes to one is handled under ``lock``, by :meth:`handle`."""

    def __init__(self, count: int) -> None:
        self.listeners = [Listener("tcp://127.0.0.1:0", JOB) for _ in range(count)]
        self.desks = [self.desk(place) for place in range(count)]
        self.lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def desk(self, place: int) -> Desk:
        return Desk(self.listeners[place], place)

    @property
    def addresses(self) -> Sequence[str]:
        return [listener.address for listener in self.listeners]

    def handle(self, place: int, peer: bytes, message: Envelope) -> None:
        self.desks[place].handle(peer, message)

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
            for place, listener in enumerate(self.listeners):
                if (got := listener.receive(0.005)) is not None:
                    with self.lock:
                        self.handle(place, *got)
