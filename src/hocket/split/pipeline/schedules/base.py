"""A schedule: the actions of each process, in order. Plain data that can be printed, compared and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One piece of work: forward (F), whole backward (B), or its halves, for the inputs (I) and for the weights (W).

    >>> print(Action("F", 2, 0), Action("B", 0, 11))
    2F0 0B11
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Schedule = tuple[tuple[Action, ...], ...]
"""The actions of each process. Process ``p`` of ``P`` holds the stages ``p``, ``p + P``, ``p + 2P``, …"""
Order = Callable[[int, int, int, int], Iterator[Action]]
"""The actions of one process: from its number, the number of processes, of micro-batches, and of stages on each process."""


@dataclass(frozen=True)
class Method:
    """A method to order the actions, with its name and its purpose."""

    name: str
    order: Order
    about: str
    paper: str
    stages_per_rank: int = 1
    """The default number of stages on each process."""
    several: bool = False
    """Whether a process may hold several stages."""
    fills: bool = False
    """Whether it needs at least as many micro-batches as processes."""
    rounds: bool = False
    """Whether micro-batches go in rounds of equal length, about one per process."""


def per_round(num_microbatches: int, processes: int) -> int:
    """How many micro-batches a process computes on one of its stages before it continues with the next stage."""
    return num_microbatches // max(1, num_microbatches // processes)


def before(action: Action, known: frozenset[Action] | set[Action]) -> list[Action]:
    """What must be done before ``action``, among the ``known`` actions of a schedule."""
    kind, stage, microbatch = action
    if kind == "F":
        wanted = [Action("F", stage - 1, microbatch)]
    elif kind == "W":
        wanted = [Action("I", stage, microbatch)]
    else:
        wanted = [Action("F", stage, microbatch), Action("B", stage + 1, microbatch), Action("I", stage + 1, microbatch)]
    return [a for a in wanted if a in known]


def alternating(
    process: int, processes: int, num_microbatches: int, stages_per_rank: int, warm: int, split: bool = False
) -> Iterator[Action]:
    """``warm`` forwards, then one forward and one backward in turn, then the remaining backwards.

    With ``split`` backwards are halved: the halves for the weights come ``process`` halves later, and fill the end.
    """
    size, total = per_round(num_microbatches, processes), num_microbatches * stages_per_rank
    warm = min(warm, total)

    def stage(turn: int) -> int:
        return turn // size % stages_per_rank * processes + process

    def mirrored(turn: int) -> int:
        return (stages_per_rank - 1 - turn // size % stages_per_rank) * processes + process

    backward: Kind = "I" if split else "B"
    done: dict[tuple[str, int], int] = {}

    def act(kind: Kind, at: int) -> Action:
        index = done.get((kind, at), 0)
        done[kind, at] = index + 1
        return Action(kind, at, index)

    weights = 0
    for turn in range(warm):
        yield act("F", stage(turn))
    for turn in range(total):
        if warm + turn < total:
            yield act("F", stage(warm + turn))
        yield act(backward, mirrored(turn))
        if split and turn >= process:
            yield act("W", mirrored(weights))
            weights += 1
    while split and weights < total:
        yield act("W", mirrored(weights))
        weights += 1
