"""Downpour SGD (DistBelief, Dean 2012): asynchronous on a sharded server, with steps of one's own in between.

A worker pushes the *sum* of its gradients every ``push`` steps, fetches every ``fetch`` steps, and steps locally in between with
its own optimiser. Pushing, fetching and computing overlap: what was asked for lands before the next step (``overlap=False``: the
worker waits for it instead). ``warm`` first steps are made by worker 0 alone. The server's optimiser is often Adagrad, whose
rate per parameter copes with old gradients: ``server(optimizer=adagrad)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.errors import HocketError
from hocket.sync.base import Asynchronous, ServerAction, whole


@dataclass(frozen=True)
class Downpour(Asynchronous):
    """``downpour(push, fetch, warm=0, overlap=True)``."""

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
