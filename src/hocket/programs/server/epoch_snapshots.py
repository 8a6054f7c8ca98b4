"""The weights and figures at the end of every epoch, kept until an observer has seen them: workers do not stop meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_MAX_BYTES = 1 << 28
_MAX_REQUESTS = 64
"""Observers that come under new identities all the time must not make a server grow."""


@dataclass
class EpochSnapshot:
    """The weights and the figures when an epoch's worth of mini-batches was done."""

    weights: tuple[Tensor, ...]
    buffers: Tensor | None
    figures: dict[str, Any]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.weights)


@dataclass
class SnapshotRequest:
    """An observer asks for the weights after an epoch (0: as they are now), or as they are at time ``until``."""

    peer: bytes
    number: int
    epoch: int
    until: float


class EpochSnapshots:
    """Those of ``total`` mini-batches, ``per_epoch`` in an epoch; ``done`` epochs are over."""

    def __init__(self, per_epoch: int | None = None, total: int | None = None, requests: Sequence[SnapshotRequest] = ()) -> None:
        self.per_epoch, self.total, self.done = per_epoch or 0, total or 0, 0
        self.requests = list(requests)
        self._kept: dict[int, EpochSnapshot] = {}

    def look(self, progress: int, take: Callable[[], EpochSnapshot]) -> None:
        """Keep what ``take`` gives if ``progress`` has come to the end of an epoch; the oldest is dropped where there are many."""
        while self.done * self.per_epoch < self.total and progress >= min((self.done + 1) * self.per_epoch, self.total):
            self.done += 1
            fresh = self._kept[self.done] = take()
            while len(self._kept) > max(2, _MAX_BYTES // max(fresh.bytes, 1)):
                del self._kept[min(self._kept)]

    def request(self, request: SnapshotRequest) -> None:
        """An observer has one request at a time; the oldest is dropped where there are many."""
        self.requests = [*(r for r in self.requests if r.peer != request.peer), request][-_MAX_REQUESTS:]

    def due(self, now: float) -> list[SnapshotRequest]:
        """The requests that can be answered, or that have waited long enough; they are removed."""
        due = [r for r in self.requests if r.epoch <= self.done or r.until <= now]
        self.requests = [r for r in self.requests if r not in due]
        return due

    def show(self, epoch: int) -> EpochSnapshot | None:
        """The snapshot after ``epoch``, or the next that is kept; earlier ones are dropped."""
        self._kept = {e: kept for e, kept in self._kept.items() if e >= epoch}
        return self._kept[min(self._kept)] if epoch and self._kept else None
