"""Successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943) of strategies and learning rates in short virtual trainings.

Every *entrant*, a strategy with a learning rate, trains for one epoch; then two, four, and so on. At each rung a strategy keeps its
better rates. From the rung of four epochs on (before it, long periods have exchanged too little to tell), a strategy leaves when
another is clearly better and no slower, or when others will reach bulk's quality sooner. Bulk stays to the end, as the measure.
Seconds are those of the described cluster; quality is test accuracy, or the test loss with a minus, so that more is better.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hocket.cluster.spec import ClusterSpec
from hocket.cluster.virtual import VirtualCluster
from hocket.data import DataSet
from hocket.errors import NonFiniteGradient
from hocket.train.run import Engines, make_training
from hocket.train.settings import RunSettings

FACTORS = (1.0, 1 / 3, 3.0)
"""Learning rates to try, as multiples of the optimiser's usual one."""
FINALISTS = 4
"""Strategies that train to the end, bulk among them."""
FIRST_RUNG = 4
"""Epochs after which strategies may leave."""
BETTER = 0.01
"""What counts as a difference at the end: a point of accuracy, or one percent of the test loss; twice as much at the first rung."""


@dataclass(frozen=True)
class Point:
    """A training after some epochs."""

    seconds: float
    quality: float


@dataclass
class Curve:
    """The points of one training, the first before any step."""

    points: list[Point] = field(default_factory=list)

    @property
    def last(self) -> Point:
        return self.points[-1]

    def reaches(self, quality: float) -> float:
        """When a training has that quality: seconds, on straight lines between points; infinite: it has not."""
        for before, after in zip([Point(0.0, -math.inf), *self.points], self.points, strict=False):
            if after.quality >= quality:
                if not math.isfinite(before.quality) or after.quality == before.quality:
                    return after.seconds
                share = (quality - before.quality) / (after.quality - before.quality)
                return before.seconds + share * (after.seconds - before.seconds)
        return math.inf

    def projected(self, quality: float) -> float:
        """:meth:`reaches` or, where it has not, the seconds at the pace so far."""
        found = self.reaches(quality)
        if math.isfinite(found):
            return found
        first, last = self.points[0], self.last
        gained = last.quality - first.quality
        return math.inf if gained <= 0 else last.seconds * (quality - first.quality) / gained


@dataclass
class Entrant:
    """One virtual training that can be paused."""

    strategy: str
    lr: float
    metrics: Iterator[dict[str, Any]]
    curve: Curve
    close: Callable[[], None]
    left: str | None = None
    """Why it left."""

    def advance(self, epochs: int) -> None:
        """Train on until so many epochs have passed."""
        while self.left is None and len(self.curve.points) <= epochs:
            try:
                line = next(self.metrics, None)
            except NonFiniteGradient:
                line = None
            if line is None or not math.isfinite(line["loss"]):
                self.leave("it diverged")
            else:
                self.curve.points.append(Point(self.curve.last.seconds + line["seconds"], quality(line)))

    def leave(self, why: str) -> None:
        self.left, self.metrics = why, iter(())
        self.close()


def quality(line: dict[str, Any]) -> float:
    """Accuracy or, of language models, the test loss with a minus."""
    return -line["test_loss"] if "perplexity" in line else float(line["accuracy"])


@dataclass
class Race:
    """The trainings of ``strategies`` on ``spec`` with ``settings``; the first strategy is the measure."""

    settings: RunSettings
    spec: ClusterSpec
    data: DataSet
    device: torch.device
    strategies: Sequence[str]
    rates: Sequence[float]
    watch: Callable[[str], None] = lambda _: None
    engines: Engines = field(default_factory=dict)
    entrants: list[Entrant] = field(default_factory=list)

    def begin(self, strategy: str, lr: float, seed: int | None = None) -> Entrant:
        """A training that has not begun."""
        settings = self.settings.changed(strategy=strategy, lr=lr, seed=self.settings.seed if seed is None else seed)
        cluster = VirtualCluster(settings.workers.count, self.device, spec=self.spec, seed=settings.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what a strategy has to say concerns a whole training
            training = make_training(settings, cluster, self.data, self.engines)
        training.plan = replace(training.plan, worst=False)
        start = quality({**training._evaluate().line(0.0), "loss": 0.0})
        return Entrant(strategy, lr, training.run(), Curve([Point(0.0, start)]), cluster.close)

    def run(self) -> list[Entrant]:
        """All rungs; returns the entrants of the last, the measure first."""
        epochs, done = self.settings.epochs, 1
        for strategy in self.strategies:
            tried = [self._tried(strategy, lr) for lr in self.rates]
            self._keep_rates(tried, 2)
        while done < epochs:
            done = min(2 * done, epochs)
            for entrant in self.alive:
                self.watch(f"{entrant.strategy}, rate {entrant.lr:g}, to epoch {done}")
                entrant.advance(done)
            for strategy in self.strategies:
                self._keep_rates([e for e in self.alive if e.strategy == strategy], 1)
            if done >= FIRST_RUNG:
                self._leave(done)
        return self.alive

    @property
    def alive(self) -> list[Entrant]:
        return [entrant for entrant in self.entrants if entrant.left is None]

    def _tried(self, strategy: str, lr: float) -> Entrant:
        self.watch(f"{strategy}, rate {lr:g}, first epoch")
        entrant = self.begin(strategy, lr)
        entrant.advance(1)
        self.entrants.append(entrant)
        return entrant

    def _keep_rates(self, same: Sequence[Entrant], most: int) -> None:
        """Of entrants with one strategy the best ``most`` stay."""
        ranked = sorted((e for e in same if e.left is None), key=lambda e: e.curve.last.quality, reverse=True)
        for entrant in ranked[most:]:
            entrant.leave(f"rate {ranked[0].lr:g} is better")

    def best(self, strategy: str) -> Entrant | None:
        """The best entrant of a strategy that has not left."""
        return max((e for e in self.alive if e.strategy == strategy), key=lambda e: e.curve.last.quality, default=None)

    def _leave(self, done: int) -> None:
        """Strategies leave that others beat, and the slower half of the rest."""
        measure = self.best(self.strategies[0])
        bests = [found for s in self.strategies if (found := self.best(s)) is not None]
        after = f"after {done} epochs"
        for one in bests:
            better = next(
                (o for o in bests if _beats(o.curve.last, one.curve.last, BETTER * max(1.0, 2 * FIRST_RUNG / done))), None
            )
            if better is not None and one is not measure:
                self._drop(one.strategy, f"{after} {better.strategy} was better and no slower")
        if measure is None:
            return
        rest = [one for one in bests if one is not measure and one.left is None]
        rest.sort(key=lambda one: one.curve.projected(measure.curve.last.quality))
        for one in rest[max(FINALISTS - 1, -(-len(rest) // 2)) :]:
            self._drop(one.strategy, f"{after} others were nearer to bulk's quality in the same time")

    def _drop(self, strategy: str, why: str) -> None:
        for entrant in self.alive:
            if entrant.strategy == strategy:
                entrant.leave(why)


def _beats(one: Point, other: Point, margin: float) -> bool:
    """Whether it is clearly better, and no slower."""
    return one.seconds <= other.seconds and one.quality > other.quality + margin * (1.0 if other.quality >= 0 else -other.quality)
