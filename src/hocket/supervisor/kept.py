"""Checkpoints of runs whose workers send messages: the global weights after every epoch, kept by the process that observes the run.

Such a run goes on after the last whole epoch, with as many workers as it is given. Workers write residuals and optimiser states to
files of their own (:mod:`hocket.train.worker_states`), which the new workers take over. State of processes that are gone (the
servers' momentum, steps of an epoch that had not ended) begins anew, and a note says so.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hocket.cluster.layout import Layout
from hocket.cluster.virtual import VirtualCluster
from hocket.drivers.processes import say
from hocket.errors import HocketError, SettingError
from hocket.files import read_safetensors
from hocket.strategy import Strategy
from hocket.train.checkpoints import LEAST_KEPT, Checkpoints, Generation, process_file
from hocket.train.record import CHECKPOINTS, ELSEWHERE, MAY_CHANGE, STATES, WEIGHTS, Record
from hocket.train.worker_states import StateFiles, keeps_state, merge_left

STATE, BEGINS = process_file(0), "begins.pt"


@dataclass(frozen=True)
class Keeping:
    """Whether a run goes on with the one in its folder (``resume``), and whether it leaves checkpoints: the last ``keep``."""

    resume: bool = False
    checkpoints: bool = False
    keep: int = LEAST_KEPT
    note: Callable[[str], None] = lambda text: say(text.rstrip("."))


class KeptWeights:
    """The checkpoints in ``out``."""

    def __init__(self, out: Path, keeping: Keeping, strategy: Strategy, layout: Layout, names: Sequence[str]) -> None:
        """``names`` are those of an optimiser's parameters, in the order of its ``state_dict``."""
        self.keeping, self._strategy, self._layout, self._names = keeping, strategy, layout, names
        self.files = StateFiles(out / STATES, secrets.token_hex(8))
        self.checkpoints = Checkpoints(out / CHECKPOINTS, VirtualCluster(1), keeping.keep, keeping.note)
        self.weights: str | None = None
        """The file of the weights that the run goes on with."""
        self.begins: str | None = None
        """The file of what its workers begin with beside these."""
        self.resumed: list[dict[str, Any]] = []
        """What was done each time that the run went on, for run.json."""

    @property
    def keeps_states(self) -> bool:
        """Whether workers write their residuals and optimiser states."""
        return self.keeping.checkpoints and keeps_state(self._strategy)

    def prepare(self) -> None:
        """Make the folder for the workers' files; a worker on another machine must not make one of its own there."""
        if self.keeps_states:
            self.files.folder.mkdir(exist_ok=True)

    def load(self, model: nn.Module, record: Record, repeated: dict[str, Any], workers: int) -> list[dict[str, Any]]:
        """Load the newest weights that are whole into ``model``; the lines of metrics so far, one per epoch that has ended."""
        if not self.keeping.resume:
            return []
        newest = self.checkpoints.newest()
        before = record.read_run() or (None if newest is None else newest.facts["run"])
        if before is None:
            raise SettingError(f"There is no run in {record.folder} to go on with; start without <resume>.")
        record.check_resumed(before, repeated, (*MAY_CHANGE, *(ELSEWHERE if before.get("virtual") else ())))
        lines: list[dict[str, Any]] = []
        loaded: dict[str, Any] = {}

        def load(generation: Generation) -> None:
            state = generation.load(STATE)
            if not isinstance(state["metrics"], list) or len(state["metrics"]) != generation.facts["epoch"]:
                raise HocketError("its metrics are of another run")
            model.load_state_dict(read_safetensors(generation.content(WEIGHTS)))
            lines[:] = state["metrics"]
            loaded.update(state)

        found = self.checkpoints.resume(lambda _: [STATE, WEIGHTS], load)
        self.weights = str(found.folder / WEIGHTS)
        here = found.facts["workers"]
        others = f"{here} workers become {workers}: " if here != workers else ""
        taken = self._take_over(loaded, len(lines), here, workers)
        done = f"{others}{taken}epoch {len(lines) + 1} begins at its first sample."
        self.resumed = [*before.get("resumed", []), {"epoch": len(lines), "step": found.facts["step"], "done": done}]
        self.keeping.note(done)
        return lines

    def _take_over(self, state: dict[str, Any], epoch: int, before: int, workers: int) -> str:
        """Let ``workers`` workers begin with the states of those ``before`` after ``epoch``; returns a sentence about it."""
        parts = []
        if keeps_state(self._strategy):
            merged = merge_left(state, self.files.folder, epoch, before, self._strategy, self._layout, self._names)
            parts.append(merged.describe(workers))
            if merged.owes or merged.moments:
                self.files.folder.mkdir(exist_ok=True)
                merged.write_part(self.files.folder / BEGINS, workers)
                self.begins = str(self.files.folder / BEGINS)
        if self._strategy.runtime == "server":
            parts.append("the servers' momentum begins anew")
        return "".join(f"{part}; " for part in parts if part)

    def save(self, weights: dict[str, Tensor], lines: list[dict[str, Any]], steps: int, run: dict[str, Any]) -> None:
        """Begin to write the global weights of the epoch that has ended."""
        if self.keeping.checkpoints:
            where = {"epoch": len(lines), "step": steps, "workers": run["workers"], "processes": 1}
            state = {"metrics": list(lines), "run": self.files.run}
            self.checkpoints.save({STATE: state, WEIGHTS: weights}, {**where, "run": run})
            self.files.remove_before(min((kept.facts["epoch"] for kept in self.checkpoints.readable()), default=0))
