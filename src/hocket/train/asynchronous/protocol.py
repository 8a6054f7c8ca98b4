"""The interface between a training of virtual workers and the programs that run it; one file for servers, one for gossip."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hocket.cluster.spec import ClusterSpec
from hocket.data.batches import BatchSequence
from hocket.drivers.links import LinkModel, LinkNetwork
from hocket.drivers.simulation import Simulation
from hocket.programs.base import Effects
from hocket.train.asynchronous.replicas import AsyncReplicas


class AsyncProtocol(ABC):
    """The programs of all nodes, and how a worker's step goes through them."""

    workers: Sequence[Any]
    """The workers' programs."""

    def __init__(self, replicas: AsyncReplicas, spec: ClusterSpec, batches: BatchSequence, hosts: int) -> None:
        """``hosts``: how many links there are; the first ones are the workers'."""
        self.replicas, self.batches, self.spec = replicas, batches, spec
        self.links = LinkModel(spec, hosts)
        self.network = LinkNetwork(self.links, {})
        self.simulation = Simulation(self.network, timers=False)

    def ends(self, workers: int) -> dict[tuple[str, int], int]:
        """The link of each worker; those of a host may share one."""
        size = self.spec.host_size if self.spec.shared_links else None
        return {("worker", w): w // (size or 1) for w in range(workers)}

    def beside_s(self, worker: int, share: float) -> float:
        """The seconds of a worker's step beside its gradient: loading ``share`` of a mini-batch, updating weights, an exchange."""
        return self.spec.load_s * share + self.spec.update_s * self.values + self.spec.exchange_s

    @property
    def values(self) -> float:
        """The number of a worker's weights, or that of the larger model for which it stands."""
        return self.replicas.layout.parameters * self.network.scale

    def carry_out(self, worker: int, effects: Effects) -> None:
        """Carry out the effects of a worker's program."""
        self.simulation.carry_out(("worker", worker), effects)

    @abstractmethod
    def start(self) -> None:
        """All workers join; it takes no time."""

    @abstractmethod
    def next_batch(self, worker: int) -> tuple[int | None, Effects]:
        """The number of a worker's next mini-batch; None with effects: it has to be requested; None without: there is none."""

    @abstractmethod
    def before_update(self, worker: int, weight: float) -> Effects:
        """A worker's gradient is there; ``weight`` is that of its mini-batch."""

    def steps_locally(self, worker: int) -> bool:
        """Whether the worker's own optimiser makes the step under way."""
        return True

    @abstractmethod
    def after_update(self, worker: int, lrs: Sequence[float]) -> Effects:
        """The step is done."""

    def end(self, worker: int) -> Effects:
        """There is no further mini-batch for a worker."""
        return []

    def leave(self, worker: int) -> Effects:
        """The worker's last exchange has ended; without servers it still answers the others."""
        return []

    def rejoin(self, worker: int) -> Effects:
        """The training was made longer: a worker that had left continues."""
        return []

    @property
    @abstractmethod
    def progress(self) -> int:
        """How many mini-batches have had their effect so far."""

    @abstractmethod
    def global_weights(self, epoch: int) -> tuple[list[Tensor], Tensor | None]:
        """The weights ``[1, values]`` per bucket and flat buffers to evaluate after ``epoch`` (0: now)."""

    @abstractmethod
    def staleness(self) -> dict[int, int] | None:
        """The histogram of staleness so far; None where staleness has no meaning."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The programs' part of the state to resume from."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
