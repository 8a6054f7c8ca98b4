"""For whom a worker waits, when it waits far longer than before: a shard that holds an answer back names who is behind, and
the gossip worker that leads the agreement on the final mean knows who has not ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from hocket.cluster.progress import FADES, FLOOR_S, TIMES

_SILENT_S = 3.0
"""A worker that has not beaten for so long (it does every second) is called silent."""


class LateAnswers:
    """Of one worker: an answer is late when it takes ``TIMES`` as long as the longest one of late."""

    def __init__(self) -> None:
        self.reports: deque[dict[str, Any]] = deque(maxlen=8)
        """The latest."""
        self._longest_s = self._told_s = 0.0

    def ended(self, waited_s: float) -> None:
        """The answer has arrived."""
        self._longest_s, self._told_s = max(waited_s, FADES * self._longest_s), 0.0

    def judge(self, worker: int, step: int, waited_s: float, behind: Sequence[Sequence[Any]]) -> str:
        """A sentence on ``behind`` (number, step if known, seconds since heard of, what it does), where the wait is late.

        >>> late = LateAnswers()
        >>> late.judge(0, 7, 2.5, [[1, 6, 0.4, ""]])
        ''
        >>> late.judge(0, 7, 3.5, [[1, 6, 0.4, "has been computing for 3.1 s in read (data.py:7)"]])
        'worker 0 has waited 3.5 s at step 7 for worker 1 (at step 6), which has been computing for 3.1 s in read (data.py:7)'
        """
        late_s = max(FLOOR_S, TIMES * self._longest_s)
        if not behind or waited_s < (2 * self._told_s or late_s):
            return ""
        self._told_s = waited_s
        late, clauses = [], []
        for number, reached, silent_s, doing in behind:
            silent = float(silent_s) > _SILENT_S
            state = "silent" if silent else "waiting" if str(doing).startswith("has been waiting") else "computing"
            late.append({"worker": int(number), "state": state, "step": reached, "doing": str(doing)})
            how = f"silent for {silent_s:.1f} s" if silent else doing or "computing"
            at = "" if reached is None else f" (at step {reached})"
            clauses.append(f"worker {number}{at}, which {'is ' if how != doing else ''}{how}")
        text = f"worker {worker} has waited {waited_s:.1f} s at step {step} for {'; '.join(clauses)}"
        self.reports.append({"what": "others", "step": step, "waited_s": round(waited_s, 1), "late": late, "text": text})
        return text
