"""The timeline of all processes: simulated from a schedule whose actions have known costs, or measured in a run.

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

from hocket.errors import HocketError
from hocket.split.axis import Axis
from hocket.split.pipeline.schedules import Action, Kind, Schedule, before

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
        return self.bubble / ((self.computing + self.bubble) or 1.0)

    @property
    def communication_share(self) -> float:
        """Of all the time."""
        return self.communication / ((self.computing + self.bubble + self.communication) or 1.0)


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
        computing = bubble = communication = 0.0
        for row in self.rows:
            free = 0.0
            for span in row:
                ready = max((ends[a] for a in before(span.action, ends)), default=0.0)
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
    own = time.perf_counter(), [(*span.action, span.start, span.end) for span in spans]
    gathered = axis.gather_plain(own)
    everyone = [(now, [Span(Action(*action), a, b) for *action, a, b in row]) for now, row in gathered]
    shifts = [now - everyone[0][0] if abs(now - everyone[0][0]) > _ANOTHER_CLOCK_S else 0.0 for now, _ in everyone]
    origin = min((span.start - shift for shift, (_, row) in zip(shifts, everyone, strict=True) for span in row), default=0.0)
    return Timeline(
        tuple(
            tuple(Span(span.action, span.start - shift - origin, span.end - shift - origin) for span in row)
            for shift, (_, row) in zip(shifts, everyone, strict=True)
        )
    )


# --- simulated -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Units of time of an action on one stage, and of a transfer between two processes.

    A backward takes twice a forward: it makes two products, for the inputs (I) and for the weights (W), where a forward makes one.
    """

    forward: float = 1.0
    backward: float = 2.0
    transfer: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value > 0 or (value == 0 and name == "transfer")):
                raise HocketError(f"The cost of {name} is a number of units of time above 0; got {value}.")

    def of(self, kind: Kind) -> float:
        return {"F": self.forward, "B": self.backward}.get(kind, self.backward / 2)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """When each action runs if it starts as soon as its process and its inputs are ready.

    >>> from hocket.split.pipeline.schedules import make
    >>> simulate(make("gpipe", stages=4, num_microbatches=8)).length  # (8 + 3) · (1 + 2)
    33.0
    """
    costs = costs or Costs()
    place = {action: process for process, row in enumerate(schedule) for action in row}
    ends: dict[Action, float] = {}
    rows: list[list[Span]] = [[] for _ in schedule]
    while len(ends) < len(place):
        known = len(ends)
        for process, (done, row) in enumerate(zip(rows, schedule, strict=True)):
            for action in row[len(done) :]:
                needed = before(action, place)
                if not all(a in ends for a in needed):
                    break
                free = done[-1].end if done else 0.0
                start = max([free, *(ends[a] + costs.transfer * (place[a] != process) for a in needed)])
                ends[action] = start + costs.of(action.kind)
                done.append(Span(action, start, ends[action]))
        if len(ends) == known:
            stuck = ", ".join(str(row[len(done)]) for done, row in zip(rows, schedule, strict=True) if len(done) < len(row))
            raise HocketError(f"This schedule has a deadlock at {stuck}: put each action after those it needs.")
    return Timeline(tuple(tuple(row) for row in rows))


def bubble(schedule: Schedule, costs: Costs | None = None) -> float:
    """The share of time in which processes are idle, from the first start to the last end.

    For GPipe and 1F1B it is ``(S−1)/(m+S−1)`` whatever a backward costs.

    >>> from hocket.split.pipeline.schedules import make
    >>> f"{bubble(make('1f1b', stages=4, num_microbatches=8)):.1%}"
    '27.3%'
    """
    timeline = simulate(schedule, costs)
    busy = sum(span.end - span.start for row in timeline.rows for span in row)
    return (timeline.length * len(timeline.rows) - busy) / (timeline.length * len(timeline.rows))
