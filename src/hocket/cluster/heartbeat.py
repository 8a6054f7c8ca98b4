"""Who is still there: each process leaves a beat in the job's store; who falls silent is named.

Gloo tells only a dead process's ring neighbours, and only that *a* connection closed; a stopped process is noticed at the timeout.
So each process writes a counter twice a second and watches that of the process before it; the first to find a silent one writes its
name where all look. A process that finds the name while it is stuck in a collective says so and ends itself: Gloo cannot abort.

The store is reached over a connection of its own, in a thread of its own: a stopped process may be the one that keeps it, and a
request to it then never returns. Process 0, which may keep it, leaves last, also when all end because of another.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hocket.errors import WorkerLost

_BEAT_S = 0.5
_GRACE_S = 3.0


def boot_id() -> str:
    """Equal on two processes that share a kernel, and so a monotonic clock."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else os.uname().nodename


class Heartbeat:
    """Beats and watches in a thread of its own until :meth:`stop`."""

    def __init__(self, rank: int, processes: int, hosting: list[range], liveness_timeout_s: float) -> None:
        self.rank, self.processes, self.hosting, self.liveness_timeout_s = rank, processes, hosting, liveness_timeout_s
        self._stop = threading.Event()
        self._gone: int | None = None
        self._told = False
        self._rounds = 0
        self._threads: list[threading.Thread] = []
        self._store: Any = None
        if processes > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            store = store.clone()
            store.set_timeout(timedelta(seconds=liveness_timeout_s))
            self._store = dist.PrefixStore(f"hocket/{_generation()}", store)
            self._store.set(f"beat/{rank}", "0")
            for work, name in ((self._beat, "hocket-heartbeat"), (self._watch, "hocket-watch")):
                self._threads.append(threading.Thread(target=work, name=name, daemon=True))
                self._threads[-1].start()
            atexit.register(self._at_exit)

    def stop(self) -> None:
        """Leave in good order: this process will no longer be missed."""
        if self._store is None or self._stop.is_set():
            return
        self._stop.set()
        with contextlib.suppress(RuntimeError):  # the store may have gone first
            self._store.set(f"left/{self.rank}", "1")
        self._join()

    def _join(self) -> None:
        """Threads must not wake from torch while the interpreter is taken down: that would abort the process."""
        for thread in self._threads:
            thread.join(timeout=2 * _BEAT_S)

    def explain(self, error: BaseException) -> BaseException:
        """Turn a collective's failure into a :class:`WorkerLost` that names who is gone, as far as can be told."""
        if self._store is None:
            return error
        text = str(error).splitlines()[0]
        if not any(sign in text.lower() for sign in ("connection", "peer", "timed out", "timeout", "socket", "broken pipe")):
            return error
        gone = self._find()
        self._told = True
        if gone is not None:
            self._tell(gone)
            return WorkerLost(self._sentence(gone), self.hosting[gone].start if gone >= 0 else -1)
        return WorkerLost(f"An exchange failed and no process could be named as lost ({text}); see the other processes' output.")

    def _find(self) -> int | None:
        """Who is gone, after a collective has failed: whoever was named, is silent, or has left; −1 for the keeper of the store."""
        others = [rank for rank in range(self.processes) if rank != self.rank]
        seen: dict[int, tuple[bytes, float]] = {}
        start = time.monotonic()
        while (now := time.monotonic()) - start < self.liveness_timeout_s + 2:
            try:
                gone = self._named()
                if gone is None:
                    gone = self._silent(others, 5 * _BEAT_S, seen)
                if gone is None and now - start > 6 * _BEAT_S:
                    gone = next((rank for rank in others if self._has_left(rank)), None)
                    if gone is not None:
                        gone = self._name(gone)
            except RuntimeError:
                gone = -1 if self._gone is None else self._gone
            if gone is not None:
                return gone
            time.sleep(_BEAT_S / 5)
        return None

    def _sentence(self, gone: int) -> str:
        hosted = self.hosting[max(gone, 0)]
        who = f"Worker {hosted.start}" if len(hosted) == 1 else f"Workers {hosted.start} to {hosted.stop - 1}"
        which = f"{who} (process {gone})" if gone >= 0 else f"{who} (process 0), or the launcher if it keeps the job's store,"
        return f"{which} died, ended early or stopped answering; the others cannot go on and end. Restart from a checkpoint."

    def _beat(self) -> None:
        """Beat, and look for who is gone."""
        seen: dict[int, tuple[bytes, float]] = {}
        while not self._stop.wait(_BEAT_S):
            self._rounds += 1
            try:
                self._store.set(f"beat/{self.rank}", str(self._rounds))
                if self._named() is None:
                    self._silent(self._watched(), self.liveness_timeout_s, seen)
            except RuntimeError:
                self._gone = -1 if self._gone is None else self._gone
            if self._gone is not None:
                return

    def _watch(self) -> None:
        """End this process, if the main thread does not do so by itself: some time after somebody was found gone.

        The main thread gets a moment to end with the same sentence; once told, it may take its time to save.
        """
        rounds, stuck, grace = 0, 0.0, _GRACE_S
        while not self._stop.wait(_BEAT_S):
            stuck = stuck + _BEAT_S if self._rounds == rounds else 0.0
            rounds = self._rounds
            if stuck > self.liveness_timeout_s and self._gone is None:
                self._gone = -1
            if self._gone is None:
                continue
            grace -= _BEAT_S
            if self._told:
                return
            if grace <= 0:
                print(f"hocket: {self._sentence(self._gone)}", file=sys.stderr, flush=True)
                self._tell(self._gone)
                os._exit(1)

    def _tell(self, gone: int) -> None:
        """Process 0 waits until everybody else knows, since the store may end with it."""
        deadline = time.monotonic() + _GRACE_S
        with contextlib.suppress(RuntimeError):
            while self.rank == 0 and gone >= 0 and time.monotonic() < deadline:
                others = [rank for rank in range(1, self.processes) if rank != gone and not self._has_left(rank)]
                if all(self._store.check([f"told/{rank}"]) for rank in others):
                    return
                time.sleep(_BEAT_S / 5)

    def _watched(self) -> list[int]:
        """The nearest process before this one that has not left."""
        before = ((self.rank - k) % self.processes for k in range(1, self.processes))
        return next(([rank] for rank in before if not self._has_left(rank)), [])

    def _named(self) -> int | None:
        if self._gone is None and self._store.check(["gone"]):
            self._gone = int(self._store.get("gone"))
            self._store.set(f"told/{self.rank}", "1")
        return self._gone

    def _has_left(self, rank: int) -> bool:
        return bool(self._store.check([f"left/{rank}"]))

    def _silent(self, ranks: list[int], liveness_timeout_s: float, seen: dict[int, tuple[bytes, float]]) -> int | None:
        """A process whose counter has stood still for ``liveness_timeout_s`` (and announce it); ``seen`` is kept between calls."""
        for rank in ranks:
            if self._has_left(rank):
                continue
            beat = self._store.get(f"beat/{rank}") if self._store.check([f"beat/{rank}"]) else b""
            now = time.monotonic()
            value, since = seen.get(rank, (None, now))
            if value != beat:
                seen[rank] = (beat, now)
            elif now - since > liveness_timeout_s:
                return self._name(rank)
        return None

    def _name(self, rank: int) -> int:
        """Write down who is gone, unless somebody was named before."""
        if not self._store.check(["gone"]):
            self._store.set("gone", str(rank))
        found = self._named()
        return rank if found is None else found

    def _at_exit(self) -> None:
        """Leave, unless the program died of an exception: then the others are to notice. Process 0 sees everybody off."""
        if hasattr(sys, "last_value"):
            self._stop.set()
            self._join()
            return
        self.stop()
        seen: dict[int, tuple[bytes, float]] = {}
        with contextlib.suppress(RuntimeError):  # the launcher kept the store, and it is gone
            while self.rank == 0 and not self._told:
                here = [rank for rank in range(1, self.processes) if not self._has_left(rank)]
                if not here or self._named() is not None or self._silent(here, self.liveness_timeout_s, seen) is not None:
                    break
                time.sleep(_BEAT_S / 5)


_generations = 0


def _generation() -> int:
    """Clusters follow one another in one job; each has its own names in the store."""
    global _generations
    _generations += 1
    return _generations
