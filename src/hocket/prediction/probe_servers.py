"""What a push and its answer cost beside the network: real exchanges of one worker with a shard on its own machine.

The first worker starts two shards, of a part of the model and of all of it, and exchanges with each while the others wait. What its
process computes is its own part; for the rest of the time the shard handles the message, and updates. Two sizes tell what a message
costs from what its bytes do.
"""

from __future__ import annotations

import secrets
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hocket.cluster.base import Cluster
from hocket.drivers.processes import close
from hocket.drivers.server_runtime import ServerRuntime
from hocket.drivers.start import address_of, start_shard
from hocket.errors import HocketError
from hocket.programs.server.optimizer_spec import shard_optimizer
from hocket.programs.server.requests import WorkerConfig
from hocket.programs.server.wire import LIVENESS_TIMEOUT_S, link_bytes
from hocket.strategy import Strategy
from hocket.train.checks import Factory, layout_for, optimizer_for
from hocket.transport import Keys

LEAST, MOST = 8, 40
_BYTES_PER_VALUE = 8
"""A push brings float32 values, and the answer has as many."""


@dataclass(frozen=True)
class Exchanged:
    """Seconds of one push with its answer: the worker's own, and those in which it waits."""

    values: int
    own_s: float
    shard_s: float


def server_costs(cluster: Cluster, small: nn.Module, whole: nn.Module, factory: Factory, limit_s: float) -> dict[str, Any]:
    """``server_message_s``, ``server_byte_s`` and the worker's own part, found by the first worker; all must call it."""
    found = torch.zeros(1, 4, dtype=torch.float64)
    if cluster.workers.start == 0:
        first, second = _measured(cluster, (small, whole), factory, limit_s)
        found[0] = torch.tensor(costs(first, second))
    message_s, byte_s, *own = cluster.all_gather_metrics(found)[0].tolist()
    return {"server_message_s": message_s, "server_byte_s": byte_s, "own": tuple(own)}


def costs(small: Exchanged, whole: Exchanged) -> tuple[float, float, float, float]:
    """A shard's seconds per message and per byte, and the worker's own per exchange and per value.

    >>> small, whole = (Exchanged(n, 1e-4 + n * 2e-9, 3e-4 + n * 8e-9) for n in (1000, 101_000))
    >>> [f"{s:.0e}" for s in costs(small, whole)]
    ['3e-04', '1e-09', '1e-04', '2e-09']
    """
    apart = max(1, whole.values - small.values)
    each = [max(0.0, long - short) / apart for short, long in ((small.shard_s, whole.shard_s), (small.own_s, whole.own_s))]
    fixed = [max(0.0, long - b * whole.values) for long, b in zip((whole.shard_s, whole.own_s), each, strict=True)]
    return fixed[0], each[0] / _BYTES_PER_VALUE, fixed[1], each[1]


def _measured(cluster: Cluster, modules: tuple[nn.Module, nn.Module], factory: Factory, limit_s: float) -> list[Exchanged]:
    strategy = Strategy.parse("async + server")
    keys = cluster.keys
    started: list[tuple[nn.Module, Any, bytes]] = []
    try:
        for module in modules:  # both start at once
            layout, job = layout_for(module, _optimizer(strategy, module, factory), strategy), secrets.token_bytes(16)
            most = link_bytes(strategy, layout)
            started.append((module, start_shard(0, job, "tcp://127.0.0.1:0", keys, LIVENESS_TIMEOUT_S, most_bytes=most), job))
        found = []
        for module, child, job in started:
            optimizer = _optimizer(strategy, module, factory)
            config = WorkerConfig(strategy, layout_for(module, optimizer, strategy), 0, 1)
            link = ServerRuntime([address_of(child)], job, config, None if keys is None else Keys.read(keys))
            link.join([b.empty(1) for b in config.layout.buckets], shard_optimizer(strategy, optimizer))
            try:
                found.append(_exchanged(link, config, limit_s / 2))
            finally:
                link.leave()
        return found
    finally:
        for _, child, _ in started:
            close(child)
            child.wait()


def _optimizer(strategy: Strategy, module: nn.Module, factory: Factory) -> torch.optim.Optimizer:
    """The user's, or plain SGD where shards do not know it."""
    chosen = optimizer_for(factory, list(module.parameters()))
    try:
        shard_optimizer(strategy, chosen)
    except HocketError:
        return torch.optim.SGD(module.parameters(), 0.1)
    return chosen


def _exchanged(link: ServerRuntime, config: WorkerConfig, limit_s: float) -> Exchanged:
    """Medians over some exchanges."""
    own: list[float] = []
    waited: list[float] = []
    gradients = [torch.randn(b.size, generator=torch.Generator().manual_seed(0)).to(b.dtype) for b in config.layout.buckets]
    ends = time.perf_counter() + limit_s
    while len(own) < LEAST or (len(own) < MOST and time.perf_counter() < ends):
        fresh = [g.clone() for g in gradients]  # a worker does not write to what it has handed over
        begun, computed = time.perf_counter(), time.process_time()
        link.before_update(fresh)
        link.after_update([0.0], None)
        seconds, busy = time.perf_counter() - begun, time.process_time() - computed
        own.append(min(busy, seconds))
        waited.append(max(0.0, seconds - busy))
    values = config.layout.parameters
    return Exchanged(values, statistics.median(own[1:]), statistics.median(waited[1:]))
