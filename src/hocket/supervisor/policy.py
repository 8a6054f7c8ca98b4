"""What a supervised run does about faults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hocket.errors import HocketError
from hocket.programs.server.wire import LIVENESS_TIMEOUT_S, SNAPSHOT_S


@dataclass(frozen=True)
class FaultPolicy:
    """A worker that is silent for ``liveness_timeout_s`` is given up; shards save themselves every ``snapshot_s`` (0: never)."""

    liveness_timeout_s: float = LIVENESS_TIMEOUT_S
    snapshot_s: float = SNAPSHOT_S
    replace: bool = False
    """Whether another worker is started for one that died."""
    keys: Path | None = None
    """A file made by ``hocket keys``: links are encrypted."""
    record: Path | None = None
    """A folder for recordings of all that happens to workers and shards, to replay the run."""

    def __post_init__(self) -> None:
        if self.snapshot_s < 0 or self.liveness_timeout_s <= 0:
            raise HocketError(
                f"liveness_timeout_s={self.liveness_timeout_s:g}, snapshot_s={self.snapshot_s:g}: seconds are above 0 "
                "(snapshot_s=0: no snapshots)."
            )

    def record_of(self, process: str) -> Path | None:
        """The file of one process."""
        return None if self.record is None else self.record / f"{process}.jsonl"
