"""How long the steps of each worker took, in a histogram of fixed size: p50 and p99, and who is slowest.

A bin is a factor of 2^(1/8) wide, so a percentile is right within 4.5 %. Only computing counts: what a worker waited for others is
not its own time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_PER_OCTAVE = 8
_SHORTEST_S = 2.0**-20
_BINS = 40 * _PER_OCTAVE
"""From a microsecond to twelve days."""
_PENDING = 64
"""Steps are binned so many at a time."""


def bin_of(seconds: float) -> int:
    """The bin that a step of ``seconds`` belongs to."""
    return min(max(int(_PER_OCTAVE * math.log2(max(seconds, _SHORTEST_S) / _SHORTEST_S)), 0), _BINS - 1)


def percentile(counts: Mapping[int, int], share: float) -> float:
    """The middle of the bin below which ``share`` of the steps lie; 0 without steps.

    >>> counts = {bin_of(0.1): 98, bin_of(2.0): 2}
    >>> round(percentile(counts, 0.5), 2), round(percentile(counts, 0.99), 1)
    (0.1, 2.1)
    """
    rest = share * sum(counts.values())
    for place in sorted(counts):
        rest -= counts[place]
        if rest <= 0 and counts[place]:
            return float(_SHORTEST_S * 2 ** ((place + 0.5) / _PER_OCTAVE))
    return 0.0


class StepTimes:
    """Of ``rows`` workers.

    >>> times = StepTimes(2)
    >>> for _ in range(100):
    ...     times.add(torch.tensor([0.1, 0.4]))
    >>> [[round(s, 2) for s in worker] for worker in times.percentiles().tolist()]
    [[0.1, 0.1], [0.4, 0.4]]
    """

    def __init__(self, rows: int) -> None:
        self._counts = torch.zeros(rows, _BINS, dtype=torch.int32)
        self._pending: list[Tensor] = []

    def add(self, seconds: Tensor) -> None:
        """One step of each worker, float ``[rows]``; the tensor is kept for a while, so do not write to it."""
        self._pending.append(seconds)
        if len(self._pending) == _PENDING:
            self._settle()

    def percentiles(self) -> Tensor:
        """p50 and p99 of each worker, float64 ``[rows, 2]``; zeros without steps."""
        self._settle()
        found = []
        for row in self._counts:
            counts = {place: int(row[place]) for place in row.nonzero().flatten().tolist()}
            found.append([percentile(counts, share) for share in (0.5, 0.99)])
        return torch.tensor(found, dtype=torch.float64)

    def state_dict(self) -> Tensor:
        """A tensor that is never changed in place."""
        self._settle()
        return self._counts

    def load_state_dict(self, state: Tensor) -> None:
        self._counts, self._pending = state, []

    def _settle(self) -> None:
        if self._pending:
            seconds = torch.stack(self._pending, 1).to(torch.float64).clamp(min=_SHORTEST_S)
            places = (_PER_OCTAVE * torch.log2(seconds / _SHORTEST_S)).long().clamp(0, _BINS - 1)
            self._counts = self._counts.scatter_add(1, places, torch.ones_like(places, dtype=torch.int32))
            self._pending = []


def described(p50_s: Sequence[float], p99_s: Sequence[float], first: int = 0) -> dict[str, Any]:
    """The step times of workers from number ``first`` on, as metrics and summaries hold them; nothing where none were measured.

    >>> described([0.1, 0.25], [0.2, 0.3])
    {'p50_s': [0.1, 0.25], 'p99_s': [0.2, 0.3], 'slowest': 1}
    """
    if not any(p50_s):
        return {}
    rounded = [[float(f"{s:.4g}") for s in column] for column in (p50_s, p99_s)]
    return {"p50_s": rounded[0], "p99_s": rounded[1], "slowest": first + max(range(len(p50_s)), key=lambda k: p50_s[k])}
