"""What a strategy would reach in a longer training, or with more workers: the law of :mod:`hocket.prediction.law` for ``advise``.

For each strategy whole trainings of several lengths and, from four workers on, of half as many workers are made on virtual workers;
the law is fitted to the test losses at their ends. Seconds are predicted for the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hocket.errors import HocketError, NonFiniteGradient
from hocket.prediction.law import Extrapolation, Law, Training, fit
from hocket.prediction.race import Race

LENGTHS = (8, 4, 2, 1)
"""Trainings are so many times shorter than the race's."""


@dataclass(frozen=True)
class Outlook:
    """A training that was not made."""

    strategy: str
    epochs: int
    workers: int
    loss: Extrapolation
    seconds: float
    """Predicted."""
    law: Law

    def __str__(self) -> str:
        what = f"{self.strategy}: after {self.epochs} epochs of {self.workers} workers a test loss of {self.loss}"
        trained = f"{len(self.law.trainings)} trainings of up to {max(t.steps for t in self.law.trainings)} steps"
        return f"{what} in {self.seconds:.3g} s; extrapolated from {trained}"


def lengths(epochs: int) -> list[int]:
    """Epochs of the trainings, each at least one.

    >>> lengths(16), lengths(4)
    ([2, 4, 8, 16], [1, 2, 4])
    """
    return sorted({max(1, epochs // part) for part in LENGTHS})


def outlook(race: Race, strategy: str, lr: float, epochs: int, workers: int, samples: int, step_s: float) -> Outlook:
    """A training of ``epochs`` epochs over ``samples`` samples with ``workers`` workers, whose step takes ``step_s`` seconds."""
    trained = race.settings.workers.count
    counts = [trained // 2, trained] if trained >= 4 else [trained]
    if workers != trained and len(counts) == 1:
        raise HocketError(
            f"workers={trained}: the law needs trainings with at least 4 workers to predict {workers}; use 4 or more."
        )
    trainings = [t for n in counts for t in _trainings(race, strategy, lr, n)]
    law = fit(trainings)
    steps = max(1, epochs * samples // (workers * race.settings.data.batch_size))
    return Outlook(strategy, epochs, workers, law.loss(steps, workers), steps * step_s, law)


def _trainings(race: Race, strategy: str, lr: float, workers: int) -> Iterator[Training]:
    for epochs in lengths(race.settings.epochs):
        race.watch(f"{strategy}, rate {lr:g}, {workers} workers, a whole training of {epochs} epochs")
        settings = race.settings.changed(epochs=epochs, warmup=epochs / 10, workers=workers)
        entrant = replace(race, settings=settings, engines={}, entrants=[]).begin(strategy, lr)
        try:
            loss = [line["test_loss"] for line in entrant.metrics][-1]
        except NonFiniteGradient:
            loss = math.inf
        finally:
            entrant.close()
        if not math.isfinite(loss):
            raise HocketError(f"{strategy} diverged with rate {lr:g}, {workers} workers and {epochs} epochs; give a smaller lr.")
        yield Training(max(1, epochs * len(race.data.samples) // (workers * settings.data.batch_size)), loss, workers)
