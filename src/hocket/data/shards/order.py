"""The order of samples: a pure function of (seed, epoch, position), and how a round of positions is divided among workers.

With ``S`` samples, position ``p`` is place ``p mod S`` of epoch ``p div S``, so a cursor is one integer. In each epoch

1. the shards are permuted, and their samples thought of as one sequence;
2. the sequence is cut into ``lanes`` equal parts; place ``p`` is row ``p div lanes`` of lane ``p mod lanes``;
3. in each lane the rows are permuted inside windows of ``window`` rows.

Each step is a bijection, so that each sample is there once per epoch, whatever the sizes of the shards. ``lanes`` samples in
succession come from as many parts of the data set, and a sample moves inside its window: this shuffles as well as a buffer of
``lanes · window`` samples that are drawn from ``lanes`` shards, and at any time only about two shards per lane are read.

A round is divided by lanes: worker ``i`` gets the ``i``-th part of its positions, sorted by lane. So a worker reads few shards as
long as there are no more workers than lanes, and the samples of a round do not depend on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hocket import noise
from hocket.data.partition import proportional
from hocket.data.shards.index import Index
from hocket.errors import HocketError

LANES, _SHUFFLED = 16, 8


class ShardOrder:
    """The order of the samples of shards with ``counts`` samples each.

    >>> order = ShardOrder([3, 5], seed=0, lanes=2, window=2)
    >>> sorted(order.at(0, 8).tolist()), sorted(order.at(5, 13).tolist()) == sorted(order.at(0, 8).tolist())
    ([0, 1, 2, 3, 4, 5, 6, 7], False)
    """

    def __init__(
        self, counts: Sequence[int], seed: int, lanes: int | None = None, window: int | None = None, shuffle: bool = True
    ) -> None:
        self.counts, self.seed, self.shuffle = np.asarray(counts, np.int64), seed, shuffle
        self.samples = int(self.counts.sum())
        if not self.samples:
            raise HocketError("The shards hold no samples: pack a source that has some.")
        if min(lanes or 1, window or 1) < 1:
            raise HocketError(f"lanes and window must be at least 1; got {lanes} and {window}: raise them.")
        self.lanes = min(LANES if lanes is None else lanes, self.samples) if shuffle else 1
        self.window = (math.ceil(self.samples / len(self.counts)) if window is None else window) if shuffle else self.samples
        self._ends = np.cumsum(self.counts)
        self._blocks: dict[tuple[int, int], np.ndarray] = {}

    def at(self, start: int, stop: int) -> np.ndarray:
        """The samples at positions ``start`` to ``stop``, by their number in the order of the shards."""
        parts, size = [np.empty(0, np.int64)], self.lanes * self.window
        while start < stop:
            epoch, place = divmod(start, self.samples)
            number, offset = divmod(place, size)
            part = self._block(epoch, number)[offset : offset + stop - start]
            parts.append(part)
            start += len(part)
        return np.concatenate(parts)

    @classmethod
    def of(cls, index: Index, seed: int, lanes: int | None = None, window: int | None = None, shuffle: bool = True) -> ShardOrder:
        """That of an index. Shards that were shuffled when they were packed get windows of an eighth of a shard, so that the first
        batch needs an eighth of a shard per lane; others those of a whole shard."""
        if window is None and index.about.get("shuffled"):
            window = max(1, math.ceil(sum(index.counts) / len(index.counts) / _SHUFFLED))
        return cls(index.counts, seed, lanes, window, shuffle)

    def open_pieces(self, workers: int, pieces: int, ahead: int = 0) -> int:
        """How many of all ``pieces`` that data are fetched in a worker reads, or is about to read, at a time: in each lane those of
        a window and the next one, and of ``ahead`` positions of all workers that are being decoded."""
        own = self.lanes if workers == 1 else min(self.lanes, -(-self.lanes // workers) + 2)  # and those at the edges of its part
        rows = min(2 * self.window, self.samples // self.lanes) + ahead / self.lanes
        return min(pieces, own * (2 + math.ceil(rows * pieces / self.samples)))

    def lanes_of(self, start: int, stop: int) -> np.ndarray:
        """The lanes of positions ``start`` to ``stop``."""
        return np.arange(start, stop) % self.samples % self.lanes

    def dealt(self, start: int, stop: int) -> np.ndarray:
        """The samples at positions ``start`` to ``stop``, sorted by lane: a round, in the order in which workers take it."""
        return self.at(start, stop)[np.argsort(self.lanes_of(start, stop), kind="stable")]

    def _block(self, epoch: int, number: int) -> np.ndarray:
        """The samples of the ``number``-th window of all lanes, in the order of their positions."""
        if (epoch, number) not in self._blocks:
            while len(self._blocks) > 1:  # what looks ahead is in the next block already
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[epoch, number] = self._make_block(epoch, number)
        return self._blocks[epoch, number]

    def _make_block(self, epoch: int, number: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.samples)
        rows, longer = divmod(self.samples, self.lanes)
        lane = np.arange(self.lanes)
        first = number * self.window
        lengths = np.clip(rows + (lane < longer) - first, 0, self.window)  # of this window in each lane, alike up to one
        keys = torch.tensor([noise.fold(self.seed, epoch, number, int(i), 0x1A9E) for i in lane])
        within = _permutations(keys, lengths)
        places = (lane * rows + np.minimum(lane, longer))[:, None] + first + within
        # Lanes that are one shorter come last, so what they lack is at the end.
        return self._samples(epoch, places.T.ravel()[: int(lengths.sum())])

    def _samples(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """The samples at these places of the sequence of permuted shards."""
        key = torch.tensor([noise.fold(self.seed, epoch, 0x5A4D)])
        shards = _permutations(key, np.array([len(self.counts)]))[0]
        ends = np.cumsum(self.counts[shards])
        found = np.searchsorted(ends, places, side="right")
        before_here, before_there = ends[found] - self.counts[shards][found], self._ends[shards] - self.counts[shards]
        return places - before_here + before_there[found]


def _permutations(keys: Tensor, lengths: np.ndarray) -> np.ndarray:
    """A row per key: a permutation of ``0 … length−1``, then the rest in order."""
    most = int(lengths.max())
    drawn = noise.bits(keys, most).to(torch.int64)
    drawn[torch.arange(most) >= torch.from_numpy(lengths)[:, None]] = 2**40
    return drawn.argsort(dim=1, stable=True).numpy()


def round_sizes(order: ShardOrder, cursor: int, workers: int, batch_size: int, shares: Sequence[float] | None = None) -> list[int]:
    """How many samples each worker takes in the round that begins at ``cursor``; the next round begins after all of them.

    A round has ``workers · batch_size`` samples. An epoch's last round takes all that is left of it: fewer samples, or up to one
    more per worker, so that every worker has one. Where fewer samples than workers are left (because the number of workers
    changed), the round goes on into the next epoch.

    >>> order = ShardOrder([10], seed=0)
    >>> round_sizes(order, 0, 2, 3), round_sizes(order, 6, 2, 3), round_sizes(order, 3, 3, 2), round_sizes(order, 9, 2, 3)
    ([3, 3], [2, 2], [3, 2, 2], [1, 1])
    """
    left, size = order.samples - cursor % order.samples, workers * batch_size
    if left < workers:
        size = workers
    elif left < size + workers:
        size = left
    return proportional(size, [1.0] * workers if shares is None else shares)


def parts(order: ShardOrder, cursor: int, sizes: Sequence[int]) -> list[np.ndarray]:
    """The samples of each worker in the round at ``cursor``."""
    return np.split(order.dealt(cursor, cursor + sum(sizes)), np.cumsum(sizes)[:-1])


def check_division(workers: int, worker: int, batch_size: int, shares: Sequence[float] | None, samples: int) -> None:
    """Refuse a division that cannot be."""
    if workers < 1 or batch_size < 1 or not 0 <= worker < workers:
        got = f"got worker {worker} of {workers} and batch_size {batch_size}"
        raise HocketError(f"A worker is a number from 0 to workers − 1, and batch_size at least 1; {got}: correct them.")
    if workers > samples:
        raise HocketError(f"{samples} samples are too few for {workers} workers: use at most {samples} workers or more data.")
    if shares is not None and (len(shares) != workers or not all(0 < share < math.inf for share in shares)):
        raise HocketError(f"Shares are {workers} numbers above 0, one for each worker; got {list(shares)}: correct them.")
