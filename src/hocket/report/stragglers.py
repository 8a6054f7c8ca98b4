"""Which workers compute longest: p50 and p99 of the steps of each, as the last epoch of a run recorded them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hocket.report.figures import plain, times
from hocket.report.read import number

_SHOWN = 8
_MOST = 10**5


@dataclass(frozen=True)
class Stragglers:
    """Seconds that a step computes, by worker; there is at least one worker."""

    p50_s: tuple[float, ...]
    p99_s: tuple[float, ...]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Stragglers | None:
        """Of an epoch's line; None where it recorded none.

        >>> found = Stragglers.of({"step_times": {"p50_s": [0.1, 0.3, 0.1], "p99_s": [0.2, 0.5, 0.2]}})
        >>> str(found), found.slowest
        ('worker 1: 0.3 / 0.5', 1)
        >>> Stragglers.of({"step_times": {"p50_s": [0.1], "p99_s": ["long"]}}), Stragglers.of({})
        (None, None)
        """
        times = line.get("step_times")
        lists = [times.get(name) for name in ("p50_s", "p99_s")] if isinstance(times, dict) else []
        if not lists or not all(isinstance(found, list) and 0 < len(found) <= _MOST for found in lists):
            return None
        columns = [tuple(number(value) for value in found) for found in lists if isinstance(found, list)]
        if len(columns[0]) != len(columns[1]) or any(value is None or value < 0 for column in columns for value in column):
            return None
        return cls(*columns)  # type: ignore[arg-type]

    @property
    def slowest(self) -> int:
        return max(range(len(self.p50_s)), key=lambda worker: self.p50_s[worker])

    @property
    def median_s(self) -> float:
        """The p50 of the worker in the middle."""
        return statistics.median(self.p50_s)

    def __str__(self) -> str:
        return f"worker {self.slowest}: {plain(self.p50_s[self.slowest])} / {plain(self.p99_s[self.slowest])}"

    def line(self) -> str:
        """The slowest workers, slowest first, and how far the slowest is from the middle."""
        order = sorted(range(len(self.p50_s)), key=lambda worker: -self.p50_s[worker])
        named = [f"worker {worker} {plain(self.p50_s[worker])} / {plain(self.p99_s[worker])}" for worker in order[:_SHOWN]]
        more = f" and {len(order) - _SHOWN} faster ones" if len(order) > _SHOWN else ""
        factor = f"; the slowest takes {times(self.p50_s[order[0]] / self.median_s)} the median" if self.median_s else ""
        return f"{', '.join(named)}{more}{factor}"
