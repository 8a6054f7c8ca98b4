"""Asynchronous DiLoCo: local steps, then a push to servers that run the outer optimiser (Liu 2024, arXiv:2401.09135).

After ``p`` steps of its own optimiser a worker pushes its displacement ``Δ = o − w`` from the weights ``o`` that it fetched last,
and fetches those that the servers have by now; nobody waits. The servers step with every push, by delayed Nesterov: the momentum
changes with every ``delay``-th push alone, ``m ← β·m + mean Δ`` of the last ``delay`` ones, since momentum of single, stale
displacements makes training unstable; a push in between moves the weights by ``lr·Δ/delay``. The default is the paper's: as many
pushes as there are workers (with a quorum, as many updates as their pushes make). ``delay=1`` is Nesterov's method.

``quorum=k`` (Decoupled DiLoCo, arXiv:2604.21428): the servers wait until pushes of ``k`` workers are there, and step once with
their mean. The workers do not wait for it. ``grace=s``: from then on they wait ``s`` seconds more for pushes of the others.
``weights=steps`` weighs each worker by the steps that its pushes hold (the paper's ``tokens²/steps``, where all steps have as many
tokens); ``direction=True`` takes the mean of directions times the mean of norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.compression.base import Compressor, flag
from hocket.errors import HocketError, nearest
from hocket.sync.base import Asynchronous, ServerAction, number, whole
from hocket.topology.base import Topology

WEIGHTS = ("equal", "steps")


@dataclass(frozen=True)
class AsyncDiLoCo(Asynchronous):
    """``asyncdiloco(p, lr=0.7, momentum=0.9, quorum=1, grace=0)``; ``delay=n`` if it is not one push of each worker."""

    p: int = 50
    lr: float = 0.7
    momentum: float = 0.9
    delay: int = 0
    """0: one push of each worker."""
    quorum: int = 1
    grace: float = 0.0
    """Seconds in which pushes of more workers than the quorum are waited for."""
    weights: str = "equal"
    direction: bool = False
    name: ClassVar[str] = "asyncdiloco"
    paper: ClassVar[str] = "Liu et al., Asynchronous Local-SGD Training for Language Modeling, 2024"

    def __post_init__(self) -> None:
        whole(self.p, "asyncdiloco", "p")
        number(self.lr, "asyncdiloco", "lr", 0, float("inf"))
        number(self.momentum, "asyncdiloco", "momentum", 0, 1)
        whole(self.delay, "asyncdiloco", "delay", 0)
        whole(self.quorum, "asyncdiloco", "quorum")
        number(self.grace, "asyncdiloco", "grace", 0, float("inf"))
        flag(self.direction, "asyncdiloco", "direction")
        if self.weights not in WEIGHTS:
            raise HocketError(f"asyncdiloco(weights={self.weights!r}): use equal or steps{nearest(str(self.weights), WEIGHTS)}.")
        if (self.weights != "equal" or self.direction) and self.quorum == 1 and not self.grace:
            raise HocketError(
                "asyncdiloco(weights=…, direction=…): these say how several pushes are averaged; give quorum= or grace=, too."
            )

    @property
    def period(self) -> int:
        return self.p

    @property
    def outer_settings(self) -> tuple[float, float]:
        return self.lr, self.momentum

    @property
    def outer_optimizer(self) -> dict[str, float] | None:
        return {"lr": self.lr, "momentum": self.momentum, "delay": self.delay}

    @property
    def push_quorum(self) -> int:
        return self.quorum

    @property
    def push_average(self) -> tuple[bool, bool, float]:
        return self.weights == "steps", self.direction, self.grace

    def _topology_refusal(self, topology: Topology, compressor: Compressor, exchange: str | None) -> str | None:
        if topology.has_servers and topology.server_optimizer is not None:
            return "the servers run the outer optimiser of asyncdiloco; leave optimizer= out"
        return super()._topology_refusal(topology, compressor, exchange)

    def server_action(self, step: int) -> ServerAction:
        now = step % self.p == 0
        return ServerAction(push=now, fetch=now, local=True)
