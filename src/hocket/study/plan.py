"""A study: which runs, in which order, under which settings.

An :class:`Outline` names entries × workers × seeds; :func:`expand` turns it into a :class:`Study`, the list of runs with a folder
each. Runs are ordered by number of workers, then by seed, then by strategy, so that an unfinished study is a complete smaller one.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

from hocket.data import DataSet
from hocket.errors import HocketError, SettingError
from hocket.strategy import Strategy
from hocket.train.asynchronous import DEFAULT_CLUSTER
from hocket.train.setting_groups import BATCH_OPTIMIZER
from hocket.train.settings import RunSettings, defaults

EACH = ("strategy", "workers", "seed")
"""Settings in which the runs of a study differ; the other settings are common to all."""
AUTO = "auto"
_START_LRS = {"sgd": 0.1, "asgd": 0.1, "adagrad": 0.03, "adadelta": 1.0, "rprop": 0.01, "adafactor": 0.01, "muon": 0.01}
_START_LRS |= {"lars": 1.0, "lamb": 0.003}


def start_lr(optimizer: str) -> float:
    """The learning rate at which a search starts.

    >>> start_lr("sgd"), start_lr("adamw")
    (0.1, 0.001)
    """
    return _START_LRS.get(optimizer, 0.001)


@dataclass(frozen=True)
class Planned:
    """One run of a study: its folder inside the study's, its settings, and whether its learning rate is searched for."""

    folder: str
    settings: RunSettings
    tuned: bool = False
    outer: bool = False
    """Whether rate and momentum of its outer optimiser are searched for."""

    def described(self) -> dict[str, Any]:
        """The settings as study.json has them; they identify a run."""
        searched = {"lr": AUTO} if self.tuned else {}
        return {**self.settings.recorded(), **searched, **({"outer": AUTO} if self.outer else {})}


@dataclass(frozen=True)
class Study:
    """Runs side by side."""

    title: str
    runs: tuple[Planned, ...]
    preset: str | None = None
    notes: tuple[str, ...] = ()
    within: float | None = None
    """Points of accuracy that may be given up for fewer bytes, if the study names any."""


@dataclass(frozen=True)
class Entry:
    """One strategy of a study, with the settings in which it differs from the others."""

    strategy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    """File and line, if it came from a file."""


@dataclass(frozen=True)
class Outline:
    """``entries(workers, steps)`` × workers × seeds under common settings.

    The learning rate ``"auto"`` is searched for per strategy; a number is that of all. With ``outer="auto"`` rate and momentum of
    outer optimisers are searched for, too.
    """

    title: str
    entries: Callable[[int, int], Sequence[Entry]]
    preset: str | None = None
    workers: tuple[int, ...] = (4,)
    seeds: tuple[int, ...] = (0,)
    settings: Mapping[str, Any] = field(default_factory=dict)
    lr: float | str = 0.1
    within: float | None = None
    about: str = ""
    """What it is for, in a few words."""
    outer: str | None = None

    def changed(self, workers: Sequence[int] = (), seeds: Sequence[int] = (), **given: Any) -> Outline:
        """The same with the given values, of its own or settings, replaced; None keeps a value."""
        named = {name: value for name, value in given.items() if value is not None}
        own: dict[str, Any] = {name: named.pop(name) for name in ("lr", "within", "outer") if name in named}
        workers, seeds = tuple(workers) or self.workers, tuple(seeds) or self.seeds
        return replace(self, workers=workers, seeds=seeds, settings={**self.settings, **named}, **own)

    def common(self) -> RunSettings:
        """The settings that all runs share, checked."""
        given = dict(self.settings)
        if given.get("warmup") == "tenth":
            given["warmup"] = min(5.0, given.get("epochs", defaults()["epochs"]) / 10)
        return _stepwise(RunSettings.of(**{"virtual": True, **given}))


def expand(outline: Outline, data_set: Callable[[str], DataSet]) -> Study:
    """All runs of an outline; two equal ones are refused."""
    common = _with_clock(outline, data_set)
    runs: list[Planned] = []
    seen: dict[str, Entry] = {}
    idle: dict[str, bool] = {}
    for workers in _distinct("workers", outline.workers):
        for seed in _distinct("seeds", outline.seeds):
            size = common.changed(workers=workers, seed=seed)
            for entry in outline.entries(workers, steps_of(size, data_set(size.data.name))):
                own, name = dict(entry.settings), entry.where or entry.strategy
                idle.setdefault(name, True)
                if workers not in own.pop("workers", outline.workers) or seed not in own.pop("seeds", outline.seeds):
                    continue
                idle[name] = False
                runs.append(_planned(size, {**own, "strategy": entry.strategy}, outline.lr, outline.outer))
                what = repr(runs[-1].described())
                if first := seen.get(what):
                    where = f"{entry.where} repeats {first.where}" if first.where and entry.where else "Two runs are the same"
                    same = f"{where}: {entry.strategy} with the same settings"
                    raise HocketError(f"{same}; leave one out, or give it other settings.")
                seen[what] = entry
    if not runs:
        raise HocketError("The study has no runs; give it strategies.")
    left_out = [f"{name} was left out: its workers or seeds are not among the study's." for name in idle if idle[name]]
    return Study(outline.title, assign_folders(runs), outline.preset, (*_notes(runs), *left_out), outline.within)


def _with_clock(outline: Outline, data_set: Callable[[str], DataSet]) -> RunSettings:
    """The common settings; where asynchronous virtual workers need a clock, all runs have the same cluster."""
    common = outline.common()
    if not common.workers.virtual or common.workers.cluster is not None:
        return common
    data = data_set(common.data.name)
    sizes = [common.changed(workers=workers) for workers in outline.workers]
    entries = [entry for size in sizes for entry in outline.entries(size.workers.count, steps_of(size, data))]
    alone = any(Strategy.parse(entry.strategy).runtime != "collective" for entry in entries)
    return common.changed(cluster=DEFAULT_CLUSTER) if alone else common


def _stepwise(settings: RunSettings) -> RunSettings:
    """The same; refuses an optimiser that makes no steps."""
    if settings.optimizer.name == BATCH_OPTIMIZER:
        raise SettingError("<optimizer>: a study trains step by step; use sgd, for example.", optimizer=settings.optimizer.name)
    return settings


def steps_of(settings: RunSettings, data: DataSet) -> int:
    return min(rounds_of(settings, data) * settings.epochs, settings.max_steps or sys.maxsize)


def rounds_of(settings: RunSettings, data: DataSet) -> int:
    """How many steps an epoch has; at least 1, so that a run without samples is refused when it starts."""
    try:
        return max(1, len(settings.plan().sequence(data, settings.workers.count).partition))
    except HocketError:
        return 1


def assign_folders(runs: Iterable[Planned], taken: Mapping[str, str] | None = None) -> tuple[Planned, ...]:
    """Every run with a folder of its own; ``taken`` are the folders of existing runs, by their settings."""
    held = dict(taken or {})
    for run in (runs := list(runs)):
        plain = f"runs/{slug(run.settings)}"
        names = chain([plain], (f"{plain}-{number}" for number in count(2)))
        if (what := repr(run.described())) not in held:
            held[what] = next(name for name in names if name not in held.values())
    return tuple(replace(run, folder=held[repr(run.described())]) for run in runs)


def slug(settings: RunSettings) -> str:
    """A readable name for a folder.

    >>> slug(RunSettings.of(strategy="local(4) + gossip + topk(0.05) | qsgd(4)", workers=16))
    'local-4-gossip-topk-0.05-qsgd-4-w16-s0'
    """
    strategy = re.sub(r"[^a-z0-9.]+", "-", str(settings.resolved).lower()).strip("-.")
    return f"{strategy[:80].rstrip('-.')}-w{settings.workers.count}-s{settings.seed}"


def _planned(settings: RunSettings, own: dict[str, Any], lr: float | str, outer: str | None) -> Planned:
    lr = own.pop("lr", lr)
    tuned = lr == AUTO
    settings = _stepwise(settings.changed(**own))
    searched = outer == AUTO and settings.strategy.sync.outer_settings is not None
    return Planned("", settings.changed(lr=start_lr(settings.optimizer.name) if tuned else float(lr)), tuned, searched)


def _distinct(what: str, values: Sequence[int]) -> Sequence[int]:
    for value in values:
        if values.count(value) > 1:
            raise SettingError(f"<{what}> names {value} twice; name it once.")
        if what == "workers" and value < 1:
            raise SettingError("<workers>: there must be at least one worker.", workers=value)
    return values


def _notes(runs: Sequence[Planned]) -> list[str]:
    notes = []
    if any(r.tuned for r in runs):
        notes.append(
            "Learning rates were searched for per strategy and number of workers in short trainings on virtual workers, with the "
            "first seed; the rate with the lowest training loss in the last epoch was taken, or the next lower one where the "
            "whole training diverged or ended with a higher training loss than the short one. Test accuracy was not used."
        )
    if any(r.outer for r in runs):
        notes.append(
            "Rate and momentum of outer optimisers were searched for in the same way: momenta at the strategy's own outer rate, "
            "then outer rates at the best momentum."
        )
    return notes


def number(text: str) -> float | str:
    """A learning rate as written: a number above 0, or ``auto``.

    >>> number("0.1"), number("auto")
    (0.1, 'auto')
    """
    if text == AUTO:
        return AUTO
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise SettingError("<lr>: the learning rate is a number above 0, or auto.", lr=text)
    return value
