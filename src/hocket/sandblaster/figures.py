"""What a run spent, and its metrics per iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from hocket.sandblaster.lbfgs import State
from hocket.sandblaster.portions import Counts


@dataclass(frozen=True)
class Figures:
    """What has been spent so far."""

    seconds: float = 0.0
    bytes_coordinator: int = 0
    bytes_shards: int = 0
    counts: Counts = field(default_factory=Counts)


class Spender(Protocol):
    """A world that knows what it has spent."""

    @property
    def figures(self) -> Figures:
        """What has been spent so far."""


def rows(states: Iterable[State], world: Spender, accuracy: Callable[[], float | None], start: int = 0) -> Iterator[dict[str, Any]]:
    """One dict of metrics for every state; ``start`` is how many evaluations there were before."""
    before, evaluations = world.figures, start
    for state in states:
        spent = world.figures
        yield {
            "iteration": state.iteration,
            "loss": state.loss,
            "accuracy": accuracy(),
            "evaluations": state.evaluations - evaluations,
            "seconds": spent.seconds - before.seconds,
            "bytes_coordinator": spent.bytes_coordinator - before.bytes_coordinator,
            "bytes_shards": spent.bytes_shards - before.bytes_shards,
            **asdict(spent.counts - before.counts),
        }
        before, evaluations = spent, state.evaluations
