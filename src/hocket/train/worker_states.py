"""The states of workers that send messages, beside the global weights, saved so that a run can resume.

Virtual workers have it in their checkpoint. A real worker writes a file when it has ended its part of an epoch and has pushed all
of it: what error feedback holds back (its residuals) and, where workers run the optimisers, its optimiser's state. A run that
goes on takes the files of the run and the epoch of its checkpoint, by the rule of :mod:`hocket.programs.repartition`: residuals
are added up and shared out, optimiser states become their mean. Pushes count as they do in the global weights of that epoch: one
that came too late for them is lost, and mini-batches of the next epoch that are in them already are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.layout import Layout
from hocket.drivers.processes import say
from hocket.drivers.worker_runtime import WorkerRuntime
from hocket.errors import HocketError
from hocket.files import CannotWrite, copied, sealed, unsealed, write_whole
from hocket.programs.server.optimizer_spec import workers_optimize
from hocket.strategy import Strategy
from hocket.train.job import Job
from hocket.train.other_workers import load_moments, mean_moments, optimizer_names

Moments = dict[str, dict[str, Any]]
Residuals = list[Tensor | None]


def keeps_state(strategy: Strategy) -> bool:
    """Whether workers have residuals or optimiser states that are not in the global weights."""
    codec = strategy.compression.codec
    return workers_optimize(strategy) or (codec is not None and codec.uses_error_feedback)


@dataclass(frozen=True)
class StateFiles:
    """The files in ``folder`` that the workers of one run write; ``run`` tells runs of a folder apart."""

    folder: Path
    run: str

    def path(self, worker: int, epoch: int) -> Path:
        return self.folder / f"worker-{worker}-{epoch}.pt"

    def write(self, worker: int, epoch: int, layout: Layout, residuals: Residuals, moments: Moments) -> None:
        """Write the state of ``worker`` after ``epoch``; a failed write prints a note and ends nothing."""
        state = {"run": self.run, "layout": layout.digest(), "residuals": residuals, "moments": moments}
        try:
            write_whole(self.path(worker, epoch), sealed(copied(state)))
        except CannotWrite as error:
            say(f"worker {worker}: {error.cause}; a run that goes on from epoch {epoch} begins without its part; training goes on")

    def merge(self, epoch: int, workers: int, layout: Layout) -> Merged:
        """The merged states of all ``workers`` of the run after ``epoch``."""
        found = {worker: state for worker in range(workers) if (state := self._read(worker, epoch, layout)) is not None}
        states = list(found.values())
        residuals = [_total(rows) for rows in zip(*(state["residuals"] for state in states), strict=True)]
        missing = [worker for worker in range(workers) if worker not in found]
        return Merged(residuals, mean_moments([state["moments"] for state in states]), missing)

    def _read(self, worker: int, epoch: int, layout: Layout) -> dict[str, Any] | None:
        """None where the file is missing, damaged, or of another run or model."""
        with suppress(Exception):  # any error that torch raises for a damaged file
            state: dict[str, Any] = unsealed(self.path(worker, epoch).read_bytes())
            if (state["run"], state["layout"]) == (self.run, layout.digest()):
                return state
        return None

    def remove_before(self, epoch: int) -> None:
        """Remove the files of earlier epochs, of all runs in the folder."""
        for path in self.folder.glob("worker-*-*.pt"):
            number = path.stem.rpartition("-")[2]
            if number.isdecimal() and int(number) < epoch:
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Merged:
    """The merged states of the workers of a run."""

    residuals: Residuals
    """Sums over the workers, per bucket; None where none held anything back."""
    moments: Moments
    """Means of the optimisers' states, by parameter name."""
    missing: list[int]
    """Workers that left no file."""

    @property
    def owes(self) -> bool:
        return any(total is not None for total in self.residuals)

    def part(self, workers: int) -> Residuals:
        """The residuals with which each of ``workers`` workers begins."""
        return [None if total is None else total / workers for total in self.residuals]

    def write_part(self, path: Path, workers: int) -> None:
        """Write the state with which each of ``workers`` workers begins."""
        write_whole(path, sealed({"residuals": self.part(workers), "moments": self.moments}))

    def describe(self, workers: int) -> str:
        """A sentence on the states that the new workers take over."""
        parts = [f"one part of {workers} of the sum of the residuals"] * self.owes
        parts += ["the mean of the optimiser states"] * bool(self.moments)
        clauses = [f"each begins with {' and with '.join(parts)}"] * bool(parts)
        names = ", ".join(map(str, self.missing))
        clauses += [f"what worker{'s' * (len(self.missing) > 1)} {names} had is not there and begins anew"] * bool(names)
        return "; ".join(clauses)


def merge_left(
    state: dict[str, Any], folder: Path, epoch: int, workers: int, strategy: Strategy, layout: Layout, names: Sequence[str]
) -> Merged:
    """What ``workers`` workers left after ``epoch``: virtual ones in the ``state`` of the checkpoint, real ones in ``folder``.

    ``names`` are those of an optimiser's parameters, in the order of its ``state_dict``.
    """
    if "protocol" not in state:
        return StateFiles(folder, str(state.get("run", ""))).merge(epoch, workers, layout)
    errors = [worker["encoder"]["errors"] for worker in state["protocol"]["workers"] if "encoder" in worker]
    own = state["replicas"]["alone"].values() if workers_optimize(strategy) else ()
    moments = [{names[int(index)]: dict(entries) for index, entries in saved["state"].items()} for saved in own]
    return Merged([_total(rows) for rows in zip(*errors, strict=True)], mean_moments(moments), [])


class StateWriter:
    """Writes what the worker of ``job`` has after every epoch; ``link`` is its link to shards or peers."""

    def __init__(self, files: StateFiles, job: Job, link: WorkerRuntime, done: int) -> None:
        """``done``: epochs that had ended when this run began."""
        self._files, self._job, self._link, self._written = files, job, link, done
        self._names = optimizer_names(job.model, job.optimizer)

    def look(self, done: int) -> None:
        """The worker has ended its part of ``done`` epochs: write its state, unless steps wait to be pushed."""
        if done <= self._written or (residuals := self._link.residuals()) is None:
            return
        moments: Moments = {}
        if workers_optimize(self._job.strategy):
            state = self._job.optimizer.state_dict()["state"]
            moments = {self._names[int(index)]: dict(entries) for index, entries in state.items()}
        with self._link.paused():
            for epoch in range(self._written + 1, done + 1):
                self._files.write(self._link.worker, epoch, self._job.layout, residuals, moments)
        self._written = done


def read_part(path: Path) -> tuple[Residuals, Moments]:
    """Read the file that :meth:`Merged.write_part` wrote."""
    try:
        state = unsealed(path.read_bytes())
    except Exception as error:
        raise HocketError(
            f"Worker cannot read {path} ({error or type(error).__name__}): put the run's folder where all machines can read it."
        ) from None
    return state["residuals"], state["moments"]


def begin_with(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Residuals:
    """Load the optimiser's state that a worker begins with; the residuals, for its link."""
    residuals, moments = read_part(path)
    if moments:
        load_moments(model, optimizer, moments)
    return residuals


def _total(rows: Sequence[Tensor | None]) -> Tensor | None:
    having = [row for row in rows if row is not None]
    return torch.stack(having).sum(0) if having else None
