"""Mini-batches by number, for asynchronous workers: a worker that is ready takes the next one.

The mini-batches of a training are numbered through: round after round, in each round by worker, epoch after epoch. With a
static partition worker ``i`` takes number ``t·N + i`` at its step ``t`` (from 0), as under ``bulk``; otherwise a counter that all
workers share gives the next number. Either way the samples of a number are a pure function of the partition.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hocket.data.base import DataSet
from hocket.data.partition import Partition, Round


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """One mini-batch: its samples, its weight in the mean of its round, its epoch, step and worker (all from 0)."""

    indices: Tensor
    weight: float
    epoch: int
    step: int
    """Its round, counted through all epochs."""
    slot: int
    """The worker that has it in that round under ``bulk``."""


class BatchSequence:
    """The mini-batches of ``steps`` rounds of ``partition``, by number; of a run that goes on, without the first ``begun`` rounds.

    >>> sequence = BatchSequence(Partition(samples=11, workers=2, batch_size=4, seed=0), steps=4)
    >>> len(sequence), [(len(h.indices), h.epoch, h.step) for h in map(sequence.minibatch, (0, 3, 4))]
    (8, [(4, 0, 0), (1, 0, 1), (4, 1, 2)])
    >>> rest = BatchSequence(sequence.partition, steps=4, begun=2)
    >>> len(rest), rest.minibatch(0).step
    (4, 2)
    """

    def __init__(self, partition: Partition, steps: int, begun: int = 0) -> None:
        self.partition, self.steps, self.begun = partition, steps, min(begun, steps)
        self._rounds: dict[int, list[Round]] = {}

    def __len__(self) -> int:
        return (self.steps - self.begun) * self.partition.workers

    @property
    def per_epoch(self) -> int:
        """Mini-batches in an epoch."""
        return len(self.partition) * self.partition.workers

    def tokens(self, epoch: int, data: DataSet) -> dict[str, int]:
        """``{"tokens": …}``: tokens of all mini-batches of an epoch (from 0), where a language model learns; otherwise empty."""
        if not data.language:
            return {}
        rounds = min(len(self.partition), self.steps - epoch * len(self.partition))
        samples = sum(self.partition.sizes(self.partition.samples, self.partition.workers)[:rounds])
        return {"tokens": samples * data.train[1][0].numel()}

    def own(self, worker: int, step: int) -> int:
        """The number of a worker's ``step``-th mini-batch (from 0) under a static partition."""
        return step * self.partition.workers + worker

    def minibatch(self, number: int) -> MiniBatch:
        """The mini-batch of that number."""
        step, slot = divmod(number + self.begun * self.partition.workers, self.partition.workers)
        epoch, place = divmod(step, len(self.partition))
        if epoch not in self._rounds:
            while len(self._rounds) > 1:  # workers are rarely more than two epochs apart; earlier epochs are computed again
                self._rounds.pop(next(iter(self._rounds)))
            self._rounds[epoch] = self.partition.rounds(epoch)
        found = self._rounds[epoch][place]
        return MiniBatch(found.indices[slot], found.weights[slot], epoch, step, slot)
