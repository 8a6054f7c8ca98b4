"""Asynchronous: servers hold the weights; a worker pushes each gradient, fetches the current weights, and never waits for others.

Each push is one step of the optimiser on the server, with the worker's current rate. A gradient's staleness ``τ`` is the number
of updates between the weights it was computed at and its own update. ``compensation`` reduces the effect of staleness:

- ``rate``: the update is scaled by ``1/τ`` (Zhang 2016, staleness-aware);
- ``taylor``: ``g + λ g⊙g⊙(w_now − w_then)``, DC-ASGD with a constant λ (Zheng 2017, arXiv:1609.08326);
- ``adaptive``: the same with ``λ/√(v + ε)``, where ``v`` is the running mean of ``g⊙g`` (0.95).

With ``overlap`` the weights travel while the next gradient is computed, which makes gradients one step more stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.compression.base import Compressor
from hocket.errors import HocketError
from hocket.sync.base import COMPENSATIONS, Asynchronous, compensation
from hocket.topology.base import Topology


class Compensated(Asynchronous):
    """What ``async`` and ``ssp`` share: delay compensation, and weights that travel while the next gradient is computed."""

    compensation: str
    strength: float | None
    overlap: bool

    def _check(self) -> None:
        compensation(self.compensation, self.strength, self.name)
        if not isinstance(self.overlap, bool):
            raise HocketError(f"{self.name}(overlap={self.overlap!r}): overlap must be True or False.")
        if self.overlap and self.compensation in ("taylor", "adaptive"):
            raise HocketError(
                f"{self.name}(compensation={self.compensation}, overlap=True): the compensation needs the weights fetched last, "
                "but with overlap the gradient was computed at earlier ones; leave one of the two out."
            )

    @property
    def overlaps(self) -> bool:
        return self.overlap

    @property
    def delay_compensation(self) -> tuple[str, float]:
        return self.compensation, COMPENSATIONS[self.compensation] if self.strength is None else float(self.strength)


@dataclass(frozen=True)
class Async(Compensated):
    """``async``, ``async(compensation=adaptive)``, ``async(overlap=True)``."""

    compensation: str = "none"
    strength: float | None = None
    overlap: bool = False
    name: ClassVar[str] = "async"
    paper: ClassVar[str] = "Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017"

    def __post_init__(self) -> None:
        self._check()

    def _topology_refusal(self, topology: Topology, compressor: Compressor, exchange: str | None) -> str | None:
        if not topology.peer_to_peer:
            return super()._topology_refusal(topology, compressor, exchange)
        if exchange == "gradients":
            return "partners average their weights; leave exchange=gradients out"
        if compressor.compresses:
            return "partners average whole weights; leave the compression out, or use bulk + gossip"
        if not topology.pairs_workers:
            return (
                "async gossip pairs even with odd workers; matrix= and exponential are not supported; "
                "use gossip, gossip(ring), gossip(random) or gossip(pushsum)"
            )
        if self != Async():
            return "partners push no gradients, so compensation=, strength= and overlap= have no effect; write async + gossip"
        return None

    def _asynchronous_topologies(self) -> str:
        return "async + server or async + gossip"
