"""What a schedule is: for each process the actions it performs, in order. Plain data that can be printed, compared and drawn."""

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
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


Schedule = tuple[tuple[Action, ...], ...]
"""The actions of each process. Process ``p`` of ``P`` holds the stages ``p``, ``p + P``, ``p + 2P``, …"""
Order = Callable[[int, int, int, int], Iterator[Action]]
"""The actions of one process: from its number, the number of processes, of micro-batches, and of stages on each process."""


@dataclass(frozen=True)
class Method:
    """A way to order the work, with its name and what it is good for."""

    name: str
    order: Order
    about: str
    paper: str
    virtual: int = 1
    """Stages on each process unless told otherwise."""
    several: bool = False
    """Whether a process may hold several stages."""
    fills: bool = False
    """Whether it takes at least as many micro-batches as there are processes."""
    rounds: bool = False
    """Whether micro-batches go in rounds of equal length, about one per process."""


def per_round(micro: int, processes: int) -> int:
    """How many micro-batches a process takes through one of its stages before it turns to the next."""
    return micro // max(1, micro // processes)


def before(action: Action, known: frozenset[Action] | set[Action]) -> list[Action]:
    """What must be done before ``action``, among the ``known`` actions of a schedule."""
    kind, stage, micro = action
    if kind == "F":
        wanted = [Action("F", stage - 1, micro)]
    elif kind == "W":
        wanted = [Action("I", stage, micro)]
    else:
        wanted = [Action("F", stage, micro), Action("B", stage + 1, micro), Action("I", stage + 1, micro)]
    return [a for a in wanted if a in known]


def alternating(process: int, processes: int, micro: int, virtual: int, warm: int, split: bool = False) -> Iterator[Action]:
    """``warm`` forwards, then one forward and one backward in turn, then the backwards that are left.

    With ``split`` backwards are halved: the halves for the weights wait until ``process`` others are behind, and fill the end.
    """
    size, total = per_round(micro, processes), micro * virtual
    warm = min(warm, total)

    def stage(turn: int) -> int:
        return turn // size % virtual * processes + process

    def mirrored(turn: int) -> int:
        return (virtual - 1 - turn // size % virtual) * processes + process

    backward: Kind = "I" if split else "B"
    done: dict[tuple[str, int], int] = {}

    def act(kind: Kind, at: int) -> Action:
        micro_ = done.get((kind, at), 0)
        done[kind, at] = micro_ + 1
        return Action(kind, at, micro_)

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
