"""Generations: who exchanges with whom, until somebody leaves or joins; and what becomes of an exchange that a loss interrupts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Generation:
    """One membership. ``members`` are in the order of their ranks: those of one host are neighbours, hosts and their members in the
    order in which they came.

    Where a model is split, ``parts`` processes are a replica: they are neighbours, in the order of the parts that they hold.

    >>> Generation(3, (7, 9, 12)).rank(9)
    1
    >>> Generation(3, (7, 9, 12, 8), parts=2).replicas
    ((7, 9), (12, 8))
    """

    number: int = 0
    members: tuple[int, ...] = ()
    planned: bool = False
    """It begins after the exchange in progress, at the end of a step; otherwise members abandon that exchange at once."""
    hold: bool = False
    """There are too few members: they end the exchange in progress, and wait for more at the end of the step."""
    since: tuple[int, ...] = ()
    """For each member the number of the first generation from which on it has been in all of them."""
    parts: int = 1
    host_size: int = 0
    """Each block of so many consecutive replicas is on one host; 0: unknown."""
    lost: int = 0
    """Replicas that were lost before it, since the rendezvous began."""

    @classmethod
    def after(
        cls, last: Generation, members: Sequence[int], planned: bool, hold: bool, parts: int = 1, host_size: int = 0, lost: int = 0
    ) -> Generation:
        """The generation that follows ``last``.

        >>> Generation.after(Generation(3, (7, 9), since=(1, 3)), [9, 12], False, False)
        Generation(number=4, members=(9, 12), planned=False, hold=False, since=(3, 4), parts=1, host_size=0, lost=0)
        """
        since = dict(zip(last.members, last.since, strict=True))
        begun = tuple(since.get(m, last.number + 1) for m in members)
        return cls(last.number + 1, tuple(members), planned, hold, begun, parts, host_size, lost)

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.members[k : k + self.parts] for k in range(0, len(self.members), self.parts))

    def replica(self, member: int) -> tuple[int, ...]:
        """The members of its replica, itself included; none where it is no member."""
        return next((replica for replica in self.replicas if member in replica), ())

    def rank(self, member: int) -> int:
        return self.members.index(member)

    def known(self, member: int, number: int) -> bool:
        """Whether a member that was given weights in generation ``number`` has those of the others: none can have completed an
        exchange in a later generation without it, because it has been in all of them."""
        return self.since[self.rank(member)] <= number

    def described(self) -> dict[str, Any]:
        return {
            "generation": self.number,
            "members": list(self.members),
            "planned": self.planned,
            "hold": self.hold,
            "since": list(self.since),
            "parts": self.parts,
            "host_size": self.host_size,
            "lost": self.lost,
        }

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> Generation:
        members = tuple(int(member) for member in metadata["members"])
        since = tuple(int(number) for number in metadata["since"])
        flags = bool(metadata["planned"]), bool(metadata["hold"])
        numbers = (int(metadata.get(name, other)) for name, other in (("parts", 1), ("host_size", 0), ("lost", 0)))
        return cls(int(metadata["generation"]), members, *flags, since, *numbers)


class Position(NamedTuple):
    """How far a member is with the exchanges, which all members make in the same order."""

    done: int
    """Exchanges that it has completed; −1: a newcomer, which has no weights yet."""
    held: bool = False
    """It has the result of the next one, too, but does not know whether all others have theirs."""
    kept: bool = False
    """It can give the result of the last one that it has completed to others."""


def agreed(positions: Sequence[Position]) -> int:
    """The number of exchanges that count, for members of a new generation that were at these positions.

    Members are one exchange apart at most. Where one has completed an exchange, every other takes its result, too: it holds it (no
    member completes such an exchange before all have told that they do), or whoever has completed it gives it to those that lack
    it. Where none has, all begin it again from what they had before it.

    >>> agreed([Position(4), Position(3, held=True), Position(-1)]), agreed([Position(3, held=True), Position(3)])
    (4, 3)
    >>> agreed([Position(4, kept=True), Position(3)])
    4
    """
    known = [position for position in positions if position.done >= 0]
    count = max((position.done for position in known), default=0)
    given = any(p.kept for p in known if p.done == count)
    behind = [p for p in known if p.done < count and not ((p.held or given) and p.done == count - 1)]
    assert not behind, f"{behind} cannot follow members that have completed {count} exchanges"
    return count
