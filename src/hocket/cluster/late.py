"""Who is everybody waiting for? When an exchange takes far longer than those before, every process says who has not come.

Each process's heartbeat carries where it stands (:mod:`hocket.cluster.progress`). The first process that has waited too long reads
the heartbeats of the others, composes a report and writes it to the store; all processes print it. It is renewed each time the wait
has doubled.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hocket.cluster.progress import FLOOR_S, Progress, Wait, doing

_NAMED = 3
"""So many late workers are described one by one."""
_REPORTS = 8
SILENT_S = 2.0
"""A process without a heartbeat for so long is called silent."""


@dataclass(frozen=True)
class Standing:
    """Where another process stands, as its latest heartbeat says; ``silent_s`` since that came, where it is long ago."""

    rank: int
    beat: dict[str, Any]
    silent_s: float | None
    left: bool
    worker: int
    """The first one that it hosts."""
    name: str

    def launched(self, track: str) -> int:
        return int(self.beat.get("launched", {}).get(track, (0, 0))[0])

    def has_come(self, track: str, number: int) -> bool:
        """Whether it has launched ``number``; where each launches its own (0), whether it waits there as well."""
        return self.launched(track) >= number if number else self.state == "waiting" and self.waits_in(track)

    def waits_in(self, track: str) -> bool:
        return self.beat.get("waits", [""])[0] == track

    @property
    def state(self) -> str:
        """computing, waiting, silent or left."""
        if self.left or self.silent_s is not None:
            return "left" if self.left else "silent"
        return "waiting" if "waits" in self.beat else "computing"

    def describe(self, track: str) -> dict[str, Any]:
        step = int(self.beat.get("launched", {}).get(track, (0, 0))[1])
        for_s = self.beat.get("for_s", 0.0) if self.silent_s is None else self.silent_s
        waits = self.beat.get("waits", ["", 0, ""])[2]
        return {"state": self.state, "for_s": for_s, "step": step + 1, "waits": waits, "stack": self.beat.get("stack", [])}


@dataclass(frozen=True)
class LateWait:
    """A process has waited too long; the fields are those of :class:`~hocket.cluster.progress.Wait`."""

    track: str
    number: int
    what: str
    step: int
    longest_s: float
    waited_s: float

    def missing(self, others: Sequence[Standing]) -> list[Standing]:
        """Those of the ``others`` that it waits for."""
        track = self.track
        missing = [one for one in others if not one.has_come(track, self.number)]
        # In a chain of neighbours some wait for others in turn: the first of the chain is the one that does not wait there.
        missing = [one for one in missing if one.state != "waiting" or not one.waits_in(track)] or missing
        if not self.number:
            missing = [one for one in missing if one.state != "waiting"] or missing
        return missing or [one for one in others if one.state in ("silent", "left")]

    def report(self, others: Sequence[Standing], number: int) -> dict[str, Any]:
        """Who is missing, as data and in words; ``number`` is that of the report."""
        track, missing = self.track, self.missing(others)
        waiting = 1 + sum(one.state == "waiting" and one.waits_in(track) for one in others)
        text = f"{waiting} of {len(others) + 1} processes have waited {self.waited_s:.1f} s for {self.what} (step {self.step}); "
        text += f"lately such a wait took at most {self.longest_s:.2g} s. "
        text += " ".join(_sentence(one, track) for one in missing[:_NAMED])
        text += f" {len(missing) - _NAMED} more have not arrived." if len(missing) > _NAMED else ""
        if not missing:
            text += "All workers have arrived, so the exchange itself is slow or stuck: look at the links with `hocket doctor`."
        late = [{"worker": one.worker, "process": one.rank, **one.describe(track)} for one in missing[:_NAMED]]
        return {**self.described(), "number": number, "late": late, "text": text}

    def described(self) -> dict[str, Any]:
        return {"track": self.track, "what": self.what, "step": self.step, "waited_s": round(self.waited_s, 1)}


class LateWatch:
    """Looks at this process's ``progress``, once per heartbeat; ``hosting`` says which workers each process hosts."""

    def __init__(self, rank: int, hosting: Sequence[range], progress: Progress) -> None:
        self.rank, self.hosting, self.progress = rank, hosting, progress
        self.reports: deque[dict[str, Any]] = deque(maxlen=_REPORTS)
        """The latest, as every process has printed them."""
        self._count = 0
        """Reports of all processes so far."""
        self._tried = 0
        self._told: Wait | None = None
        """The wait of this process about which there is a report."""
        self._told_s = 0.0

    def turn(self, store: Any) -> None:
        """Print what another process has found, and look whether this one waits too long. A report that cannot be read, made or
        printed must not end the heartbeat; that the store does not answer is the heartbeat's to handle (a RuntimeError)."""
        with contextlib.suppress(ValueError, TypeError, LookupError, OSError):
            self._turn(store)

    def _turn(self, store: Any) -> None:
        wait = self.progress.wait
        if self._told is not None and wait is not self._told:
            self._say(f"{self._told.what} went on after {time.monotonic() - self._told.begun:.1f} s.")
            self._told = None
        if store.check(["late"]) and (found := json.loads(store.get("late")))["number"] > self._count:
            self._take(found)
            if wait is not None and found["track"] == wait.track.name:  # the same is not found twice
                self._told, self._told_s = wait, time.monotonic() - wait.begun
        if wait is None:
            return
        waited = time.monotonic() - wait.begun
        if waited > (2 * self._told_s if self._told is wait else wait.late_s) and self._first(store):
            self._told, self._told_s = wait, waited
            report = _late(wait, waited).report(self._standings(store, wait.track.ranks), self._count + 1)
            store.set("late", json.dumps(report))
            self._take(report)

    def look_at_store(self, silent_s: float) -> None:
        """The store has not answered for so long: where this process waits, say that its host is silent; no other can be told."""
        wait = self.progress.wait
        if wait is None or silent_s < FLOOR_S or self._told is wait:
            return
        self._told, self._told_s = wait, time.monotonic() - wait.begun
        text = f"This process has waited {self._told_s:.1f} s for {wait.what} (step {wait.track.step + 1}). "
        text += f"{self._name(0)}, or the launcher if it hosts the job's store, is silent: no answer for {silent_s:.1f} s."
        late = {"worker": self.hosting[0].start, "process": 0, **self._standing(0, {}, silent_s, False).describe(wait.track.name)}
        self.reports.append({**_late(wait, self._told_s).described(), "number": self._count, "late": [late], "text": text})
        self._say(text)

    def _first(self, store: Any) -> bool:
        """Whether this process is the one that composes the next report; another try of all comes with the next beat but three."""
        self._tried += 1
        return bool(store.add(f"late/{self._count}/{self._tried // 4}", 1) == 1)

    def _take(self, report: dict[str, Any]) -> None:
        self._count, self._tried = report["number"], 0
        self.reports.append(report)
        self._say(report["text"])

    def _standings(self, store: Any, ranks: Sequence[int]) -> list[Standing]:
        """Of the other processes."""
        others = [rank for rank in ranks if rank != self.rank and store.check([f"beat/{rank}"])]
        beats = {rank: _parsed(raw) for rank, raw in zip(others, store.multi_get([f"beat/{rank}" for rank in others]), strict=True)}
        heard = [beat["hears"] for beat in beats.values() if "hears" in beat] + [self.progress.hears] * bool(self.progress.hears)
        silent = {int(rank): float(seconds) for rank, seconds in heard}
        left = {rank: bool(store.check([f"left/{rank}"])) for rank in beats}
        return [self._standing(rank, beat, silent.get(rank), left[rank]) for rank, beat in beats.items()]

    def _standing(self, rank: int, beat: dict[str, Any], silent_s: float | None, left: bool) -> Standing:
        return Standing(rank, beat, silent_s, left, self.hosting[rank].start, self._name(rank))

    def _name(self, rank: int) -> str:
        hosted = self.hosting[rank]
        who = f"Worker {hosted.start}" if len(hosted) == 1 else f"Workers {hosted.start} to {hosted.stop - 1}"
        return f"{who} (process {rank})"

    def _say(self, text: str) -> None:
        print(f"hocket: {text}", file=sys.stderr, flush=True)


def _sentence(one: Standing, track: str) -> str:
    step = one.describe(track)["step"]
    did = doing(one.beat) or ("was waiting" if "waits" in one.beat else "was computing")
    how = {
        "left": "has left the job.",
        "silent": f"is silent: no heartbeat for {one.silent_s or 0:.1f} s (stopped, swapping or cut off?); then it {did}.",
        "waiting": f"has not arrived: in step {step} it {did}; so its loop took another way (fewer batches, or an `if`).",
        "computing": f"has not arrived: in step {step} it {did}.",
    }
    return f"{one.name} {how[one.state]}"


def _late(wait: Wait, waited_s: float) -> LateWait:
    return LateWait(wait.track.name, wait.number, wait.what, wait.track.step + 1, wait.longest_s, waited_s)


def _parsed(raw: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(raw)
        return found if isinstance(found, dict) else {}
    return {}
