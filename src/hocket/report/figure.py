"""A figure of several runs: mean and spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hocket.report.figures import around


@dataclass(frozen=True)
class Figure:
    """A mean over seeds, and their standard deviation where there are several."""

    mean: float
    spread: float | None = None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Figure | None:
        """None where any of the values is missing.

        >>> Figure.of([1.0, 3.0]), Figure.of([1.0]), Figure.of([1.0, None])
        (Figure(mean=2.0, spread=1.4142135623730951), Figure(mean=1.0, spread=None), None)
        """
        known = [v for v in values if v is not None]
        if not known or len(known) < len(values):
            return None
        return cls(math.fsum(known) / len(known), statistics.stdev(known) if len(known) > 1 else None)

    def scaled(self, scale: float) -> Figure:
        """The same in another unit."""
        return Figure(self.mean * scale, None if self.spread is None else self.spread * scale)

    def text(self, digits: int | None = None) -> str:
        """Mean and spread."""
        return around(self.mean, self.spread, digits)
