"""Local SGD: steps are local; every ``p``-th exchanges (Stich 2019, arXiv:1805.09767; Yu 2018; Lin 2020).

When ``t mod p = 0``: ``w̄ = mean_j w_{t−1,j}`` and ``w_{t,i} = w̄ + u_i``, with ``u_i`` computed at ``w_{t−1,i}``. The mean uses
the weights from *before* this step's gradient, so it travels while the gradient is computed. At p = 1 replicas stay one update
apart (under bulk they do not). ``local(p, mean=after)`` averages after the update and does not overlap. Optimiser state stays
local, unless ``moments=k`` averages first moments every ``k·p`` steps and second moments every ``2·k·p`` (DES-LOC,
arXiv:2505.22549).

Convergence is proven for ``p ≤ T^¼ / N^¾`` (Yu 2018): sufficient, not necessary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.compression.base import Compressor
from hocket.errors import HocketError, nearest
from hocket.sync.base import Moment, Sync, whole
from hocket.topology.base import Topology


@dataclass(frozen=True)
class Local(Sync):
    """``local(p)``, ``local(p, mean=after)``, ``local(p, residual=weights)``, ``local(p, moments=3)``."""

    p: int = 1
    mean: str = "before"
    residual: str = "memory"
    """Where error feedback keeps the residual: in the compressor's state (``memory``), or in the worker's own weights."""
    moments: int = 0
    """Every so many exchanges the optimisers' first moments are averaged, too, every twice as many the second; 0: never."""
    name: ClassVar[str] = "local"
    accumulates_momentum: ClassVar[bool] = True
    paper: ClassVar[str] = "Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019"

    def __post_init__(self) -> None:
        whole(self.p, "local", "p")
        if self.mean not in ("before", "after"):
            raise HocketError(f"local(mean={self.mean!r}): mean is before or after{nearest(str(self.mean), ('before', 'after'))}.")
        if self.residual not in ("memory", "weights"):
            words = nearest(str(self.residual), ("memory", "weights"))
            raise HocketError(f"local(residual={self.residual!r}): the residual is kept in a memory or in the weights{words}.")

        whole(self.moments, "local", "moments", least=0)

    @property
    def residual_stays(self) -> bool:
        return self.residual == "weights"

    def averages_moments(self, step: int, second: bool) -> bool:
        return self.moments > 0 and step % (self.p * self.moments * (1 + second)) == 0

    @property
    def period(self) -> int:
        return self.p

    def refusal(self, topology: Topology, compressor: Compressor, exchange: str | None, weights: bool) -> str | None:
        if self.mean == "after" and not weights:
            return "mean=after is about weights; leave it out, or use exchange=weights"
        if self.moments and not (weights and topology.uniform):
            return "moments= is for weights that all workers average; leave it out, or use allreduce"
        return super().refusal(topology, compressor, exchange, weights)

    def moment(self, step: int, weights: bool, uniform: bool = True) -> Moment:
        if step % self.p:
            return Moment.NEVER
        return Moment.GRADIENTS if not weights else Moment.BEFORE if self.mean == "before" else Moment.AFTER
