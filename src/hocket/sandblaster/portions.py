"""Which worker computes which portion of the batch, and what counts: exactly one gradient of every portion, on all shards or on
none.

The batch is cut into portions much smaller than a worker's equal share. A worker that is free gets the next one. When none is left,
free workers get second copies of those that have been out longest; the first answer wins. A lost worker's portions go back.

A portion's way, as the coordinator sees it (it sees names and numbers alone):

    waiting → out at one or two workers → reported by one: the first is told to keep it, any other to drop it
            → held in that worker's sum → sent to the shards as a *bundle*, staged there → staged on all shards: it counts

A worker adds what it may keep to a sum of its own, and sends that sum as soon as its previous bundle has been staged everywhere:
one portion at a time where the links are fast, several where they are slow. A shard adds a staged bundle to its total only when
the coordinator says so, which it does when *every* shard has it. So if a worker dies between sending to two shards, its bundle
counts on neither and its portions are computed again. A shard's memory for this is one total and at most one bundle per worker.

The sum depends on who computed what only by rounding: float64 totals agree to about 1e-14, float32 ones to about 1e-6 of the sum of
magnitudes. With ``exact`` every bundle is one portion and shards add them over a fixed tree: the bits do not depend on it at all.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from hocket.errors import HocketError
from hocket.sandblaster.vectors import Order, cuts

COPIES = 2


@dataclass(frozen=True)
class Answer:
    """The answer to a worker: whether to keep what it reported, as which bundle to send its sum, what to compute next."""

    keep: bool = False
    bundle: int | None = None
    portion: int | None = None


@dataclass
class Counts:
    """Portions given out, those of them as second copies, those computed or begun in vain, and workers lost."""

    issued: int = 0
    duplicated: int = 0
    wasted: int = 0
    lost: int = 0


@dataclass
class _Bundle:
    portions: list[int]
    missing: set[int]


@dataclass
class Dispenser:
    """One evaluation's portions. It knows no clock: its calls are what happens, in the order in which it happens.

    >>> dispenser = Dispenser(portions=2, shards=1)
    >>> dispenser.next(0), dispenser.next(1)
    (0, 1)
    >>> dispenser.report(0, 0, loss=0.5)  # kept, sent on at once, and a copy of the other portion meanwhile
    Answer(keep=True, bundle=0, portion=1)
    >>> dispenser.staged(0, 0, shard=0)
    [('count', 0, 0, 0)]
    """

    portions: int
    shards: int
    backups: bool = True
    exact: bool = False
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._waiting = deque(range(self.portions))
        self._out: dict[int, list[int]] = {}  # portion: the workers computing it, portions in order of issue
        self._losses: dict[int, float] = {}  # of portions that a worker was told to keep
        self._held: dict[int, list[int]] = {}  # by worker: portions in its sum
        self._bundles: dict[tuple[int, int], _Bundle] = {}  # on their way to the shards
        self._sent = 0
        self._counted: set[int] = set()
        self._gone: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether every portion counts."""
        return len(self._counted) == self.portions

    @property
    def loss(self) -> float:
        """The sum over all portions, correctly rounded: it depends on no order."""
        losses = list(self._losses.values())
        return math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)

    def next(self, worker: int) -> int | None:
        """A portion for a free worker, None if there is nothing for it to do now."""
        if worker in self._gone:
            return None
        if self._waiting:
            portion = self._waiting.popleft()
        else:
            copies = (p for p, at in self._out.items() if p not in self._losses and len(at) < COPIES and worker not in at)
            found = next(copies, None) if self.backups else None
            if found is None:
                return None
            portion = found
            self.counts.duplicated += 1
        self.counts.issued += 1
        self._out.setdefault(portion, []).append(worker)
        return portion

    def report(self, worker: int, portion: int, loss: float) -> Answer | None:
        """A worker has computed a portion; None when it was not asked to, or has reported it before."""
        if worker not in self._out.get(portion, ()):
            return None
        self._leave(portion, worker)
        keep = portion not in self._losses
        if keep:
            self._losses[portion] = loss
            self._held.setdefault(worker, []).append(portion)
        else:
            self.counts.wasted += 1
        return Answer(keep, self.bundle(worker), self.next(worker))

    def bundle(self, worker: int) -> int | None:
        """The number under which a worker shall send its sum now, None if it shall not."""
        if not self._held.get(worker) or (not self.exact and self.under_way(worker)):
            return None
        number, self._sent = self._sent, self._sent + 1
        self._bundles[worker, number] = _Bundle(self._held.pop(worker), set(range(self.shards)))
        return number

    def under_way(self, worker: int) -> list[int]:
        """The numbers of a worker's bundles that are not staged everywhere."""
        return [number for w, number in self._bundles if w == worker]

    def staged(self, worker: int, number: int, shard: int) -> list[Order]:
        """A shard has a bundle; the orders that make it count, for all shards, if it is the last one to have it."""
        bundle = self._bundles.get((worker, number))
        if bundle is None:
            return []
        bundle.missing.discard(shard)
        if bundle.missing:
            return []
        del self._bundles[worker, number]
        self._counted.update(bundle.portions)
        return [("count", worker, number, bundle.portions[0])]

    def lost(self, worker: int) -> list[Order]:
        """A worker is gone: its portions that do not count yet are issued again; returns the orders to discard its staged
        bundles."""
        if worker in self._gone:
            return []
        self._gone.add(worker)
        self.counts.lost += 1
        numbers = self.under_way(worker)
        back = self._held.pop(worker, [])
        for number in numbers:
            back += self._bundles.pop((worker, number)).portions
        for portion in back:
            del self._losses[portion]
        self.counts.wasted += len(back)
        running = [p for p, at in self._out.items() if worker in at]
        for portion in running:
            self._leave(portion, worker)
        back = [p for p in {*back, *running} if p not in self._out and p not in self._losses]
        self._waiting.extendleft(sorted(back, reverse=True))
        return [("discard", worker, number) for number in numbers]

    def _leave(self, portion: int, worker: int) -> None:
        at = self._out.get(portion, [])
        if worker in at:
            at.remove(worker)
        if not at:
            self._out.pop(portion, None)


def cut(samples: int, portions: int) -> list[slice]:
    """The samples of every portion: consecutive, as equal as can be.

    >>> cut(5, 2)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    if not 1 <= portions <= samples:
        raise HocketError(f"{samples} samples cannot be cut into {portions} portions: use fewer workers or portions_per_worker.")
    return cuts(samples, portions)
