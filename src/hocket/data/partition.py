"""Which worker gets which samples: a pure function of (samples, workers, batch_size, seed, epoch), the same on every process.

Every epoch has one permutation of all samples, drawn from ``fold(seed, epoch)``, or ``order`` gives one. Round ``r`` takes the next
``workers · batch_size`` of it and worker ``i`` the ``i``-th consecutive part. The samples left at the end are divided as evenly as
possible (``last="even"``), so that sizes differ by at most one, or dropped: always under ``last="drop"``, and when fewer samples
than workers are left. So all workers have the same number of rounds. Where an ``order`` is given, ``last="even"`` drops nothing:
fewer samples than workers are added to the round before; where there is none, some workers have no sample in that round.

With ``owners`` every sample belongs to one worker (:mod:`hocket.data.label_skew`), and a round takes the next ``batch_size`` of
each worker's own; the last one takes all that are left.

Where workers differ in speed, rounds can be divided in other proportions: of the same size, with at least one sample per worker.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from hocket import noise
from hocket.data.base import Order
from hocket.errors import HocketError

Last = Literal["even", "drop"]


@dataclass(frozen=True, eq=False)
class Round:
    """The samples of one step: ``indices[i]`` are those of worker ``i``."""

    indices: list[Tensor]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each worker."""
        return tuple(len(part) for part in self.indices)

    @property
    def even(self) -> bool:
        """Whether all workers have equally many."""
        return len(set(self.sizes)) == 1

    @cached_property
    def weights(self) -> list[float]:
        """``b_i · N / Σ b``: the weight of each worker's mean gradient, whose plain mean is then the mean over all samples."""
        sizes = self.sizes
        total = sum(sizes)
        return [size * len(sizes) / total for size in sizes]


class Partition:
    """Rounds of samples for ``workers`` workers.

    >>> partition = Partition(samples=11, workers=2, batch_size=4, seed=0)
    >>> [r.sizes for r in partition.rounds(epoch=0)], len(partition)
    ([(4, 4), (2, 1)], 2)
    """

    def __init__(
        self,
        samples: int,
        workers: int,
        batch_size: int,
        seed: int,
        last: Last = "even",
        *,
        shuffle: bool = True,
        order: Order | None = None,
        owners: Tensor | None = None,
    ) -> None:
        if workers < 1 or batch_size < 1:
            raise HocketError(
                f"Workers and batch_size must be at least 1; got {workers} workers and batch_size {batch_size}: raise them."
            )
        if last not in get_args(Last):
            raise HocketError(f"last is 'even' or 'drop'; got '{last}': choose one of the two.")
        if samples < workers:
            raise HocketError(f"{samples} samples are too few for {workers} workers: use at most {samples} workers or more data.")
        if last == "drop" and samples < workers * batch_size:
            raise HocketError(
                f"{samples} samples do not fill one round of {workers} workers with batch_size {batch_size}, so last='drop' drops "
                f"all: use a batch_size of at most {samples // workers} or last='even'."
            )
        self.samples, self.workers, self.batch_size, self.seed = samples, workers, batch_size, seed
        self.last, self.shuffle, self.order, self.owners = last, shuffle, order, owners
        self._owned = None if owners is None else int(owners.bincount(minlength=workers).min())
        if self._owned == 0:
            raise HocketError(f"{samples} samples divided by label leave a worker without any: use fewer workers or more data.")
        self._length = len(self.sizes(samples, workers)) if self._owned is None else self._owned_count(self._owned)

    def __len__(self) -> int:
        """Rounds in an epoch."""
        return self._length

    def _owned_count(self, samples: int) -> int:
        full, rest = divmod(samples, self.batch_size)
        return full + (rest > 0 and (self.last == "even" or not full))

    def sizes(self, samples: int, workers: int) -> list[int]:
        """How many samples each round has that ``workers`` workers compute while ``samples`` are left of an epoch.

        >>> from hocket.data.shards.order import ShardOrder
        >>> plain, exact = (Partition(11, 3, 3, seed=0, order=order) for order in (None, ShardOrder([11], seed=0)))
        >>> plain.sizes(11, 3), exact.sizes(11, 3), plain.sizes(2, 3), exact.sizes(2, 3)
        ([9], [11], [], [2])
        """
        full, rest = divmod(samples, workers * self.batch_size)
        sizes = [workers * self.batch_size] * full
        if self.last == "even" and (rest >= workers or (rest and self.order is not None and not full)):
            sizes.append(rest)
        elif self.last == "even" and self.order is not None and full:
            sizes[-1] += rest
        return sizes

    def permutation(self, epoch: int) -> Tensor:
        """All samples, in the order of an epoch, round by round."""
        if self.order is not None:
            ends, begun = [0, *accumulate(self.sizes(self.samples, self.workers)), self.samples], epoch * self.samples
            return torch.cat([torch.from_numpy(self.order.dealt(begun + first, begun + end)) for first, end in pairwise(ends)])
        if not self.shuffle:
            return torch.arange(self.samples)
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(noise.fold(self.seed, epoch)))

    def rounds(self, epoch: int, shares: Sequence[float] | None = None, used: int = 0) -> list[Round]:
        """The rounds of an epoch, in order; ``shares``: the proportions in which they are divided, if not evenly. Of an epoch that
        other workers began, the rounds of what is left behind the first ``used`` samples.

        >>> four, two = (Partition(samples=20, workers=n, batch_size=2, seed=0) for n in (4, 2))
        >>> seen = four.rounds(epoch=3)[:1] + two.rounds(epoch=3, used=8)
        >>> sorted(int(i) for r in seen for part in r.indices for i in part) == list(range(20))
        True
        """
        if self.owners is not None:
            return self._owned_rounds(epoch)
        spans = list(pairwise(accumulate(self.sizes(self.samples - used, self.workers), initial=used)))
        if self.order is not None:  # a round at a time, divided by the lanes of the shards
            begun = epoch * self.samples
            dealt = [torch.from_numpy(self.order.dealt(begun + first, begun + end)) for first, end in spans]
        else:
            order = self.permutation(epoch)
            dealt = [order[first:end] for first, end in spans]
        if shares is None:
            return [Round(list(samples.tensor_split(self.workers))) for samples in dealt]
        if len(shares) != self.workers or not all(0 < share < math.inf for share in shares):
            raise HocketError(f"Shares are {self.workers} numbers above 0, one for each worker; got {list(shares)}: correct them.")
        sizes = {count: proportional(count, shares) for count in map(len, dealt)}
        return [Round(list(samples.split(sizes[len(samples)]))) for samples in dealt]

    def _owned_rounds(self, epoch: int) -> list[Round]:
        """Each worker takes its own samples, in the order of the epoch; the last round takes all that are left."""
        assert self.owners is not None
        order, size, count = self.permutation(epoch), self.batch_size, len(self)
        own = [order[self.owners[order] == worker] for worker in range(self.workers)]
        ends = [(r + 1) * size for r in range(count)]
        if self.last == "even":
            ends[-1] = self.samples
        return [Round([part[r * size : end] for part in own]) for r, end in enumerate(ends)]


def proportional(samples: int, speeds: Sequence[float]) -> list[int]:
    """The parts of ``samples`` that workers of these speeds compute soonest.

    Every worker gets one sample; each further sample goes to the worker that would finish it first.

    >>> proportional(400, [1, 1, 1, 0.25]), proportional(11, [1, 1]), proportional(4, [1, 1, 1000])
    ([124, 123, 123, 30], [6, 5], [1, 1, 2])
    """
    spare, together = samples - len(speeds), math.fsum(speeds)
    parts = [max(1, math.floor(spare * speed / together)) for speed in speeds]  # a lower bound of each worker's part
    done = [((part + 1) / speed, worker) for worker, (part, speed) in enumerate(zip(parts, speeds, strict=True))]
    heapq.heapify(done)
    for _ in range(samples - sum(parts)):
        worker = done[0][1]
        parts[worker] += 1
        heapq.heapreplace(done, ((parts[worker] + 1) / speeds[worker], worker))
    return parts


def stacked(round: Round) -> Tensor:
    """The indices of an even round as one tensor ``[workers, b]``.

    >>> stacked(Partition(4, workers=2, batch_size=2, seed=0, shuffle=False).rounds(0)[0])
    tensor([[0, 1],
            [2, 3]])
    """
    if not round.even:
        raise HocketError(f"Only an even round can be stacked; got sizes {round.sizes}: use its indices worker by worker.")
    return torch.stack(round.indices)
