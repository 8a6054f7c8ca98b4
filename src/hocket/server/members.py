"""What a shard knows of the workers beyond their pushes: who is here, what is asked, which mini-batches they hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Request:
    """What a peer asked for and has not got yet."""

    peer: bytes
    number: int
    step: int
    fetch: bool
    final: bool = False
    want: int = 0
    """How many mini-batches it needs."""
    since: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)
    """When it last heard that it has to wait."""


@dataclass
class Member:
    """One worker as a shard sees it."""

    life: bytes = b""
    """Which process plays this worker; empty when none has said hello since this shard started."""
    seen: float = field(default_factory=time.monotonic)
    reached: int = 0
    """How many steps it has pushed, also when it is gone."""
    ended: bool = False
    """Whether it has no further mini-batch: it waits for the last truth, or has left."""
    left: bool = False
    """Whether it has said goodbye."""
    request: Request | None = None
    answered: int = -1
    dealt: list[int] = field(default_factory=list)
    """The mini-batches that came with the last answer, should it have to be given again."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Its ledger so far."""
    buffers: Tensor | None = None


class BatchDispatcher:
    """Mini-batches by number, ``total`` of them: who is free takes the next; those of a worker that is gone go to others.

    >>> batches = BatchDispatcher(4)
    >>> batches.deal(0, 2), batches.deal(1, 1), batches.done(0, [0]), batches.gone(0), batches.deal(1, 5), batches.deal(1, 1)
    ([0, 1], [2], 1, 1, [1, 3], [])
    """

    def __init__(self, total: int, following: int = 0, back: Sequence[int] = (), counted: int = 0) -> None:
        self.total, self.following, self.back, self.counted = total, following, list(back), counted
        self._held: dict[int, set[int]] = {}

    def deal(self, worker: int, count: int) -> list[int]:
        """The next ``count`` numbers, fewer near the end."""
        numbers = []
        for _ in range(count):
            if self.back:
                numbers.append(self.back.pop(0))
            elif self.following < self.total:
                numbers.append(self.following)
                self.following += 1
        self._held.setdefault(worker, set()).update(numbers)
        return numbers

    @property
    def empty(self) -> bool:
        """Whether there is none left to deal."""
        return self.following >= self.total and not self.back

    def done(self, worker: int, numbers: Sequence[int]) -> int:
        """A worker has pushed these; how many of them it held (others were done by somebody else meanwhile)."""
        held = self._held.setdefault(worker, set())
        counted = len(held.intersection(numbers))
        held.difference_update(numbers)
        self.counted += counted
        return counted

    def gone(self, worker: int, numbers: Sequence[int] | None = None) -> int:
        """A worker is gone, or these of its numbers are lost: what it held of them goes back; how many that were."""
        held = self._held.setdefault(worker, set())
        back = sorted(held if numbers is None else held.intersection(numbers))
        held.difference_update(back)
        self.back += back
        return len(back)

    def state_dict(self) -> dict[str, Any]:
        """To go on from; who holds what is forgotten, for the pushes since are lost too."""
        held = sorted({n for numbers in self._held.values() for n in numbers})
        return {"total": self.total, "following": self.following, "back": [*self.back, *held], "counted": self.counted}
