"""Gossip peers: workers average weights among themselves, without servers and without waiting for all others.

The workers keep their optimisers; the program takes the weights before and after a step, not gradients.
"""

from __future__ import annotations

from collections.abc import Callable

from hocket.cluster.base import Cluster
from hocket.train.runtimes.base import Binding
from hocket.train.runtimes.messages import MessageLink, MessageRuntime

Meet = Callable[[Binding], MessageLink]


def peer_runtime(meet: Meet, cluster: Cluster | None = None) -> MessageRuntime:
    """A worker of the peers that ``meet`` finds and joins, with ``binding.weights`` and ``binding.flat_buffers``."""
    return MessageRuntime(meet, cluster, takes_gradients=False)
