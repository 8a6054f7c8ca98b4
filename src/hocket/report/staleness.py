"""The staleness of gradients in asynchronous runs, summed over epochs and seeds.

The staleness of a gradient is the number of updates between the weights that it was computed at and those that it changed; without
servers, the number of other workers' contributions that reached the worker meanwhile. A histogram has one column per value or, for
long-tailed distributions, columns that cover more values the larger these are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hocket.report.figures import whole

_DIGITS = 15
_MOST_COLUMNS = 60


@dataclass(frozen=True)
class Staleness:
    """``counts`` are pairs of a value and how many gradients had it, by value; there is at least one pair."""

    counts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> Staleness | None:
        """The sum over the epochs of one or several runs; None where none recorded any.

        >>> Staleness.of([{"staleness": {"0": 1, "3": 5}}, {"staleness": {"3": 2}}, {}])
        Staleness(counts=((0, 1), (3, 7)))
        """
        sums: Counter[int] = Counter()
        for line in lines:
            found = line.get("staleness")
            for value, count in found.items() if isinstance(found, dict) else ():
                is_value = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _DIGITS
                if is_value and isinstance(count, int) and 0 < count < 10**_DIGITS:
                    sums[int(value)] += count
        return cls(tuple(sorted(sums.items()))) if sums else None

    @property
    def total(self) -> int:
        return sum(count for _, count in self.counts)

    @property
    def median(self) -> float:
        """The median: the value in the middle, or the mean of the two there.

        >>> Staleness(((0, 1), (3, 1))).median, Staleness(((0, 1), (3, 2))).median
        (1.5, 3.0)
        """
        return (self._of((self.total - 1) // 2) + self.middle) / 2

    @property
    def middle(self) -> int:
        """The value in the middle, the larger of two."""
        return self._of(self.total // 2)

    @property
    def mean(self) -> float:
        return sum(value * count for value, count in self.counts) / self.total

    @property
    def largest(self) -> int:
        return self.counts[-1][0]

    def _of(self, place: int) -> int:
        """The value at a position, with all gradients in ascending order."""
        until = list(accumulate(count for _, count in self.counts))
        return self.counts[bisect_right(until, place)][0]

    def __str__(self) -> str:
        return f"median {whole(self.median)}, largest {whole(self.largest)}"

    def columns(self, edges: Sequence[int]) -> list[int]:
        """How many gradients fall into each column."""
        sums = [0] * (len(edges) - 1)
        for value, count in self.counts:
            sums[column_of(value, edges)] += count
        return sums


def column_of(value: int, edges: Sequence[int]) -> int:
    return bisect_right(edges, value) - 1


def place_of(value: int, edges: Sequence[int]) -> float:
    """The horizontal position of a value, in columns; for a column of one value it is the column's number.

    >>> place_of(3, [0, 1, 2, 3, 4]), place_of(3, [0, 1, 2, 6]), place_of(5, [0, 1, 2, 6])
    (3.0, 1.875, 2.375)
    """
    column = column_of(value, edges)
    return column - 0.5 + (value + 0.5 - edges[column]) / (edges[column + 1] - edges[column])


def column_edges(found: Iterable[Staleness | None]) -> list[int]:
    """The first value of each column, and the one after the last; no column covers fewer values than the one before it.

    >>> column_edges([Staleness(((3, 1),)), None])
    [0, 1, 2, 3, 4]
    >>> column_edges([Staleness(((900, 1),))])[::12]
    [0, 12, 48, 247]
    """
    largest = max((one.largest for one in found if one), default=0)
    growth = 0.0
    while True:
        edges = [0]
        while edges[-1] <= largest and len(edges) <= _MOST_COLUMNS:
            edges.append(edges[-1] + max(1, int(edges[-1] * growth)))
        if edges[-1] > largest:
            return edges
        growth += 0.05
