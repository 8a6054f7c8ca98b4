"""Heartbeats: each process writes a counter to the job's store; a process whose counter stops is reported as lost. With the counter
goes where the process stands, for those who wait for it (:mod:`hocket.cluster.late`).

Gloo reports a dead process only to its ring neighbours, and only as a closed connection; a stopped process is noticed at the
timeout. So each process increments a counter twice a second and watches the counter of the process before it; the first to find one
that stopped writes that rank to the store, which all processes read. A process that reads the rank while it is blocked in a
collective prints the error and exits: Gloo cannot abort a collective.

The heartbeat uses its own connection to the store in its own thread: the stopped process may be the one that hosts the store, and a
request to it then never returns. Process 0, which may host the store, exits last, also when all exit because of another's loss.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hocket.cluster.late import SILENT_S, LateWatch
from hocket.cluster.progress import Progress, meeting_of
from hocket.errors import HocketError, WorkerLost

_BEAT_S = 0.5
_GRACE_S = 3.0
_PAUSE_S = 0.002
_TOGETHER_S = 1800.0
"""How long a worker waits for others where all must come together: as long as torch waits in a collective."""


def boot_id() -> str:
    """Equal on two processes that share a kernel, and so a monotonic clock."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else os.uname().nodename


class Heartbeat:
    """Increments and watches counters in threads of its own until :meth:`stop`."""

    def __init__(self, rank: int, processes: int, hosting: list[range], liveness_timeout_s: float) -> None:
        self.rank, self.processes, self.hosting, self.liveness_timeout_s = rank, processes, hosting, liveness_timeout_s
        self._stop = threading.Event()
        self._gone: int | None = None
        self._told = False
        self._rounds = 0
        self.progress = Progress()
        self.late = LateWatch(rank, hosting, self.progress)
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
        """Announce that this process has left, so that others do not report it as lost."""
        if self._store is None or self._stop.is_set():
            return
        self._stop.set()
        with contextlib.suppress(RuntimeError):  # the process that hosts the store may have exited first
            self._store.set(f"left/{self.rank}", "1")
        self._join()

    def wait_for_all(self, what: str, group: str, ranks: list[int]) -> None:
        """Wait until the processes of a group have all come to ``what``: the exchange of one that came alone would never end, or
        meet another one of the others.

        Warns after the liveness timeout; a refusal where one has ended without it or has come to something else. Nobody is waited
        for where heartbeats have been stopped: then nobody knows who has ended.
        """
        if self._store is None or self._stop.is_set():
            return
        track = self.progress.track(meeting_of(group), ranks)
        number = track.launch()
        track.wait(partial(self._meet, what, f"{track.name}/{number}", ranks), number, what)

    def _meet(self, what: str, key: str, ranks: list[int]) -> None:
        self._store.set(f"{key}/{self.rank}", what)
        begun, warned, missing = time.monotonic(), False, [other for other in ranks if other != self.rank]
        while missing := [other for other in missing if not self._store.check([f"{key}/{other}"])]:
            if self._gone is not None:
                raise WorkerLost(self._sentence(self._gone), self.hosting[max(self._gone, 0)].start)
            waited = time.monotonic() - begun
            gone = next((other for other in missing if self._has_left(other) and not self._store.check([f"{key}/{other}"])), None)
            rule = f"all workers must enter {what} together, so call it outside of `if rank == 0:`."
            late = f"Process {missing[0]} has not come to {what} for {waited:.0f} s: {rule}"
            if gone is not None:
                raise HocketError(f"Process {gone} has ended without {what}, in which process {self.rank} waits: {rule}")
            if waited > _TOGETHER_S:
                raise HocketError(late)
            if waited > self.liveness_timeout_s and not warned:
                warned = True
                warnings.warn(late, stacklevel=2)
            time.sleep(_PAUSE_S if waited < 1 else 0.1)
        for other in ranks:
            if (theirs := self._store.get(f"{key}/{other}").decode()) != what:
                raise HocketError(
                    f"Process {other} is in {theirs}, but process {self.rank} in {what}: all workers must enter the same."
                )

    def _join(self) -> None:
        """Wait for the threads: one that returns from torch during the interpreter's shutdown would abort the process."""
        for thread in self._threads:
            thread.join(timeout=2 * _BEAT_S)

    def explain(self, error: BaseException) -> BaseException:
        """Turn a collective's failure into a :class:`WorkerLost` that names the lost process, if it can be found."""
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
        return WorkerLost(f"An exchange failed, but no lost process was found ({text}); see the other processes' output.")

    def _find(self) -> int | None:
        """The lost rank, after a collective has failed: reported, silent, or left; −1 for the process that hosts the store."""
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
        which = f"{who} (process {gone})" if gone >= 0 else f"{who} (process 0), or the launcher if it hosts the job's store,"
        return f"{which} died, ended early or stopped answering; the others cannot continue and exit. Restart from a checkpoint."

    def _beat(self) -> None:
        """Increment the own counter, and look for lost processes."""
        seen: dict[int, tuple[bytes, float]] = {}
        while not self._stop.wait(_BEAT_S):
            self._rounds += 1
            try:
                self._store.set(f"beat/{self.rank}", json.dumps({"beat": self._rounds, **self.progress.describe()}))
                if self._named() is None:
                    watched = self._watched()
                    self._silent(watched, self.liveness_timeout_s, seen)
                    silent = [(rank, time.monotonic() - seen[rank][1]) for rank in watched if rank in seen]
                    self.progress.hears = next((found for found in silent if found[1] > SILENT_S), None)
                    self.late.turn(self._store)
            except RuntimeError:
                self._gone = -1 if self._gone is None else self._gone
            if self._gone is not None:
                return

    def _watch(self) -> None:
        """Exit some time after a process was found lost, if the main thread does not exit by itself.

        The main thread has ``_GRACE_S`` to raise the same error; once it has raised it, it may take longer, to save its state.
        """
        rounds, stuck, grace = 0, 0.0, _GRACE_S
        while not self._stop.wait(_BEAT_S):
            stuck = stuck + _BEAT_S if self._rounds == rounds else 0.0
            rounds = self._rounds
            self.late.look_at_store(stuck)
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
        """Process 0 waits until all others have read the lost rank, since the store may end with process 0."""
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
        """Report a process whose counter has not changed for ``liveness_timeout_s``; ``seen`` is kept between calls."""
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
        """Write the lost rank to the store, unless another was written before."""
        if not self._store.check(["gone"]):
            self._store.set("gone", str(rank))
        found = self._named()
        return rank if found is None else found

    def _at_exit(self) -> None:
        """Announce the exit, unless it follows an exception, which others should notice. Process 0 waits for all others."""
        if hasattr(sys, "last_value"):
            self._stop.set()
            self._join()
            return
        self.stop()
        seen: dict[int, tuple[bytes, float]] = {}
        with contextlib.suppress(RuntimeError):  # the launcher hosted the store and has exited
            while self.rank == 0 and not self._told:
                here = [rank for rank in range(1, self.processes) if not self._has_left(rank)]
                if not here or self._named() is not None or self._silent(here, self.liveness_timeout_s, seen) is not None:
                    break
                time.sleep(_BEAT_S / 5)


_generations = 0


def _generation() -> int:
    """A number per cluster: several in one job have separate keys in the store."""
    global _generations
    _generations += 1
    return _generations
