"""Whom the members of an elastic run wait for, as their beats say: a report that all of them print (:mod:`hocket.cluster.late`).

Beats come from a thread of their own, so a member whose training thread hangs goes on to beat; what it was last seen to do is in
them. Where others have waited for it for very long, it is given up like one that is silent: it joins again if it ever goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hocket.cluster.late import SILENT_S, LateWait, Standing
from hocket.cluster.progress import ELASTIC, FRAMES, RENDEZVOUS
from hocket.programs.base import whole

HANG_TIMEOUT_S = 1800.0
"""As long as a process of a run that is not elastic waits in an exchange."""
_MOST_TEXT, _MOST_TRACKS, _MOST_S = 200, 64, 1e9
_MOST_LAUNCHED = 1 << 62


class Waits:
    """The latest report, where somebody waits now."""

    def __init__(self, hang_timeout_s: float = HANG_TIMEOUT_S) -> None:
        self.hang_timeout_s = hang_timeout_s
        self._report: dict[str, Any] | None = None
        self._count = 0

    def news(self, reported: int) -> dict[str, Any]:
        """For a member that knows the report of that number."""
        return {} if self._report is None or self._report["number"] <= reported else {"late": self._report}

    def look(self, table: Sequence[Standing]) -> list[Standing]:
        """Renew the report, each time the wait has doubled; those that others have waited for as long as is allowed."""
        table = [one for one in table if not one.waits_in(RENDEZVOUS)]
        late = [one for one in table if one.state == "waiting" and "late" in one.beat]
        if not late:
            self._report = None
            return []
        waiting = max(late, key=lambda one: float(one.beat["for_s"]))
        wait = _late(waiting)
        # Along the axes of a split model a process waits for those of its own replica alone.
        others = [one for one in table if one is not waiting and (wait.track == ELASTIC or one.worker == waiting.worker)]
        if self._report is None or wait.waited_s > 2 * self._report["waited_s"]:
            self._count += 1
            self._report = wait.report(others, self._count)
        if wait.waited_s <= self.hang_timeout_s:
            return []
        return [one for one in wait.missing(others) if one.state == "computing"]


def read_standing(told: Any) -> dict[str, Any]:
    """What a beat says of its training thread (:meth:`hocket.cluster.progress.Progress.describe`), bounded; nothing where a part of
    it cannot be read.

    >>> read_standing({"for_s": 2.5, "waits": ["elastic", 7, "gradients"], "late": float("inf")})
    {}
    """
    try:
        launched = {_text(name): [whole(k, 0, _MOST_LAUNCHED) for k in pair] for name, pair in told.get("launched", {}).items()}
        found: dict[str, Any] = {"for_s": _seconds(told["for_s"]), "launched": launched}
        if len(launched) > _MOST_TRACKS or any(len(pair) != 2 for pair in launched.values()):
            raise ValueError("so many tracks, or a track of other figures")
        if "waits" in told:
            track, number, what = told["waits"]
            found["waits"] = [_text(track), whole(number, 0, _MOST_LAUNCHED), _text(what)]
            found |= {"late": _seconds(told["late"])} if "late" in told else {}
        if "stack" in told:
            found["stack"] = [_text(frame) for frame in told["stack"][:FRAMES]]
        if "pid" in told:
            found["pid"] = whole(told["pid"])
        return found
    except (ValueError, TypeError, LookupError, AttributeError):
        return {}


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST_S:
        raise ValueError("seconds were expected")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text was expected")
    return value[:_MOST_TEXT]


def standing_of(rank: int, worker: int, told: dict[str, Any], silent_s: float, host: str) -> Standing:
    """What the beats of member number ``rank`` say, the latest of which came ``silent_s`` ago."""
    where = f"process {told.get('pid', '?')} on {host}" if host else f"process {rank}"
    return Standing(rank, told, silent_s if silent_s > SILENT_S else None, False, worker, f"Worker {worker} ({where})")


def _late(one: Standing) -> LateWait:
    track, number, what = one.beat["waits"]
    step = one.describe(track)["step"]
    return LateWait(str(track), int(number), str(what), step, float(one.beat["late"]), float(one.beat["for_s"]))
