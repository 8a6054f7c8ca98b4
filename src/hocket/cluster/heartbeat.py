"""Who is still there: each process leaves a beat in the job's store; who falls silent is named.

Gloo tells only a dead process's ring neighbours, and only that *a* connection closed; a stopped process is noticed at the timeout.
So each process writes a counter every second, process 0 watches the counters, and the first to find a silent one writes its name
where all look. A process that finds the name while it is stuck in a collective says so and ends itself: Gloo cannot abort.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hocket.errors import WorkerLost

_BEAT_S = 0.5


def boot_id() -> str:
    """Equal on two processes that share a kernel, and so a monotonic clock."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else os.uname().nodename


class Heartbeat:
    """Beats and watches in a thread of its own until :meth:`stop`."""

    def __init__(self, rank: int, processes: int, hosting: list[range], patience_s: float) -> None:
        self.rank, self.processes, self.hosting, self.patience_s = rank, processes, hosting, patience_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None
        self._seen: dict[int, tuple[bytes | None, float]] = {}
        if processes > 1:
            self._store = dist.PrefixStore(f"hocket/{_generation()}", dist.distributed_c10d._get_default_store())
            self._store.set(f"beat/{rank}", "0")
            self._thread = threading.Thread(target=self._run, name="hocket-heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Leave in good order: this process will no longer be missed."""
        if self._thread is None or self._stop.is_set():
            return
        self._stop.set()
        try:
            self._store.set(f"left/{self.rank}", "1")
        except RuntimeError:
            pass  # The store went first: everybody is leaving.
        self._thread.join(timeout=5)

    def explain(self, error: BaseException) -> BaseException:
        """Turn a collective's failure into a :class:`WorkerLost` that names who is gone, as far as can be told."""
        if self._store is None:
            return error
        text = str(error).splitlines()[0]
        if not any(sign in text.lower() for sign in ("connection", "peer", "timed out", "timeout", "socket", "broken pipe")):
            return error
        deadline = time.monotonic() + self.patience_s + 2
        self._seen = {}
        while time.monotonic() < deadline:
            try:
                gone = self._named()
                if gone is None:
                    gone = self._silent(5 * _BEAT_S)
            except RuntimeError:
                gone = -1
            if gone is not None:
                return WorkerLost(self._sentence(gone), self.hosting[gone].start if gone >= 0 else -1)
            time.sleep(_BEAT_S / 5)
        return WorkerLost(f"An exchange failed and no process could be named as lost ({text}); see the other processes' output.")

    def _sentence(self, gone: int) -> str:
        if gone < 0:
            return "The process that keeps the job's store is gone (worker 0 died, or its host did); this worker ends too."
        hosted = self.hosting[gone]
        who = f"Worker {hosted.start}" if len(hosted) == 1 else f"Workers {hosted.start} to {hosted.stop - 1}"
        return f"{who} (process {gone}) died or stopped answering; the others cannot go on without it and end. Restart from a checkpoint."

    def _run(self) -> None:
        beats, found_at = 0, None
        while not self._stop.wait(_BEAT_S):
            beats += 1
            try:
                self._store.set(f"beat/{self.rank}", str(beats))
                gone = self._named()
                if gone is None and self.rank == 0:
                    gone = self._silent(self.patience_s)
            except RuntimeError:
                gone = -1
            if gone is not None:
                # Give the main thread a moment to end by itself with the same sentence.
                found_at = found_at or time.monotonic()
                if time.monotonic() - found_at > 3 and not self._stop.is_set():
                    print(f"hocket: {self._sentence(gone)}", file=sys.stderr, flush=True)
                    os._exit(1)

    def _named(self) -> int | None:
        return int(self._store.get("gone")) if self._store.check(["gone"]) else None

    def _silent(self, patience_s: float) -> int | None:
        """A process whose counter has stood still for ``patience_s`` (and announce it)."""
        now = time.monotonic()
        for rank in range(self.processes):
            if rank == self.rank or self._store.check([f"left/{rank}"]):
                continue
            beat = self._store.get(f"beat/{rank}") if self._store.check([f"beat/{rank}"]) else b""
            value, since = self._seen.get(rank, (None, now))
            if value != beat:
                self._seen[rank] = (beat, now)
            elif now - since > patience_s:
                self._store.set("gone", str(rank))
                return rank
        return None


_generations = 0


def _generation() -> int:
    """Clusters follow one another in one job; each has its own names in the store."""
    global _generations
    _generations += 1
    return _generations
