"""Whom the members of an elastic run wait for, as their beats say: a report that all of them print (:mod:`hocket.cluster.late`).

Beats come from a thread of their own, so a member whose training thread hangs goes on to beat; what it was last seen to do is in
them. Where others have waited for it for very long, it is given up like one that is silent: it joins again if it ever goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hocket.cluster.late import SILENT_S, LateWait, Standing
from hocket.cluster.progress import RENDEZVOUS

HANG_TIMEOUT_S = 1800.0
"""As long as a process of a run that is not elastic waits in an exchange."""


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
        """Renew the report, each time the wait has doubled; those that others have waited for as long as is allowed. What cannot be
        read in a beat says nothing."""
        try:
            return self._look([one for one in table if not one.waits_in(RENDEZVOUS)])
        except (ValueError, TypeError, LookupError, AttributeError):
            return []

    def _look(self, table: Sequence[Standing]) -> list[Standing]:
        late = [one for one in table if one.state == "waiting" and "late" in one.beat]
        if not late:
            self._report = None
            return []
        waiting = max(late, key=lambda one: float(one.beat["for_s"]))
        wait, others = _late(waiting), [one for one in table if one is not waiting]
        if self._report is None or wait.waited_s > 2 * self._report["waited_s"]:
            self._count += 1
            self._report = wait.report(others, self._count)
        if wait.waited_s <= self.hang_timeout_s:
            return []
        return [one for one in wait.missing(others) if one.state == "computing"]


def standing_of(rank: int, worker: int, told: dict[str, Any], silent_s: float, host: str) -> Standing:
    """What the beats of member number ``rank`` say, the latest of which came ``silent_s`` ago."""
    where = f"process {told.get('pid', '?')} on {host}" if host else f"process {rank}"
    return Standing(rank, told, silent_s if silent_s > SILENT_S else None, False, worker, f"Worker {worker} ({where})")


def _late(one: Standing) -> LateWait:
    track, number, what = one.beat["waits"]
    step = one.describe(track)["step"]
    return LateWait(str(track), int(number), str(what), step, float(one.beat["late"]), float(one.beat["for_s"]))
