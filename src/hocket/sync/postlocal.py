"""Post-local SGD: bulk until step ``after``, then ``local(p)`` (Lin 2020, arXiv:1808.07217).

Closes the generalisation gap of large batches. Gradients of the last bulk step, and what error feedback has held back of earlier
ones, travel uncompressed: the exchange of weights that follows has residuals of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.sync.base import Moment, Sync, whole


@dataclass(frozen=True)
class PostLocal(Sync):
    """``postlocal(p, after)``: ``bulk`` for ``after`` steps, then ``local(p)``."""

    p: int = 16
    after: int = 0
    name: ClassVar[str] = "postlocal"
    paper: ClassVar[str] = "Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020"

    def __post_init__(self) -> None:
        whole(self.p, "postlocal", "p")
        whole(self.after, "postlocal", "after", least=0)

    @property
    def period(self) -> int:
        return self.p

    def moment(self, step: int, weights: bool, uniform: bool = True) -> Moment:
        if step <= self.after:  # bulk; gossip exchanges weights in this phase, too
            return Moment.BEFORE if weights and not uniform else Moment.GRADIENTS
        if step % self.p:
            return Moment.NEVER
        return Moment.BEFORE if weights else Moment.GRADIENTS

    def rebases(self, step: int) -> bool:
        return step == self.after
