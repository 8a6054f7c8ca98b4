"""The times of a schedule when every action has a known cost, the same on all processes."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.errors import HocketError
from hocket.split.pipeline.schedules import Action, Kind, Schedule, before
from hocket.split.pipeline.timeline import Span, Timeline


@dataclass(frozen=True)
class Costs:
    """Units of time of an action on one stage, and of a transfer between two processes.

    A backward takes twice a forward: it makes two products, for the inputs (I) and for the weights (W), where a forward makes one.
    """

    forward: float = 1.0
    backward: float = 2.0
    input: float | None = None
    """By default half of ``backward``."""
    weight: float | None = None
    """By default half of ``backward``."""
    transfer: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "input", "weight", "transfer"):
            value = getattr(self, name)
            if value is not None and not (value > 0 or (value == 0 and name == "transfer")):
                raise HocketError(f"The cost of {name} is a number of units of time above 0; got {value}.")

    def of(self, kind: Kind) -> float:
        """The cost of an action of this kind."""
        half = self.backward / 2
        halves = {"I": half if self.input is None else self.input, "W": half if self.weight is None else self.weight}
        return {"F": self.forward, "B": self.backward, **halves}[kind]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """When each action runs if it starts as soon as its process and its inputs are ready.

    >>> from hocket.split.pipeline.schedules import make
    >>> simulate(make("gpipe", stages=4, num_microbatches=8)).length  # (8 + 3) · (1 + 2)
    33.0
    """
    costs = costs or Costs()
    known = frozenset(action for row in schedule for action in row)
    place = {action: process for process, row in enumerate(schedule) for action in row}
    ends: dict[Action, float] = {}
    rows: list[list[Span]] = [[] for _ in schedule]
    while any(len(done) < len(row) for done, row in zip(rows, schedule, strict=True)):
        moved = False
        for process, (done, row) in enumerate(zip(rows, schedule, strict=True)):
            while len(done) < len(row):
                action = row[len(done)]
                needed = before(action, known)
                if not all(a in ends for a in needed):
                    break
                free = done[-1].end if done else 0.0
                start = max([free, *(ends[a] + costs.transfer * (place[a] != process) for a in needed)])
                ends[action] = start + costs.of(action.kind)
                done.append(Span(action, start, ends[action]))
                moved = True
        if not moved:
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
