"""Gossip peers: workers average weights among themselves, without servers and without waiting for all others.

The workers keep their optimisers; the program takes the weights before and after a step, not gradients.
"""

from __future__ import annotations

from collections.abc import Callable

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.drivers.gossip_runtime import GossipRuntime
from hocket.train.runtimes.base import Binding
from hocket.train.runtimes.messages import MessageRuntime

Connect = Callable[[Layout], GossipRuntime]


def peer_runtime(connect: Connect, cluster: Cluster | None = None) -> MessageRuntime:
    """A worker among the peers that ``connect`` finds."""

    def join(binding: Binding) -> GossipRuntime:
        link = connect(binding.layout)
        binding.set_buffers(link.join(binding.weights, None, binding.flat_buffers))
        return link

    return MessageRuntime(join, cluster, takes_gradients=False)
