"""What a scheme of workers that do not go in step has to say; one file per scheme."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from hocket.train.free.training import FreeTraining

Payload = Any


class Scheme(ABC):
    """Decides what happens after a gradient and when a message arrives; the training keeps time and computes gradients."""

    def __init__(self, training: FreeTraining) -> None:
        self.training = training
        self.crowd = training.replicas
        self.links = training.links

    def start(self) -> None:
        """Everybody begins."""
        for worker in range(self.crowd.rows):
            self.training.begin(worker, 0.0)

    @abstractmethod
    def computed(self, worker: int, now: float) -> None:
        """A worker's gradient is there."""

    @abstractmethod
    def arrived(self, kind: str, worker: int, end: int, payload: Payload, now: float) -> None:
        """Something this scheme sent has arrived."""

    def over(self, worker: int, now: float) -> None:  # noqa: B027 - most have nothing left to do
        """There is no further mini-batch for a worker."""

    def again(self, worker: int, now: float) -> None:
        """There is one after all: the training was made longer."""
        self.training.begin(worker, now)

    @abstractmethod
    def counted(self) -> int:
        """How many mini-batches have had their effect so far."""

    @abstractmethod
    def truth(self) -> list[Tensor]:
        """The weights to evaluate, ``[1, values]`` per bucket."""

    def ages(self) -> dict[int, int] | None:
        """How old gradients were when they were applied, since the last call; None where that has no meaning."""
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class Heard:
    """How old gradients are where there are no servers: as many contributions of others came to what the worker holds between the
    moment when the gradient's weights were read and the moment when it was applied.

    >>> heard = Heard(2)
    >>> for _ in range(3):
    ...     heard.contribution(1)
    >>> heard.applied(0), heard.applied(1), heard.applied(1), heard.ages(), heard.ages()
    (None, None, None, {0: 2, 3: 1}, {})
    """

    def __init__(self, workers: int) -> None:
        self._since = [0] * workers
        self._ages: Counter[int] = Counter()

    def contribution(self, worker: int) -> None:
        """Another's has come to a worker."""
        self._since[worker] += 1

    def read(self, worker: int) -> None:
        """A worker computes at the weights that it has now."""
        self._since[worker] = 0

    def applied(self, worker: int) -> None:
        """A worker's gradient was applied, and it reads its weights anew."""
        self._ages[self._since[worker]] += 1
        self.read(worker)

    def ages(self) -> dict[int, int]:
        """How many gradients had which age, since the last call."""
        found, self._ages = dict(sorted(self._ages.items())), Counter()
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"since": list(self._since), "ages": dict(self._ages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._since, self._ages = list(state["since"]), Counter(state["ages"])
