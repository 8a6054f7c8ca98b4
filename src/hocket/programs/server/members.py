"""What a shard server knows of the workers beyond their pushes: who is here, what is requested, which mini-batches they hold.

And for observers the weights and figures at the end of every epoch, kept until one has seen them: workers do not stop meanwhile.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_MAX_BYTES = 1 << 28
_MAX_KEPT = 1024
"""Snapshots of epochs that no observer has seen, however small their weights are."""
_MAX_AHEAD = 1 << 16
"""The most by which a mini-batch of a worker may exceed the last one handed out: beyond, its numbers are those of another job."""
_MAX_REQUESTS = 64
"""The most open requests of observers, so that observers with new identities cannot use up memory."""


@dataclass
class Request:
    """What a worker asked for and has not got yet."""

    peer: bytes
    number: int
    step: int
    fetch: bool
    final: bool
    want: int
    """How many mini-batches it needs."""
    since: float
    notified: float
    """When it was last told to wait."""
    push: bool = False


@dataclass
class Member:
    """One worker as a shard server sees it."""

    incarnation: bytes = b""
    """Which process is this worker; empty when none has said hello since this server started."""
    seen: float = 0.0
    reached: int = 0
    """How many steps it has pushed, also when it is gone."""
    ended: bool = False
    """Whether it has no further mini-batch: it waits for the final weights, or has left."""
    left: bool = False
    """Whether it has said goodbye."""
    request: Request | None = None
    answered: int = -1
    """The number of the request answered last."""
    dispatched: list[int] = field(default_factory=list)
    """The mini-batches that came with the last answer, should it have to be given again."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Its account so far."""
    buffers: Tensor | None = None
    doing: str = ""
    """What its training thread does, as its last BEAT says."""


class BatchDispatcher:
    """Mini-batches by number, ``total`` of them: a free worker takes the next; those of a worker that is gone go to others.

    >>> dispatcher = BatchDispatcher(4)
    >>> dispatcher.take(0, 2), dispatcher.take(1, 1), dispatcher.done(0, [0]), dispatcher.give_back(0)
    ([0, 1], [2], 1, 1)
    >>> dispatcher.take(1, 5), dispatcher.take(1, 1)
    ([1, 3], [])
    """

    def __init__(self, total: int) -> None:
        self.total, self.following, self.counted = total, 0, 0
        self.returned: OrderedDict[int, None] = OrderedDict()
        """In the order in which they are handed out again."""
        self._held: dict[int, set[int]] = {}
        self._unlost: set[int] = set()
        """Those in ``returned`` that no worker has lost."""

    def take(self, worker: int, count: int) -> list[int]:
        """The next ``count`` numbers, fewer near the end."""
        numbers = []
        for _ in range(count):
            if self.returned:
                numbers.append(self.returned.popitem(last=False)[0])
                self._unlost.discard(numbers[-1])
            elif self.following < self.total:
                numbers.append(self.following)
                self.following += 1
        self._held.setdefault(worker, set()).update(numbers)
        return numbers

    @property
    def empty(self) -> bool:
        """Whether none is left to hand out."""
        return self.following >= self.total and not self.returned

    def done(self, worker: int, numbers: Sequence[int]) -> int:
        """A worker has pushed these; how many of them nobody had pushed before.

        After a restart from a snapshot another worker may have been given the same ones.

        >>> dispatcher = BatchDispatcher(4)
        >>> dispatcher.take(0, 2), dispatcher.done(1, [1]), dispatcher.done(0, [0, 1])
        ([0, 1], 1, 1)
        """
        counted = 0
        for held in (self._held.setdefault(worker, set()), *self._held.values()):
            counted += len(held.intersection(numbers))
            held.difference_update(numbers)
        self.counted += counted
        return counted

    def give_back(self, worker: int, numbers: Sequence[int] | None = None, lost: bool = True) -> int:
        """A worker is gone, or these of its numbers are lost: what it held of them goes to others; how many that were.

        Not ``lost``: it leaves them to others of its own accord.
        """
        held = self._held.setdefault(worker, set())
        returned = sorted(held if numbers is None else held.intersection(numbers))
        held.difference_update(returned)
        self.returned.update(dict.fromkeys(returned))
        self._unlost.update(() if lost else returned)
        return len(returned)

    def recover(self, worker: int, numbers: Sequence[int]) -> int:
        """A worker that was given up still has these: it keeps those that nobody has taken since; returns how many had counted as
        lost.

        After a restart from a snapshot a worker may hold numbers which this dispatcher has not handed out yet.

        >>> dispatcher = BatchDispatcher(6)
        >>> dispatcher.take(0, 2), dispatcher.give_back(0), dispatcher.recover(0, [1, 4]), dispatcher.take(1, 4)
        ([0, 1], 2, 1, [0, 2, 3, 5])
        """
        lost = 0
        for number in numbers:
            if number in self.returned:
                del self.returned[number]
                lost += number not in self._unlost
                self._unlost.discard(number)
            elif self.following <= number < min(self.total, self.following + _MAX_AHEAD):
                skipped = range(self.following, number)
                self.returned.update(dict.fromkeys(skipped))
                self._unlost.update(skipped)
                self.following = number + 1
            else:
                continue
            self._held.setdefault(worker, set()).add(number)
        return lost

    def held(self, worker: int) -> list[int]:
        return sorted(self._held.get(worker, ()))

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from, with the numbers that each worker holds."""
        held = {worker: sorted(numbers) for worker, numbers in self._held.items() if numbers}
        numbers = {"returned": list(self.returned), "unlost": sorted(self._unlost), "held": held}
        return {"total": self.total, "following": self.following, "counted": self.counted, **numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; ``total`` stays this one's, so that a run can be made longer."""
        self.following, self.counted = state["following"], state["counted"]
        self.returned = OrderedDict.fromkeys(state["returned"])
        self._held = {int(worker): set(numbers) for worker, numbers in state["held"].items()}
        self._unlost = set(state["unlost"])


@dataclass
class EpochSnapshot:
    """The weights and the figures when an epoch's worth of mini-batches was done."""

    weights: tuple[Tensor, ...]
    buffers: Tensor | None
    figures: dict[str, Any]


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
        """Keep the snapshot of ``take()`` if ``progress`` has passed the end of an epoch; the oldest one is dropped where there
        are many."""
        if not self.per_epoch:
            return
        ended = -(-self.total // self.per_epoch) if progress >= self.total else progress // self.per_epoch
        if ended > self.done:
            self.done = ended
            fresh = self._kept[ended] = take()
            most = min(_MAX_BYTES // max(sum(t.nbytes for t in fresh.weights), 1), _MAX_KEPT)
            while len(self._kept) > max(2, most):
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
