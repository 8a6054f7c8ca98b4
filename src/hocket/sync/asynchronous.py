"""Asynchronous: a server holds the truth; each worker pushes its gradient when ready and fetches fresh weights; nobody waits.

Each push is one step of the optimiser on the server, with the worker's current rate. The gradient of a worker that took long was
computed at old weights; ``τ`` is the number of updates since. Against that, ``compensation``:

- ``rate``: the update is scaled by ``1/τ`` (Zhang 2016, staleness-aware);
- ``taylor``: ``g + λ g⊙g⊙(w_now − w_then)``, DC-ASGD with a constant λ (Zheng 2017, arXiv:1609.08326);
- ``adaptive``: the same with ``λ/√(v + ε)``, where ``v`` is the running mean of ``g⊙g`` (0.95).

With ``overlap`` the weights travel while the next gradient is computed, at the price of one more step of age.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.compression.base import Compressor
from hocket.errors import HocketError
from hocket.sync.base import COMPENSATIONS, Asynchronous, compensation
from hocket.topology.base import Topology


@dataclass(frozen=True)
class Async(Asynchronous):
    """``async``, ``async(compensation=adaptive)``, ``async(overlap=True)``."""

    compensation: str = "none"
    strength: float | None = None
    overlap: bool = False
    name: ClassVar[str] = "async"
    paper: ClassVar[str] = "Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017"

    def __post_init__(self) -> None:
        compensation(self.compensation, self.strength, "async")
        if not isinstance(self.overlap, bool):
            raise HocketError(f"async(overlap={self.overlap!r}): overlap must be True or False.")
        if self.overlap and self.compensation in ("taylor", "adaptive"):
            raise HocketError(
                f"async(compensation={self.compensation}, overlap=True): it compares with the weights given last, and under "
                "overlap gradients are older than these; leave one of the two out."
            )

    @property
    def overlaps(self) -> bool:
        return self.overlap

    @property
    def delay_compensation(self) -> tuple[str, float]:
        return self.compensation, COMPENSATIONS[self.compensation] if self.strength is None else float(self.strength)

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
