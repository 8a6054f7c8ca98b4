"""What a run spent, and its metrics per iteration."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hocket.sandblaster.lbfgs import State
from hocket.sandblaster.portions import Counts


@dataclass(frozen=True)
class Figures:
    """What has been spent so far."""

    seconds: float = 0.0
    bytes_coordinator: int = 0
    bytes_shards: int = 0
    counts: Counts = field(default_factory=Counts)

    def row(self, state: State, evaluations: int, before: Figures) -> dict[str, Any]:
        """The metrics of an iteration: what was spent since ``before``, when there had been so many ``evaluations``."""
        return {
            "iteration": state.iteration,
            "loss": state.loss,
            "accuracy": None,
            "evaluations": state.evaluations - evaluations,
            "seconds": self.seconds - before.seconds,
            "bytes_coordinator": self.bytes_coordinator - before.bytes_coordinator,
            "bytes_shards": self.bytes_shards - before.bytes_shards,
            **asdict(self.counts - before.counts),
        }
