"""Parameter servers: the weights are on shards, and so is the optimiser; the learning rates are the worker's."""

from __future__ import annotations

from collections.abc import Callable

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.drivers.server_runtime import ServerRuntime
from hocket.programs.server.optimizer_spec import shard_optimizer
from hocket.train.ledger_view import MeshAxes
from hocket.train.runtimes.base import Binding
from hocket.train.runtimes.messages import MessageRuntime

Connect = Callable[[Layout], ServerRuntime]


def server_runtime(connect: Connect, cluster: Cluster | None = None, axes: MeshAxes | None = None) -> MessageRuntime:
    """A worker of the shards that ``connect`` finds."""

    def join(binding: Binding) -> ServerRuntime:
        spec = shard_optimizer(binding.strategy, binding.optimizer)  # refuses an optimiser that shards do not know
        link = connect(binding.layout)
        link.join(binding.weights, spec)
        return link

    return MessageRuntime(join, cluster, takes_gradients=True, axes=axes)
