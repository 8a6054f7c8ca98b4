"""The study's stale-synchronous scheme: workers step independently, for at most ``s`` steps since the last synchronisation.

The first worker that has made ``s`` steps waits; the others finish their current step; then all take the mean of the weights,
weighted by the steps that each made. So fast workers make more steps than slow ones, and none is more than ``s`` steps ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.sync.base import Meeting, whole


@dataclass(frozen=True)
class Stale(Meeting):
    """``stale(s)``: workers step independently, for at most ``s`` steps since the last mean of their weights."""

    s: int = 4
    name: ClassVar[str] = "stale"
    paper: ClassVar[str] = ""

    def __post_init__(self) -> None:
        whole(self.s, "stale", "s")

    @property
    def period(self) -> int:
        return self.s

    def meets(self, steps: int, seconds: float) -> bool:
        return steps == self.s
