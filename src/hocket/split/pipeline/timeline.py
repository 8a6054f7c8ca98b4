"""The timeline of all processes: simulated from a schedule, or measured in a run.

Idle time before an action is of two kinds. Until the action it waits for has *ended* on the other process, the process is idle:
that is the bubble. From then on the result is being sent: that is communication. The *bubble share* is bubble / (bubble +
computing) over all processes, from the first start to the last end; communication is stated separately and is part of neither.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hocket.split.axis import Axis
from hocket.split.pipeline.schedules import Action, Kind, before

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
_ANOTHER_CLOCK_S = 1.0
"""Clocks of one machine agree; those of two machines start at different times."""


@dataclass(frozen=True)
class Span:
    """An action and when it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Shares:
    """Seconds (or units) summed over processes."""

    computing: float
    bubble: float
    communication: float

    @property
    def bubble_share(self) -> float:
        """The share of the time without communication."""
        total = self.computing + self.bubble
        return self.bubble / total if total else 0.0

    @property
    def communication_share(self) -> float:
        """Of all the time."""
        total = self.computing + self.bubble + self.communication
        return self.communication / total if total else 0.0


@dataclass(frozen=True)
class Timeline:
    """The spans of each process, in order; times count from the first start."""

    rows: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> float:
        """From the first start to the last end."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @property
    def bubble_share(self) -> float:
        """The share of idle time; see the module's docstring."""
        return self.shares().bubble_share

    def shares(self) -> Shares:
        """How the processes spent their time."""
        ends = {span.action: span.end for row in self.rows for span in row}
        known = frozenset(ends)
        computing = bubble = communication = 0.0
        for row in self.rows:
            free = 0.0
            for span in row:
                ready = max((ends[a] for a in before(span.action, known)), default=0.0)
                ready = min(max(free, ready), span.start)
                bubble += ready - free
                communication += span.start - ready
                computing += span.end - span.start
                free = span.end
            bubble += self.length - free
        return Shares(computing, bubble, communication)

    def to_dict(self) -> dict[str, Any]:
        """For ``timeline.json``: each process's actions as ``[kind, stage, microbatch, start, end]``, and the shares."""
        shares = self.shares()
        return {
            "length_s": self.length,
            "bubble_share": shares.bubble_share,
            "communication_share": shares.communication_share,
            "rows": [[[*span.action, round(span.start, 7), round(span.end, 7)] for span in row] for row in self.rows],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Timeline:
        """Back from ``to_dict``."""
        return cls(tuple(tuple(Span(Action(k, s, m), a, b) for k, s, m, a, b in row) for row in data["rows"]))

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(self.to_dict()) + "\n")


def gather(axis: Axis, spans: Collection[Span]) -> Timeline:
    """The spans of all processes; all processes of the axis must call it.

    Processes of one machine share a clock. Others align theirs at a common barrier here, whose precision is the latency of a
    message.
    """
    axis.all_reduce(torch.zeros(1))
    meeting = axis.all_gather(torch.tensor([time.perf_counter()], dtype=torch.float64)).tolist()
    shift = meeting[axis.place] - meeting[0]
    shift = shift if abs(shift) > _ANOTHER_CLOCK_S else 0.0
    longest = int(axis.all_gather(torch.tensor([float(len(spans))])).max())
    own = torch.full((1, longest, 5), -1.0, dtype=torch.float64)
    for i, span in enumerate(spans):
        kind, stage, microbatch = span.action
        own[0, i] = torch.tensor([KINDS.index(kind), stage, microbatch, span.start - shift, span.end - shift], dtype=torch.float64)
    everyone = axis.all_gather(own, 0).tolist()
    origin = min((line[3] for row in everyone for line in row if line[0] >= 0), default=0.0)
    return Timeline(tuple(tuple(_span(line, origin) for line in row if line[0] >= 0) for row in everyone))


def _span(line: list[float], origin: float) -> Span:
    kind, stage, microbatch, start, end = line
    return Span(Action(KINDS[int(kind)], int(stage), int(microbatch)), start - origin, end - origin)
