"""``hocket.advise``: which strategy to train a model with on a cluster, with the reason; "plain DDP" is one of the answers.

Seconds are predicted by the clock of virtual workers; quality is seen in short virtual trainings (:mod:`hocket.prediction.race`).
The strategies of the last rung are trained again with other seeds, so that their figures are intervals: the range over seeds, and
for seconds the error of the clock on top. Where plain DDP is as good, it is advised, since it is the simplest; where two
strategies cannot be told apart, the advice says so.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hocket.cluster.spec import ClusterSpec
from hocket.cluster.spec_file import bytes_per_second
from hocket.data import DataSet, load
from hocket.errors import HocketError
from hocket.models import build, loss_for
from hocket.prediction.api import predict
from hocket.prediction.goal import Goal
from hocket.prediction.outlook import Outlook, outlook
from hocket.prediction.race import FACTORS, FINALISTS, Curve, Entrant, Race
from hocket.prediction.tables import advice_html, shown
from hocket.strategy import Strategy
from hocket.train.settings import RunSettings
from hocket.train.simulate import seeded

CANDIDATES = (
    "bulk + allreduce", "bulk + cast(bf16)", "bulk + lowrank(2)", "bulk + topk(0.05) | qsgd(4)", "local(4)", "local(16)",
    "local(4) + sign", "diloco(16) + sign", "local(4) + gossip",
)  # fmt: skip
CLOCK_ERROR = 0.25
"""By how much predicted seconds may be wrong: 45 of 52 measured configurations were within (docs/results/prediction.md)."""
SIMPLER = 1.1
"""Plain DDP is advised unless another strategy is this many times better."""
MOST_EPOCHS, FEWEST_EPOCHS = 16, 4


@dataclass(frozen=True)
class Interval:
    """The mean over seeds, and the lowest and the highest to expect."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], error: float = 0.0) -> Interval:
        return cls(statistics.fmean(values), min(values) * (1 - error), max(values) * (1 + error))

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Contender:
    """What is known of one strategy."""

    strategy: str
    lr: float
    quality: Interval | None = None
    """Accuracy, or the test loss with a minus; None: it left before the end."""
    seconds: Interval | None = None
    """Until the end of the training or, with a target, until it is reached (infinite: never); predicted."""
    cost: float | None = None
    memory_bytes: float = math.nan
    exchange_share: float = math.nan
    """The share of a step that waiting and transfers take."""
    why: str = ""
    curves: tuple[Curve, ...] = ()

    def value(self, goal: Goal) -> float:
        """What the goal makes small."""
        assert self.seconds is not None
        return self.cost if goal.cheapest and self.cost is not None else self.seconds.mean


@dataclass(frozen=True)
class Advice:
    """The advised strategy, with the trainings and predictions that it is based on."""

    answer: str
    reasons: tuple[str, ...]
    strategy: str | None
    """None: no strategy reaches the goal."""
    lr: float | None
    command: str
    contenders: tuple[Contender, ...]
    """Those that reach the goal first, best first, then the others."""
    goal: Goal
    cluster: ClusterSpec
    about: str
    """What was trained, and for how long."""
    outlooks: tuple[Outlook, ...] = ()
    """Longer trainings, or with more workers, of the best strategies and of bulk, where they were asked for."""

    @property
    def legend(self) -> str:
        """What the figures are based on."""
        return (
            f"{self.about}. Goal: {self.goal}. seconds: until then on {self.cluster.name}, predicted; the range over seeds, "
            f"± {CLOCK_ERROR:.0%} for the clock. exchange: its share of a step. Longer trainings may rank strategies otherwise."
        )

    def _repr_html_(self) -> str:
        return advice_html(self)

    def __str__(self) -> str:
        return "\n".join([self.answer, *(f"  {reason}" for reason in self.reasons), *([f"  {self.command}"] * bool(self.command))])


def advise(
    model: str = "cnn",
    data: str | DataSet = "digits",
    cluster: str | Path | ClusterSpec = "1gbit",
    workers: int = 4,
    goal: str | Goal = "within 1 point",
    *,
    strategies: Sequence[str] = CANDIDATES,
    optimizer: str = "sgd",
    lr: float | None = None,
    batch_size: int = 100,
    momentum: float = 0.9,
    seeds: int = 2,
    minutes: float = 4.0,
    later_epochs: int | None = None,
    later_workers: int | None = None,
    step_s: float | None = None,
    device: torch.device | str = "cpu",
    data_dir: Path | None = None,
    watch: Callable[[str], None] = lambda _: None,
) -> Advice:
    """Advise a strategy for ``model`` on ``data`` with ``workers`` workers of ``cluster``, within about ``minutes`` minutes.

    A worker's step takes ``step_s`` seconds, or what the cluster says. ``goal`` is a :class:`~hocket.prediction.goal.Goal` or its
    words. Without ``lr`` three learning rates are tried for every strategy. Where ``minutes`` are few, fewer samples are trained
    on; ``about`` of the result says what was trained.

    ``later_epochs`` and ``later_workers`` ask for a longer training or more workers: for the two best strategies and bulk a law is
    fitted to more short trainings (:mod:`hocket.prediction.outlook`), which take about as long again.

    >>> found = advise("mlp", "digits", "10gbit", workers=2, strategies=["local(4)"], lr=0.1, batch_size=20, seeds=1, minutes=1e-6)
    >>> sorted(contender.strategy for contender in found.contenders)
    ['bulk + allreduce', 'local(4) + allreduce']
    """
    goal = Goal.parse(goal) if isinstance(goal, str) else goal
    spec = ClusterSpec.parse(cluster)
    spec = spec if step_s is None else replace(spec, step_s=step_s)
    dataset = load(data, data_dir) if isinstance(data, str) else data
    _check(spec, workers, goal, dataset, later_epochs, later_workers)
    parsed = list(dict.fromkeys([str(Strategy()), *(str(Strategy.parse(s)) for s in strategies)]))
    rates = _rates(optimizer) if lr is None else [lr]
    settings = RunSettings.of(
        workers=workers, virtual=True, data=dataset.name, model=model, optimizer=optimizer, batch_size=batch_size,
        momentum=momentum if optimizer == "sgd" else 0.0, lr_schedule="cosine", epochs=MOST_EPOCHS, augment=False,
    )  # fmt: skip
    settings, part = _affordable(settings, dataset, spec, len(parsed) * len(rates), seeds, minutes, torch.device(device))
    race = Race(settings, spec, part, torch.device(device), parsed, rates, watch)
    runs = {entrant.strategy: _with_seeds(race, entrant, seeds) for entrant in race.run()}
    built = build(model, dataset)
    sizes: dict[str, Any] = {"batch": _few(dataset), "batch_size": batch_size, "optimizer": settings.optimizer_for(built)}
    costs = {row.strategy: row for row in predict(built, spec, parsed, workers, **sizes).rows}
    about = (
        f"{model} on {len(part.train[0]):,} of {len(dataset.samples):,} samples of {dataset.name}, {workers} virtual workers × "
        f"{batch_size}, {settings.epochs} epochs, {seeds} seed{'s' * (seeds > 1)}"
    )
    contenders = [_contender(race, s, runs.get(s, []), goal, spec, workers, costs[s]) for s in parsed]
    found = _answer(contenders, goal, spec, settings, about)
    later = later_epochs, later_workers, len(dataset.samples)
    return replace(found, outlooks=_outlooks(race, [c for c in found.contenders if c.strategy in runs], built, sizes, *later))


def _rates(optimizer: str) -> list[float]:
    """Learning rates to try."""
    usual = 1e-3 if optimizer.startswith("adam") else 0.1
    return [float(f"{usual * f:.2g}") for f in FACTORS]


def _outlooks(
    race: Race, ended: Sequence[Contender], model: Any, sizes: dict[str, Any], epochs: int | None, workers: int | None, samples: int
) -> tuple[Outlook, ...]:
    """Of the two best strategies and of bulk, where another length or number of workers is asked for."""
    if epochs is None and workers is None:
        return ()
    epochs, workers = epochs or race.settings.epochs, workers or race.settings.workers.count
    chosen = {c.strategy: c.lr for k, c in enumerate(ended) if k < 2 or c.strategy == race.strategies[0]}
    rows = predict(model, race.spec, list(chosen), workers, **sizes).rows
    return tuple(outlook(race, row.strategy, chosen[row.strategy], epochs, workers, samples, row.step_s) for row in rows)


def _check(spec: ClusterSpec, workers: int, goal: Goal, data: DataSet, later_epochs: int | None, later_workers: int | None) -> None:
    """Refuse questions without an answer."""
    spec.check_workers(max(workers, later_workers or 0))
    if (later_epochs or 1) < 1 or (later_workers or 2) < 2 or 0 in (later_epochs, later_workers):
        raise HocketError(
            f"later_epochs={later_epochs}, later_workers={later_workers}: ask for one epoch or more, and two workers or more."
        )
    if workers < 2:
        raise HocketError(f"workers={workers}: one worker exchanges nothing; ask for 2 or more.")
    if goal.cheapest and not spec.price:
        raise HocketError(f"The cluster {spec.name} has no price; write one into its file, or leave 'cheapest' out.")
    if data.test is None:
        raise HocketError(
            f"Data set '{data.name}' has no test part, on which strategies are compared; return the pair (train, "
            "test) from its factory."
        )


def _with_seeds(race: Race, entrant: Entrant, seeds: int) -> list[Curve]:
    """The curve of an entrant that reached the end, and those of the same training with other seeds."""
    curves = [entrant.curve]
    for seed in range(1, seeds):
        race.watch(f"{entrant.strategy}, rate {entrant.lr:g}, seed {seed}")
        again = race.begin(entrant.strategy, entrant.lr, seed)
        again.advance(race.settings.epochs)
        if again.left is not None:
            entrant.left = f"{again.left} with seed {seed}"
            return []
        curves.append(again.curve)
    return curves


def _affordable(
    settings: RunSettings, data: DataSet, spec: ClusterSpec, entrants: int, seeds: int, minutes: float, device: torch.device
) -> tuple[RunSettings, DataSet]:
    """Epochs, and a part of the samples, for trainings that take about ``minutes`` in all."""
    samples = len(data.samples)
    # The update, the exchange and the evaluation come beside the gradient.
    per_sample = 1.5 * timed_step(settings.model, data, settings.data.batch_size, device) / settings.data.batch_size
    # All entrants train for one epoch, two thirds for another, a third for two more; the last few to the end, with every seed.
    whole = lambda epochs: 2.5 * entrants + FINALISTS * seeds * epochs  # noqa: E731
    afford = 60 * minutes / per_sample
    epochs = int((afford / samples - 2.5 * entrants) / (FINALISTS * seeds))
    epochs = max(FEWEST_EPOCHS, min(MOST_EPOCHS, epochs))
    most = int(min(samples, afford / whole(epochs)))
    least = settings.workers.count * settings.data.batch_size * 8
    most = min(samples, max(most, least))
    part = replace(data, train=data.samples[torch.arange(most)], source=None)
    return settings.changed(epochs=epochs, warmup=epochs / 10), part


def _few(data: DataSet) -> tuple[torch.Tensor, torch.Tensor]:
    """Two samples, as a model takes them."""
    return data.prepare(data.train[0][:2]), data.train[1][:2]


def timed_step(model: str, data: DataSet, batch_size: int, device: torch.device) -> float:
    """Seconds of one gradient of a mini-batch on this machine: the best of five."""
    built, loss = seeded(lambda: build(model, data), 0).to(device), loss_for(data)
    x, y = data.prepare(data.train[0][:batch_size].to(device)), data.train[1][:batch_size].to(device)

    def once() -> float:
        begun = time.perf_counter()
        loss(built(x), y).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    once()
    return min(once() for _ in range(5)) * batch_size / len(y)


def over_link(link: str, step_s: float) -> ClusterSpec:
    """Equal machines on links of a rate such as ``1Gbit``, whose step takes ``step_s``; all else is as on Gigabit Ethernet."""
    rate = bytes_per_second(link, f"link {link}")
    return replace(ClusterSpec.parse("1gbit"), name=f"links of {link}", bandwidth=rate, step_s=step_s)


def _contender(race: Race, strategy: str, curves: list[Curve], goal: Goal, spec: ClusterSpec, workers: int, row: Any) -> Contender:
    entrants = [e for e in race.entrants if e.strategy == strategy]
    best = race.best(strategy) or max(entrants, key=lambda e: (len(e.curve.points), e.curve.last.quality))
    share = 1 - row.efficiency if row.refused is None else math.nan
    found = Contender(strategy, best.lr, memory_bytes=row.memory_bytes, exchange_share=share, why=best.left or "")
    if not curves:
        return found
    ends = [c.last.seconds if goal.target is None else c.reaches(goal.target) for c in curves]
    seconds = Interval.of(ends, CLOCK_ERROR)
    cost = spec.cost(workers, seconds.mean) if spec.price and math.isfinite(seconds.mean) else None
    return replace(found, quality=Interval.of([c.last.quality for c in curves]), seconds=seconds, cost=cost, curves=tuple(curves))


def _answer(contenders: list[Contender], goal: Goal, spec: ClusterSpec, settings: RunSettings, about: str) -> Advice:
    """The ranked list in words."""
    bulk = contenders[0]
    ended = [c for c in contenders if c.quality is not None and c.seconds is not None]
    enough = [c for c in ended if _reaches(c, goal, bulk)]
    fits = [c for c in enough if goal.memory_bytes is None or c.memory_bytes <= goal.memory_bytes]
    ranked = sorted(fits, key=lambda c: c.value(goal))
    rest = [c for c in contenders if c not in ranked]
    rest.sort(key=lambda c: (c.quality is None, -(c.quality.mean if c.quality is not None else 0.0)))
    order = tuple(_explained(c, goal, bulk, ranked[0] if ranked else None) for c in [*ranked, *rest])
    more: dict[str, Any] = {"contenders": order, "goal": goal, "cluster": spec, "about": about}
    if not ranked:
        near = max(ended, key=lambda c: c.quality.mean) if ended else None  # type: ignore[union-attr]
        said = "" if near is None else f" The nearest is {near.strategy} with {shown(near.quality)}."
        reason = "Nothing fits into that memory." if enough else "Longer trainings may (more minutes), or another goal."
        return Advice(f"No strategy is known to be {goal}.{said}", (reason,), None, None, "", **more)
    winner = ranked[0]
    if bulk in ranked and bulk.value(goal) <= SIMPLER * winner.value(goal):
        gain = bulk.value(goal) / winner.value(goal)
        reasons = [f"Nothing tried is {SIMPLER:g} times better for '{goal}' (the best, {winner.strategy}, {gain:.2f} times)."]
        reasons.append(f"Exchanges take {bulk.exchange_share:.0%} of a step on {spec.name}.")
        command = "torchrun … with DistributedDataParallel, or hocket.parallelize(model, optimizer, 'bulk')"
        return Advice("Plain DDP: none of the other strategies pays here.", tuple(reasons), bulk.strategy, bulk.lr, command, **more)
    reasons = [_gain(winner, bulk, goal)]
    learned = max(c.curves[0].last.quality - c.curves[0].points[0].quality for c in ended)
    if learned < 0.05:
        reasons.append("The trainings were so short that they learned little: give more minutes before you rely on this.")
    alike = [c.strategy for c in ranked[1:] if _alike(c, winner)]
    if alike:
        reasons.append(f"Within the error of these figures, {', '.join(alike)} cannot be told from it.")
    own = settings.by_name()
    command = (
        f"hocket train --strategy '{winner.strategy}' --workers {own['workers']} --model {own['model']} --data {own['data']} "
        f"--optimizer {own['optimizer']} --lr {winner.lr:g} --momentum {own['momentum']:g} --batch-size {own['batch_size']}"
    )
    return Advice(f"{winner.strategy}, learning rate {winner.lr:g}.", tuple(reasons), winner.strategy, winner.lr, command, **more)


def _reaches(one: Contender, goal: Goal, bulk: Contender) -> bool:
    assert one.quality is not None
    assert one.seconds is not None
    if goal.target is not None:
        return math.isfinite(one.seconds.mean)
    return bulk.quality is not None and one.quality.mean >= goal.enough(bulk.quality.mean)


def _alike(one: Contender, other: Contender) -> bool:
    return one.seconds is not None and other.seconds is not None and one.seconds.overlaps(other.seconds)


def _gain(winner: Contender, bulk: Contender, goal: Goal) -> str:
    if bulk.seconds is None or bulk.quality is None or not math.isfinite(bulk.seconds.mean):
        return f"It reaches the goal, which bulk does not; it ends with {shown(winner.quality)}."
    times, what = bulk.value(goal) / winner.value(goal), "less cost" if goal.cheapest else "sooner"
    return (
        f"{times:.1f} times {what} than bulk, which spends {bulk.exchange_share:.0%} of a step on exchanges; it ends with "
        f"{shown(winner.quality)}, bulk with {shown(bulk.quality)}."
    )


def _explained(one: Contender, goal: Goal, bulk: Contender, winner: Contender | None) -> Contender:
    """With why it lost, or won."""
    if one.why or one.quality is None or one.seconds is None:
        return one
    if winner is not None and one.strategy == winner.strategy:
        return replace(one, why="best")
    if not _reaches(one, goal, bulk):
        return replace(one, why="not good enough" if goal.target is None else "does not reach the goal in this time")
    if goal.memory_bytes is not None and not one.memory_bytes <= goal.memory_bytes:
        return replace(one, why="does not fit")
    assert winner is not None
    return replace(one, why=f"{one.value(goal) / winner.value(goal):.2f} times {'the cost' if goal.cheapest else 'as long'}")
