"""Where a process stands: what it has launched, what it waits for and since when, and the stack of the thread that trains.

Whoever exchanges writes it, in a few assignments per exchange. The heartbeat's thread reads it and carries it to the others, so a
process whose training thread hangs still tells where (:mod:`hocket.cluster.late`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

FLOOR_S = 3.0
"""No exchange is called late before this."""
TIMES = 5.0
FADES = 0.98
"""An exchange is late when it takes ``TIMES`` as long as the longest one of late; the memory of that fades with each exchange."""
ELASTIC = "elastic"
"""The track of all members of an elastic run: their exchanges."""
RENDEZVOUS = "rendezvous"
"""The track of processes that wait for the rendezvous of an elastic run: nobody waits for these."""
_STUCK_S = 1.0
"""A process that has waited in one place for these seconds reports its stack."""
FRAMES = 6


@dataclass(frozen=True)
class Wait:
    """The training thread waits for a launch: ``number`` counts those of its track, 0 where its processes launch each their own."""

    track: Track
    number: int
    what: str
    begun: float

    @property
    def longest_s(self) -> float:
        """What the longest wait of late took."""
        return self.track.longest_s

    @property
    def late_s(self) -> float:
        """From when on it is late."""
        return max(FLOOR_S, TIMES * self.track.longest_s)


class Track:
    """What the processes ``ranks`` launch in the same order: the exchanges of one cluster, or their meetings. Or the stages of a
    pipeline, which send to and receive from each other in an order of their own."""

    def __init__(self, progress: Progress, name: str, ranks: Sequence[int]) -> None:
        self._progress, self.name, self.ranks = progress, name, list(ranks)
        self.launched = 0
        self.counted = True
        """Whether its processes launch the same in the same order now; otherwise its waits have the number 0."""
        self._step: int | None = None
        self.longest_s = 0.0

    @property
    def step(self) -> int:
        """Steps done by its job, or by any job of the process where it has none of its own."""
        return self._progress.step if self._step is None else self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = self._progress.step = step

    @property
    def number(self) -> int:
        """Of the latest launch."""
        return self.launched if self.counted else 0

    def launch(self) -> int:
        """Count one more; its number."""
        self.launched += 1
        return self.number

    def wait(self, result: Callable[[], Any], number: int, what: str) -> Any:
        """Call ``result``, which may block until all processes have launched ``number``."""
        begun = time.monotonic()
        self._progress.enter(Wait(self, number, what, begun))
        try:
            return result()
        finally:
            now = time.monotonic()
            self.longest_s = max(now - begun, FADES * self.longest_s)
            self._progress.leave(now)


class Progress:
    """Of one process."""

    def __init__(self) -> None:
        self.wait: Wait | None = None
        """What the training thread waits for; None while it computes."""
        self.hears: tuple[int, float] | None = None
        """The process whose heartbeats this one watches, and for how long it has been silent; None where it is not."""
        self.step = 0
        """Steps done by the job that stepped last."""
        self._since = time.monotonic()
        self._thread = threading.main_thread().ident
        self._tracks: dict[str, Track] = {}

    def track(self, name: str, ranks: Sequence[int]) -> Track:
        """The track ``name``, a name that is the same on all of its processes; a new one, if there is none."""
        if name not in self._tracks:
            self._tracks[name] = Track(self, name, ranks)
        return self._tracks[name]

    def drop(self, name: str) -> None:
        """Forget a cluster that is over, and its meetings."""
        for own in (name, meeting_of(name)):
            self._tracks.pop(own, None)

    def enter(self, wait: Wait) -> None:
        self._thread = threading.get_ident()
        self.wait = wait

    def leave(self, now: float) -> None:
        self._since, self.wait = now, None

    def describe(self) -> dict[str, Any]:
        """The same as plain data; with the stack of the thread that trains, where it has done one thing for long."""
        wait, since = self.wait, self._since
        begun = since if wait is None else wait.begun
        found: dict[str, Any] = {"for_s": round(time.monotonic() - begun, 1)}
        found["launched"] = {name: [track.launched, track.step] for name, track in list(self._tracks.items())}
        if wait is not None:
            found["waits"] = [wait.track.name, wait.number, wait.what]
            if time.monotonic() - begun > wait.late_s:
                found["late"] = wait.longest_s
        if self.hears is not None:
            found["hears"] = self.hears
        if found["for_s"] >= _STUCK_S:
            found["stack"] = stack_of(self._thread)
        return found


def doing(described: dict[str, Any]) -> str:
    """What a training thread does, where it has done so for long, in words; nothing otherwise.

    >>> doing({"for_s": 3.2, "stack": ["read (data/files.py:7)", "main (train.py:30)"]})
    'has been computing for 3.2 s in read (data/files.py:7), called from main (train.py:30)'
    """
    if "stack" not in described:
        return ""
    what = f"{described['for_s']:.1f} s for {described['waits'][2]}" if "waits" in described else f"for {described['for_s']:.1f} s"
    how = "waiting" if "waits" in described else "computing"
    return f"has been {how} {what} in {', called from '.join(described['stack'])}"


def meeting_of(group: str) -> str:
    """The track of the meetings of a group, where no exchange is launched unless all have come."""
    return f"meeting/{group}"


def stack_of(thread: int | None) -> list[str]:
    """The innermost frames of a thread, innermost first, as ``function (folder/file.py:line)``."""
    frame = sys._current_frames().get(thread or 0)
    found: list[str] = []
    while frame is not None and len(found) < FRAMES:
        file = "/".join(PurePath(frame.f_code.co_filename).parts[-2:])
        found.append(f"{frame.f_code.co_name} ({file}:{frame.f_lineno})")
        frame = frame.f_back
    return found
