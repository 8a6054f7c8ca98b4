"""Virtual workers that do not step together: their rows, the programs that run them, and the training on a virtual clock."""

from hocket.train.asynchronous.replicas import AsyncReplicas
from hocket.train.asynchronous.simulation import DEFAULT_CLUSTER, AsyncSimulation

__all__ = ["DEFAULT_CLUSTER", "AsyncReplicas", "AsyncSimulation"]
