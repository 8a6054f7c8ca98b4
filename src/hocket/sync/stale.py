"""The study's stale-synchronous scheme: workers step independently, for at most ``s`` steps since the last synchronisation.

The first worker that has made ``s`` steps waits; the others finish their current step; then all take the mean of the weights,
weighted by the steps that each made. So fast workers make more steps than slow ones, and none is more than ``s`` steps ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.compression.base import Compressor
from hocket.sync.base import Asynchronous, Moment, ServerAction, whole
from hocket.topology.base import Topology


@dataclass(frozen=True)
class Stale(Asynchronous):
    """``stale(s)``."""

    s: int = 4
    name: ClassVar[str] = "stale"
    default_weights: ClassVar[bool] = True
    only_weights: ClassVar[bool] = True
    default_topology: ClassVar[str] = "allreduce"
    pushes_gradients: ClassVar[bool] = False
    averages_weights: ClassVar[bool] = True
    paper: ClassVar[str] = ""

    def __post_init__(self) -> None:
        whole(self.s, "stale", "s")

    @property
    def period(self) -> int:
        return self.s

    def server_action(self, step: int) -> ServerAction:
        return ServerAction(push=False, fetch=False, local=True)

    def moment(self, step: int, weights: bool, uniform: bool = True) -> Moment:
        return Moment.AFTER if step % self.s == 0 else Moment.NEVER

    def _topology_refusal(self, topology: Topology, compressor: Compressor, exchange: str | None) -> str | None:
        if topology.sums_on_servers:
            return super()._topology_refusal(topology, compressor, exchange)
        if topology.has_server_settings:
            return "under stale the workers run the optimisers, so servers have no setting but shards; write server(shards=n)"
        if not (topology.one_mean or topology.has_servers):
            return "stale averages the weights of all workers at once; use allreduce or server"
        if compressor.compresses:
            return "stale averages whole weights, each after another number of steps; leave the compression out"
        return None
