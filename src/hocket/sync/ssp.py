"""Stale-synchronous parallel (Ho 2013): asynchronous, but the fastest may be at most ``s`` steps ahead of the slowest, then waits.

``ssp(0)`` is bulk: one update with the mean of all pushes. With ``s > 0`` each push is an update of its own, as under ``async``. It
hides *transient* stragglers; a worker that is always slow still slows all others down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.errors import HocketError
from hocket.sync.base import COMPENSATIONS, Asynchronous, compensation, whole


@dataclass(frozen=True)
class SSP(Asynchronous):
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
        compensation(self.compensation, self.strength, "ssp")
        if not isinstance(self.overlap, bool):
            raise HocketError(f"ssp(overlap={self.overlap!r}): overlap must be True or False.")
        if self.overlap and self.compensation in ("taylor", "adaptive"):
            raise HocketError(
                f"ssp(compensation={self.compensation}, overlap=True): the compensation needs the weights fetched last, "
                "but with overlap the gradient was computed at earlier ones; leave one of the two out."
            )
        if self.s == 0 and (self.overlap or self.compensation != "none"):
            raise HocketError("ssp(0) is bulk: its gradients are never stale; leave overlap= and compensation= out.")

    @property
    def max_staleness(self) -> float:
        return float(self.s)

    @property
    def overlaps(self) -> bool:
        return self.overlap

    @property
    def delay_compensation(self) -> tuple[str, float]:
        return self.compensation, COMPENSATIONS[self.compensation] if self.strength is None else float(self.strength)
