"""The timeline of a pipeline's processes: ``timeline.json`` of a run, checked before it is drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from hocket.split.pipeline.schedules import Action
from hocket.split.pipeline.timeline import KINDS, Span, Timeline

LOOKS = {"F": ("forward", 0), "B": ("backward", 2), "I": ("backward, inputs", 5), "W": ("backward, weights", 4)}
"""What each kind of action is called, and which of the charts' colours it has (page.css says the same)."""
LARGEST_FILE = 16 * 2**20
MOST_TIMELINES = 12
"""How many timelines are drawn; the others are reported in figures only."""
_MOST_PROCESSES = 64
_MOST_DRAWN = 2000
_LARGEST_NUMBER = 10**6
_LONGEST_S = 1e6


@dataclass(frozen=True)
class Measured:
    """The timeline of a run with the shares that it recorded; there is at least one action."""

    timeline: Timeline
    bubble_share: float
    communication_share: float

    @classmethod
    def of(cls, content: dict[str, Any]) -> Measured:
        """Of a file's content; a ValueError says what is wrong with it.

        >>> rows = [[["F", 0, 0, 0.0, 0.5]], [["F", 1, 0, 0.5, 1.0]]]
        >>> Measured.of({"bubble_share": 0.5, "communication_share": 0.0, "rows": rows}).timeline.length
        1.0
        >>> Measured.of({"bubble_share": 7, "communication_share": 0.0, "rows": rows})
        Traceback (most recent call last):
        ValueError: its bubble_share is no share
        """
        bubble, communication = (_share(content, name) for name in ("bubble_share", "communication_share"))
        rows = content.get("rows")
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise ValueError("its rows are no lists of actions")
        if len(rows) > _MOST_PROCESSES:
            raise ValueError(f"it has {len(rows)} processes; {_MOST_PROCESSES} can be drawn")
        timeline = Timeline(tuple(_row(row) for row in rows))
        if timeline.length == 0:
            raise ValueError("it holds no action that took time")
        return cls(timeline, bubble, communication)

    @property
    def actions(self) -> int:
        """How many there are."""
        return sum(map(len, self.timeline.rows))

    def beginning(self, most: int = _MOST_DRAWN) -> Timeline:
        """The actions that can be drawn: all, or the first so many."""
        if self.actions <= most:
            return self.timeline
        end = sorted(span.start for row in self.timeline.rows for span in row)[most]
        return Timeline(tuple(tuple(span for span in row if span.start < end) for row in self.timeline.rows))


def _share(content: dict[str, Any], name: str) -> float:
    value = content.get(name)
    if not _is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"its {name} is no share")
    return float(value)


def _row(row: list[Any]) -> tuple[Span, ...]:
    """The actions of one process, which follow each other."""
    spans = tuple(_span(entry) for entry in row)
    if any(a.start > b.start or a.end > b.end for a, b in pairwise(spans)):
        raise ValueError("its actions are not in order")
    return spans


def _span(entry: Any) -> Span:
    match entry:
        case [str() as kind, int() as stage, int() as microbatch, start, end] if (
            kind in KINDS
            and 0 <= stage <= _LARGEST_NUMBER
            and 0 <= microbatch <= _LARGEST_NUMBER
            and _is_number(start)
            and _is_number(end)
            and 0 <= start <= end <= _LONGEST_S
        ):
            return Span(Action(kind, int(stage), int(microbatch)), float(start), float(end))
    raise ValueError("one of its actions is not [kind, stage, microbatch, start, end]")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and (isinstance(value, int) or math.isfinite(value))
