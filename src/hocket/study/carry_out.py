"""Run a study: one run after another, resuming where it stopped; a run that fails is recorded, and the others continue."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from hocket.data import DataSet, load
from hocket.errors import HocketError, NonFiniteGradient, SettingError, WorkerLost
from hocket.files import CannotWrite
from hocket.study.folder import Folder, Outcome
from hocket.study.lr_search import (
    ENOUGH_STEPS,
    OUTER_EXCHANGES,
    best_lr,
    best_outer,
    found_lr,
    next_outer,
    next_try,
    search_steps,
    short,
)
from hocket.study.plan import Planned, Study, rounds_of, start_lr, steps_of
from hocket.train.loop import Progress
from hocket.train.run import Engines, run
from hocket.train.settings import RunSettings
from hocket.train.trial import check_own

_CLOCK = ("cluster", "slowdown", "share")
"""Settings that change how long a training takes, but not its result (except for rounding noise), where workers step together."""


class Watch:
    """Callbacks for the progress of a study; these do nothing."""

    def begin(self, number: int, planned: Planned, outcome: Outcome | None) -> None:
        """Run ``number`` starts; with ``outcome``, it had ended before."""

    def trying(self, lr: float) -> None:
        """The search tries a learning rate for it."""

    def trying_outer(self, lr: float, momentum: float) -> None:
        """The search tries a rate and a momentum of its outer optimiser."""

    def training(self) -> None:
        """Its training begins."""

    def step(self, where: Progress) -> None:
        """One step has been made."""

    def epoch(self, metrics: dict[str, Any]) -> None:
        """One epoch has ended."""

    def end(self, number: int, outcome: Outcome) -> None:
        """Run ``number`` is over."""

    def note(self, text: str) -> None:
        """A run has a remark."""


class Train(Protocol):
    """Trains as ``settings`` say, leaves run.json and metrics.jsonl in ``out``, and returns the epochs; without ``out`` the
    mean model is evaluated only at the end."""

    def __call__(self, settings: RunSettings, out: Path | None, watch: Watch) -> Sequence[dict[str, Any]]: ...


@dataclass
class Data:
    """Data sets by name, each loaded once."""

    folder: Path | None = None
    loaded: dict[str, DataSet] = field(default_factory=dict)

    def __call__(self, name: str) -> DataSet:
        if name not in self.loaded:
            self.loaded[name] = load(name, self.folder)
        return self.loaded[name]


@dataclass
class Virtual:
    """Trains on virtual workers in this process."""

    data: Data
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    noted: set[str] = field(default_factory=set)
    engines: Engines = field(default_factory=dict)
    engines_of: tuple[Any, ...] = ()

    def __call__(self, settings: RunSettings, out: Path | None, watch: Watch) -> Sequence[dict[str, Any]]:
        of = (settings.data.name, settings.model, settings.workers.count)
        if of != self.engines_of:  # runs are ordered by number of workers: engines for the last number only take memory
            self.engines.clear()
            self.engines_of = of
        cluster = settings.virtual_cluster(self.device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            try:
                callbacks: dict[str, Any] = {"watch": watch.step, "on_epoch": watch.epoch, "briefly": out is None}
                data = self.data(settings.data.name)
                training = run(settings, cluster, out=out, data=data, checkpoints=False, engines=self.engines, **callbacks)
            finally:
                cluster.close()
        for text in (str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)):
            known = out is None and "sends each value" in text  # a try of a learning rate is short on purpose
            if not known and text not in self.noted:
                self.noted.add(text)
                watch.note(text)
        return training.metrics


def check(study: Study, data: Data) -> None:
    """Refuse, before any run starts, unknown data sets or models, own ones that fail on a batch, and fewer samples than workers."""
    settings = [planned.settings for planned in study.runs]
    for name, model, batch_size in dict.fromkeys((s.data.name, s.model, s.data.batch_size) for s in settings):
        check_own(model, data(name), batch_size)
    refusals = []
    for planned in study.runs:
        try:
            planned.settings.plan().sequence(data(planned.settings.data.name), planned.settings.workers.count)
        except HocketError as error:
            refusals.append(str(error))
    if refusals and len(refusals) == len(study.runs):
        raise HocketError(f"None of the {len(refusals)} runs is possible: {refusals[0]}")


def carry_out(
    folder: Folder, study: Study, data: Data, virtual: Train, real: Train, watch: Watch | None = None, retry: bool = False
) -> list[Outcome]:
    """Do all runs of the study in ``folder``, in order; runs that have ended are not repeated.

    ``virtual`` trains virtual workers and searches for learning rates, ``real`` trains real ones. A run that fails is recorded with
    its reason; with ``retry`` runs that failed before are repeated.
    """
    watch = watch or Watch()
    outcomes, noted = [], set[str]()
    for number, planned in enumerate(study.runs):
        outcome = ended_before(folder, planned, retry)
        watch.begin(number, planned, outcome)
        if outcome is None:
            outcome = carry_out_run(folder, planned, data, virtual, real, watch, noted)
            watch.end(number, outcome)
        outcomes.append(outcome)
    return outcomes


def ended_before(folder: Folder, planned: Planned, retry: bool) -> Outcome | None:
    """The outcome of a run that need not be repeated."""
    outcome = folder.outcome(planned)
    return None if outcome is not None and outcome.failure and retry else outcome


def carry_out_run(
    folder: Folder, planned: Planned, data: Data, virtual: Train, real: Train, watch: Watch, noted: set[str]
) -> Outcome:
    """Do one run, with its searches."""
    search = Search(folder, planned.settings, data, virtual, watch, noted) if planned.tuned else None
    outer = partial(OuterSearch, folder, data=data, virtual=virtual, watch=watch) if planned.outer else None
    return _run(folder, planned, virtual if planned.settings.workers.virtual else real, search, outer, watch)


def finished(folder: Folder, study: Study) -> list[Outcome]:
    return [outcome for planned in study.runs if (outcome := folder.outcome(planned)) is not None]


def _run(
    folder: Folder,
    planned: Planned,
    train: Train,
    search: Search | None,
    outer: Callable[..., OuterSearch] | None,
    watch: Watch,
) -> Outcome:
    settings, searched = planned.settings, dict[str, Any]()
    try:
        while True:
            place = folder.clear(planned)
            if search is not None:
                searched["rate"] = search.run()
                settings = planned.settings.changed(lr=searched["rate"]["chosen"])
            if outer is not None:
                searched["outer"] = outer(settings=settings).run()
                settings = with_outer(settings, searched["outer"]["chosen"])
            watch.training()
            try:
                loss = train(settings, place, watch)[-1]["loss"]
            except NonFiniteGradient:
                if search is None or not search.give_up(None):
                    raise
                continue
            if search is None or not search.give_up(loss):
                return folder.finish(planned, searched)
    except CannotWrite:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise CannotWrite(f"write into the folder {folder.path}", error) from None
        return folder.fail(planned, sentence(error), searched)
    except BaseException:  # an interruption: the run starts again
        folder.clear(planned)
        raise


def sentence(error: Exception) -> str:
    """An error as one sentence."""
    if isinstance(error, (HocketError, WorkerLost, NonFiniteGradient)):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class Search:
    """The search for the learning rate of a run, shared by its seeds and kept in the study's folder; see ``lr_search``."""

    searched: ClassVar[str] = "tuned"

    def __init__(
        self, folder: Folder, settings: RunSettings, data: Data, virtual: Train, watch: Watch, noted: set[str] | None = None
    ) -> None:
        self.folder, self.settings, self.data, self.virtual, self.watch = folder, settings, data, virtual, watch
        self.noted = set() if noted is None else noted
        self.what = self._what(replace(Planned("", settings), **{self.searched: True}).described())  # type: ignore[arg-type]
        begun: dict[str, Any] = {name: {} for name in ("tried", "losses", "longer", "given_up")}
        begun |= {"chosen": None, "epochs": None, "seed": settings.seed}
        self.found = {**begun, **folder.lrs().get(self.what, {})}

    def _keep(self) -> None:
        self.folder.keep_lrs(self.what, self.found)

    def _what(self, described: dict[str, Any]) -> str:
        """The name of the search in rates.json: trainings that differ in the seed or in the seconds they take share it."""
        alike = {**described, "virtual": None, "seed": None}
        alike = {name: value for name, value in alike.items() if name not in _CLOCK or self._clock_matters}
        digest = hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).hexdigest()[:12]
        workers, data_name = self.settings.workers.count, self.settings.data.name
        return f"{self.settings.strategy}, {workers} workers, {data_name}, {self.settings.model} ({digest})"

    @property
    def _clock_matters(self) -> bool:
        """Whether the seconds of virtual workers decide what they exchange."""
        return self.settings.strategy.sync.asynchronous and self.settings.workers.virtual

    def run(self) -> dict[str, Any]:
        """What was tried and what was chosen, for run.json."""
        found, start = self.found, start_lr(self.settings.optimizer.name)
        while not found["given_up"] and (planned := next_try(self._losses(), self._losses("longer"), start)) is not None:
            lr, times = planned
            self.watch.trying(lr)
            loss, accuracy = self._try(lr, times)
            found["losses" if times == 1 else "longer"][str(lr)] = loss
            found["tried"][str(lr)] = accuracy
            self._keep()
        if found["chosen"] is None:
            self._check_short_tries()
        found["chosen"] = self._best()
        if found["chosen"] is None:
            raise SettingError(
                f"No learning rate trained without NaN or Inf ({', '.join(found['losses'])} were tried); give <lr> a number."
            )
        self._keep()
        return {**found, "by": "lowest training loss in the last epoch of a short training"}

    def _best(self) -> float | None:
        """What the search has found, or the best of the short tries below what was given up."""
        if self.found["given_up"]:
            return best_lr(self._losses(), min(map(float, self.found["given_up"])))
        return found_lr(self._losses(), self._losses("longer"))

    def give_up(self, loss: float | None) -> bool:
        """Given the training loss of the whole training (None: it diverged), whether to train again with a lower learning rate.

        Only the seed of the search decides, so that all seeds have the same one.
        """
        found, lr = self.found, self.found["chosen"]
        tried = found["longer"] if str(lr) in found["longer"] else found["losses"]
        holds = loss is not None and loss <= tried[str(lr)]
        if holds or found["seed"] != self.settings.seed or best_lr(self._losses(), lr) is None:
            return False
        found["given_up"][str(lr)] = loss
        self._keep()
        return True

    def _check_short_tries(self) -> None:
        """Where tries are short, give up the best one as long as the best below it has a lower loss over the whole training."""
        data, found = self.data(self.settings.data.name), self.found
        steps = search_steps(rounds_of(self.settings, data), steps_of(self.settings, data))
        if steps >= ENOUGH_STEPS:
            return
        note = (
            f"Tries of learning rates have {steps} steps, fewer than {ENOUGH_STEPS}, and short trainings bear higher rates than "
            "long ones: the best is compared with the next lower one over the whole training; train longer, or give lr a number."
        )
        if note not in self.noted:
            self.noted.add(note)
            self.watch.note(note)
        whole: dict[float, float | None] = {}
        best = self._best()
        while best is not None and (lower := best_lr(self._losses(), best)) is not None:
            for lr in (best, lower):
                if lr not in whole:
                    whole[lr], _ = self._trained(self.settings.changed(lr=lr))
            of_best, of_lower = whole[best], whole[lower]
            if of_lower is None or (of_best is not None and of_best <= of_lower):
                return
            found["given_up"][str(best)] = of_best
            best = lower

    def _losses(self, of: str = "losses") -> dict[float, float]:
        return {float(lr): math.inf if loss is None else loss for lr, loss in self.found[of].items()}

    def _try(self, lr: float, times: int) -> tuple[float | None, float | None]:
        """Training loss and accuracy of a short training; None: it diverged."""
        data = self.data(self.settings.data.name)
        settings = short(self.settings, lr, rounds_of(self.settings, data), steps_of(self.settings, data), times=times)
        self.found["epochs"] = settings.epochs if times == 1 else self.found["epochs"]
        return self._trained(settings)

    def _trained(self, settings: RunSettings) -> tuple[float | None, float | None]:
        """Training loss and accuracy of a training on virtual workers; None: it diverged."""
        try:
            clock = {} if self._clock_matters else {"cluster": None, "slowdown": None}
            alike = settings.changed(virtual=True, balance="even", **clock)
            last = self.virtual(alike, None, self.watch)[-1]
        except NonFiniteGradient:
            return None, None
        return (last["loss"], last["accuracy"]) if math.isfinite(last["loss"]) else (None, None)


class OuterSearch(Search):
    """The search for rate and momentum of the outer optimiser, once the learning rate of ``settings`` is chosen."""

    searched: ClassVar[str] = "outer"

    def run(self) -> dict[str, Any]:
        found, (data, sync) = self.found, (self.data(self.settings.data.name), self.settings.strategy.sync)
        assert sync.outer_settings is not None
        while (pair := next_outer(self._pairs(), sync.outer_settings)) is not None:
            self.watch.trying_outer(*pair)
            length = rounds_of(self.settings, data), steps_of(self.settings, data), OUTER_EXCHANGES * sync.period
            settings = short(with_outer(self.settings, pair), self.settings.optimizer.lr, *length)
            found["epochs"] = settings.epochs
            name = f"{pair[0]:g}, {pair[1]:g}"
            found["losses"][name], found["tried"][name] = self._trained(settings)
            self._keep()
        found["chosen"] = best_outer(self._pairs())
        if found["chosen"] is None:
            raise HocketError(f"{self.settings.strategy}: no outer rate trained without NaN or Inf; give a lower learning rate.")
        self._keep()
        return {**found, "by": "lowest training loss in the last epoch of a short training"}

    def _pairs(self) -> dict[tuple[float, float], float]:
        pairs = ((tuple(map(float, name.split(", "))), loss) for name, loss in self.found["losses"].items())
        return {(lr, momentum): math.inf if loss is None else loss for (lr, momentum), loss in pairs}


def with_outer(settings: RunSettings, pair: Sequence[float]) -> RunSettings:
    """The settings with this rate and momentum of the outer optimiser."""
    strategy = settings.strategy
    sync = replace(strategy.sync, lr=pair[0], momentum=pair[1])  # type: ignore[call-arg]
    return settings.changed(strategy=str(replace(strategy, sync=sync)))
