"""How old gradients were when they were applied: ``staleness`` of asynchronous runs, summed over epochs and seeds.

The age of a gradient is the number of updates between the weights that it was computed at and those that it changed; without
servers, the number of others' contributions that came to what the worker holds meanwhile. Its histogram is drawn in columns of one
age each, or where ages are long-tailed in columns that hold more of them the older they are.
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
class Ages:
    """``counts`` are pairs of an age and how many gradients had it, the youngest first; there is at least one."""

    counts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> Ages | None:
        """The sum over the epochs of one or several runs; None where none recorded any.

        >>> Ages.of([{"staleness": {"0": 1, "3": 5}}, {"staleness": {"3": 2}}, {}])
        Ages(counts=((0, 1), (3, 7)))
        """
        sums: Counter[int] = Counter()
        for line in lines:
            found = line.get("staleness")
            for age, count in found.items() if isinstance(found, dict) else ():
                if _is_age(age) and isinstance(count, int) and 0 < count < 10**_DIGITS:
                    sums[int(age)] += count
        return cls(tuple(sorted(sums.items()))) if sums else None

    @property
    def total(self) -> int:
        """How many gradients there were."""
        return sum(count for _, count in self.counts)

    @property
    def median(self) -> float:
        """The age in the middle, or the mean of the two there.

        >>> Ages(((0, 1), (3, 1))).median, Ages(((0, 1), (3, 2))).median
        (1.5, 3.0)
        """
        return (self._of((self.total - 1) // 2) + self.middle) / 2

    @property
    def middle(self) -> int:
        """The age of the gradient in the middle, the older one of two."""
        return self._of(self.total // 2)

    @property
    def mean(self) -> float:
        """The mean age."""
        return sum(age * count for age, count in self.counts) / self.total

    @property
    def largest(self) -> int:
        """The greatest age."""
        return self.counts[-1][0]

    def _of(self, place: int) -> int:
        """The age of a gradient by its place among all, the youngest first."""
        until = list(accumulate(count for _, count in self.counts))
        return self.counts[bisect_right(until, place)][0]

    def __str__(self) -> str:
        return f"median {whole(self.median)}, largest {whole(self.largest)}"

    def columns(self, edges: Sequence[int]) -> list[int]:
        """How many gradients fall into each column."""
        sums = [0] * (len(edges) - 1)
        for age, count in self.counts:
            sums[column_of(age, edges)] += count
        return sums


def column_of(age: int, edges: Sequence[int]) -> int:
    """Which column an age falls into."""
    return bisect_right(edges, age) - 1


def place_of(age: int, edges: Sequence[int]) -> float:
    """Where an age lies, counted in columns: that of a column with one age is its number.

    >>> place_of(3, [0, 1, 2, 3, 4]), place_of(3, [0, 1, 2, 6]), place_of(5, [0, 1, 2, 6])
    (3.0, 1.875, 2.375)
    """
    column = column_of(age, edges)
    return column - 0.5 + (age + 0.5 - edges[column]) / (edges[column + 1] - edges[column])


def column_edges(found: Iterable[Ages | None]) -> list[int]:
    """The age that each column begins with, and the one after all of them; no column holds fewer ages than the one before it.

    >>> column_edges([Ages(((3, 1),)), None])
    [0, 1, 2, 3, 4]
    >>> column_edges([Ages(((900, 1),))])[::12]
    [0, 12, 48, 247]
    """
    largest = max((ages.largest for ages in found if ages), default=0)
    growth = 0.0
    while True:
        edges = [0]
        while edges[-1] <= largest and len(edges) <= _MOST_COLUMNS:
            edges.append(edges[-1] + max(1, int(edges[-1] * growth)))
        if edges[-1] > largest:
            return edges
        growth += 0.05


def _is_age(text: Any) -> bool:
    return isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= _DIGITS
