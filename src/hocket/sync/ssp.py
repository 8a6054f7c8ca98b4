"""Stale-synchronous parallel (Ho 2013): asynchronous, but the fastest may be at most ``s`` steps ahead of the slowest, then waits.

``ssp(0)`` is bulk: one update with the mean of all pushes. With ``s > 0`` each push is an update of its own, as under ``async``. It
hides *transient* stragglers; a worker that is always slow still slows all others down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.errors import HocketError
from hocket.sync.asynchronous import Compensated
from hocket.sync.base import whole


@dataclass(frozen=True)
class SSP(Compensated):
    """``ssp(s)``; ``compensation`` and ``overlap`` as in ``async``."""

    s: int = 3
    compensation: str = "none"
    strength: float | None = None
    overlap: bool = False
    name: ClassVar[str] = "ssp"
    static_partition: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NeurIPS 2013"
    )

    def __post_init__(self) -> None:
        whole(self.s, "ssp", "s", 0)
        self._check()
        if self.s == 0 and (self.overlap or self.compensation != "none"):
            raise HocketError("ssp(0) is bulk: its gradients are never stale; leave overlap= and compensation= out.")

    @property
    def max_staleness(self) -> float:
        return float(self.s)
