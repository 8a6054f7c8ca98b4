"""Signs of life of a worker: BEAT to every shard once a second, from a thread, for the worker itself may compute for long."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hocket.transport import Caller, Envelope, Kind

EVERY_S = 1.0


class Heartbeats:
    """Those of worker ``worker``, on ``callers`` of their own, for a link belongs to one thread."""

    def __init__(self, worker: int, callers: Sequence[Caller]) -> None:
        self._worker, self._callers, self._stopped = worker, callers, threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on."""
        self._thread = threading.Thread(target=self._beat, name="hocket-heartbeats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more; the links are closed."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        for caller in self._callers:
            caller.close(0)

    def _beat(self) -> None:
        while not self._stopped.wait(EVERY_S):
            for caller in self._callers:
                caller.send(Envelope(Kind.BEAT, self._worker), 0.0)
                caller.receive(0.0)  # whatever it is; nothing may lie there until the queue is full
