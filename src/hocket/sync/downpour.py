"""Downpour SGD (DistBelief, Dean 2012): asynchronous with a sharded server, and local steps between pushes.

A worker pushes the *sum* of its gradients every ``push`` steps, fetches every ``fetch`` steps, and steps locally in between with
its own optimiser. Pushing, fetching and computing overlap: fetched weights are applied before the next step (``overlap=False``: the
worker waits for them instead). Worker 0 makes the first ``warm`` steps alone. The server's optimiser is often Adagrad, whose
learning rate per parameter tolerates stale gradients: ``server(optimizer=adagrad)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.errors import HocketError
from hocket.sync.base import Asynchronous, ServerAction, whole


@dataclass(frozen=True)
class Downpour(Asynchronous):
    """``downpour(push, fetch, warm=0, overlap=True)``: a push every ``push`` steps, a fetch every ``fetch`` steps."""

    push: int = 1
    fetch: int = 1
    warm: int = 0
    overlap: bool = True
    name: ClassVar[str] = "downpour"
    paper: ClassVar[str] = "Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012"

    def __post_init__(self) -> None:
        whole(self.push, "downpour", "push")
        whole(self.fetch, "downpour", "fetch")
        whole(self.warm, "downpour", "warm", 0)
        if not isinstance(self.overlap, bool):
            raise HocketError(f"downpour(overlap={self.overlap!r}): overlap must be True or False.")

    @property
    def period(self) -> int:
        return self.push

    def server_action(self, step: int) -> ServerAction:
        fetch = step % self.fetch == 0
        return ServerAction(push=step % self.push == 0, fetch=fetch, local=self.overlap or not fetch)

    @property
    def overlaps(self) -> bool:
        return self.overlap

    @property
    def warm_steps(self) -> int:
        return self.warm
