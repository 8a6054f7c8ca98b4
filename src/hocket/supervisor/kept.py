"""Checkpoints of runs whose workers send messages: the global weights after every epoch, kept by the process that observes the run.

Such a run goes on after the last whole epoch, with as many workers as it is given. What only processes know that are gone (the
servers' momentum, the workers' residuals, steps of an epoch that had not ended) begins anew, and this is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hocket.cluster.virtual import VirtualCluster
from hocket.drivers.processes import say
from hocket.errors import HocketError, SettingError
from hocket.files import read_safetensors
from hocket.train.checkpoints import LEAST_KEPT, Checkpoints, Generation, process_file
from hocket.train.record import CHECKPOINTS, MAY_CHANGE, WEIGHTS, Record

STATE = process_file(0)


@dataclass(frozen=True)
class Keeping:
    """Whether a run goes on with the one in its folder (``resume``), and whether it leaves checkpoints: the last ``keep``."""

    resume: bool = False
    checkpoints: bool = False
    keep: int = LEAST_KEPT
    note: Callable[[str], None] = lambda text: say(text.rstrip("."))


class KeptWeights:
    """The checkpoints in ``out``."""

    def __init__(self, out: Path, keeping: Keeping) -> None:
        self.keeping = keeping
        self.checkpoints = Checkpoints(out / CHECKPOINTS, VirtualCluster(1), keeping.keep, keeping.note)
        self.weights: str | None = None
        """The file of the weights that the run goes on with."""

    def load(self, model: nn.Module, record: Record, repeated: dict[str, Any], workers: int) -> list[dict[str, Any]]:
        """Load the newest weights that are whole into ``model``; the lines of metrics so far, one per epoch that has ended."""
        if not self.keeping.resume:
            return []
        newest = self.checkpoints.newest()
        before = record.read_run() or (None if newest is None else newest.facts["run"])
        if before is None:
            raise SettingError(f"There is no run in {record.folder} to go on with; start without <resume>.")
        record.check_resumed(before, repeated, MAY_CHANGE)
        lines: list[dict[str, Any]] = []

        def load(generation: Generation) -> None:
            state = generation.load(STATE)
            if not isinstance(state["metrics"], list) or len(state["metrics"]) != generation.facts["epoch"]:
                raise HocketError("its metrics are of another run")
            model.load_state_dict(read_safetensors(generation.content(WEIGHTS)))
            lines[:] = state["metrics"]

        found = self.checkpoints.resume(lambda _: [STATE, WEIGHTS], load)
        self.weights = str(found.folder / WEIGHTS)
        others = f"{found.facts['workers']} workers become {workers}; " if found.facts["workers"] != workers else ""
        anew = "residuals and the servers' momentum begin anew"
        self.keeping.note(f"{others}epoch {len(lines) + 1} begins at its first sample; {anew}.")
        return lines

    def save(self, weights: dict[str, Tensor], lines: list[dict[str, Any]], steps: int, run: dict[str, Any]) -> None:
        """Begin to write the global weights of the epoch that has ended."""
        if self.keeping.checkpoints:
            where = {"epoch": len(lines), "step": steps, "workers": run["workers"], "processes": 1}
            self.checkpoints.save({STATE: {"metrics": list(lines)}, WEIGHTS: weights}, {**where, "run": run})
