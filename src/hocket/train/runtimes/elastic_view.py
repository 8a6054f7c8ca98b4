"""What an elastic runtime refuses, tells and saves, and what it does apart from steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hocket.cluster.elastic import ElasticCluster
from hocket.data.elastic_stream import SampleStream
from hocket.errors import HocketError, WorkerLost
from hocket.programs.elastic.generation import Generation
from hocket.programs.elastic.member import Member
from hocket.strategy import Strategy
from hocket.train.runtimes.collective import CollectiveRuntime

AWAY = "This worker did not answer in time, and the others went on without it; start it again to join them."


class Rejoined(Exception):
    """This worker was away; it has the others' state now, and what it was about to do is void."""


class ElasticView(CollectiveRuntime):
    """The part of :class:`~hocket.train.runtimes.elastic.ElasticRuntime` that forms no groups."""

    cluster: ElasticCluster
    member: Member
    stream: SampleStream

    def __init__(self, cluster: ElasticCluster) -> None:
        super().__init__(cluster)
        self.events: list[dict[str, Any]] = []  # what happened: one entry per generation

    def refuse(self, strategy: Strategy, scaler: Any) -> None:
        super().refuse(strategy, scaler)
        if strategy.topology.sums_on_servers:
            raise HocketError(f"{strategy}: servers that sum know a fixed number of workers; use allreduce with elastic.")

    def any_worker(self, flag: bool) -> bool:
        with self.in_step():
            return super().any_worker(flag)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        with self.in_step(), super().averaged() as model:
            yield model

    def _mean(self, rows: Tensor) -> None:
        self.cluster.transact(lambda: self.cluster.mean(rows, self.cluster.world), rows)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """What this worker cannot do again after it was away."""
        try:
            yield
        except Rejoined:
            raise WorkerLost(AWAY) from None

    def _note(self, generation: Generation, seconds: float, gone: int, came: int) -> None:
        """A generation has been formed, without ``gone`` workers of the one before and with ``came`` others."""
        entry = {"generation": generation.number, "workers": self.cluster.size, "step": self.program.step, "seconds": seconds}
        lost = generation.lost - (self.events[-1]["lost_total"] if self.events else 0)
        self.events.append({**entry, "lost_total": generation.lost, "left": max(gone - lost, 0), "joined": came})

    def figures(self) -> dict[str, Any]:
        """How many workers there are now, how many the run has lost, and what else this one has seen so far."""
        counts = {"lost": self.member.lost, **{name: sum(event[name] for event in self.events) for name in ("left", "joined")}}
        data = {"dealt_again": self.stream.dealt_again, "skipped": self.stream.skipped, "unmixed": self.cluster.unmixed}
        return {"workers": self.cluster.size, **counts, "regroup_s": sum(event["seconds"] for event in self.events), **data}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "samples": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """That of one worker of as many as there are; the samples go on where all workers were (:meth:`SampleStream.go_on`)."""
        super().load_state_dict({**state, "workers": self.program._identity()["workers"]})
