"""Generations: who exchanges with whom, until somebody leaves or joins; and what becomes of an exchange that a loss interrupts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Generation:
    """One membership. ``members`` are in the order of their ranks: whoever was there before comes before newcomers.

    >>> Generation(3, (7, 9, 12)).rank(9)
    1
    """

    number: int = 0
    members: tuple[int, ...] = ()
    planned: bool = False
    """It begins after the exchange in progress, at the end of a step; otherwise members abandon that exchange at once."""
    hold: bool = False
    """There are too few members: they end the exchange in progress, and wait for more at the end of the step."""

    def rank(self, member: int) -> int:
        return self.members.index(member)

    def described(self) -> dict[str, Any]:
        return {"generation": self.number, "members": list(self.members), "planned": self.planned, "hold": self.hold}

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> Generation:
        members = tuple(int(member) for member in metadata["members"])
        return cls(int(metadata["generation"]), members, bool(metadata["planned"]), bool(metadata["hold"]))


class Position(NamedTuple):
    """How far a member is with the exchanges, which all members make in the same order."""

    done: int
    """Exchanges that it has completed; −1: a newcomer, which has no weights yet."""
    held: bool = False
    """It has the result of the next one, too, but does not know whether all others have theirs."""


def agreed(positions: Sequence[Position]) -> int:
    """The number of exchanges that count, for members of a new generation that were at these positions.

    A member completes an exchange once it knows that all members have its result: after the exchange comes a small all-reduce,
    which no member leaves before all have entered it. So where one has completed an exchange, every other holds its result, and
    takes it; where none has, all begin it again from what they had before it.

    >>> agreed([Position(4), Position(3, held=True), Position(-1)]), agreed([Position(3, held=True), Position(3)])
    (4, 3)
    """
    known = [position for position in positions if position.done >= 0]
    count = max((position.done for position in known), default=0)
    behind = [p for p in known if p.done < count and not (p.held and p.done == count - 1)]
    assert not behind, f"{behind} cannot follow members that have completed {count} exchanges"
    return count
