"""The truth at the end of every epoch, kept until it was shown: workers do not stop while somebody evaluates it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_MOST_BYTES = 1 << 28
_MOST_WISHES = 64
"""Observers that come under new names all the time must not make a shard grow."""


@dataclass
class Milestone:
    """The truth and the figures when an epoch's worth of mini-batches was done."""

    weights: tuple[Tensor, ...]
    buffers: Tensor | None
    figures: dict[str, Any]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.weights)


@dataclass
class Wish:
    """An observer's wish for the truth after an epoch (0: as it is now), or as it is at ``until``."""

    peer: bytes
    number: int
    epoch: int
    until: float


class Milestones:
    """Those of ``total`` mini-batches, ``per_epoch`` in an epoch; ``done`` epochs are over."""

    def __init__(self, per_epoch: int | None = None, total: int | None = None, wishes: Sequence[Wish] = ()) -> None:
        self.per_epoch, self.total, self.done = per_epoch or 0, total or 0, 0
        self.wishes = list(wishes)
        self._kept: dict[int, Milestone] = {}

    def look(self, progress: int, now: Callable[[], Milestone]) -> None:
        """Keep what there is ``now`` if ``progress`` has come to the end of an epoch; the oldest gives way to too many."""
        while self.done * self.per_epoch < self.total and progress >= min((self.done + 1) * self.per_epoch, self.total):
            self.done += 1
            fresh = self._kept[self.done] = now()
            while len(self._kept) > max(2, _MOST_BYTES // max(fresh.bytes, 1)):
                del self._kept[min(self._kept)]

    def wish(self, wish: Wish) -> None:
        """An observer has one at a time; the oldest gives way to too many."""
        self.wishes = [*(w for w in self.wishes if w.peer != wish.peer), wish][-_MOST_WISHES:]

    def due(self) -> list[Wish]:
        """The wishes that can be granted, or that have waited long enough; they are gone with that."""
        now = time.monotonic()
        due = [w for w in self.wishes if w.epoch <= self.done or w.until <= now]
        self.wishes = [w for w in self.wishes if w not in due]
        return due

    def show(self, epoch: int) -> Milestone | None:
        """The truth after ``epoch``, or the next that is kept; earlier ones are dropped."""
        self._kept = {e: kept for e, kept in self._kept.items() if e >= epoch}
        return self._kept[min(self._kept)] if epoch and self._kept else None
