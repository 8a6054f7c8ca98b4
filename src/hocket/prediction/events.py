"""The steps of a strategy whose workers do not step together: the programs of real processes on the event queue.

A small model stands for the one in question: its messages are thought to have as many times as many bytes as it has fewer
parameters, and its gradients are noise, so that nothing is computed. Of three epochs the middle one counts: workers have begun, and
none has ended.

Beyond :data:`MOST` workers the bottleneck decides (the utilisation law, Denning 1978): with ``u`` seconds of the busiest server, or
of its link, per worker and step, ``N`` workers need at least ``N·u`` for a step; otherwise a step goes on growing as it did between
the last two sizes that were simulated. Where each worker's machine hosts a shard, or workers talk in pairs, more of them load no
link more, and a step takes as long as the last. There disturbances average out over a long period, so that fewer workers tell it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.layout import Layout
from hocket.cluster.spec import ClusterSpec
from hocket.cluster.virtual import VirtualCluster
from hocket.data.base import DataSet, identity
from hocket.prediction.steps import Prediction
from hocket.strategy import Strategy
from hocket.train.asynchronous import AsyncSimulation
from hocket.train.loop import TrainingPlan
from hocket.train.simulate import train_rows

MOST, MOST_LINKS = 32, 256
"""Workers, and pairs of a worker and a shard, that are simulated one by one."""
_STEPS = 4096
"""Steps of all workers in an epoch that is simulated in place of more workers."""
_SIDE = 64
_ROUNDS = 8


def step_apart(strategy: Strategy, parameters: int, spec: ClusterSpec, workers: int, step_s: float, seed: int = 0) -> Prediction:
    """The mean time in which ``workers`` mini-batches have their effect, and what the workers do in it."""
    shards = strategy.topology.num_shards(workers)
    few = max(4, min(MOST, MOST_LINKS // (shards if strategy.topology.has_servers else MOST // 4)))
    if workers <= few:
        return _simulated(strategy, parameters, spec, workers, step_s, seed)[0]
    if not strategy.topology.has_servers:
        few = min(few, max(2, len(spec.slowdown), _STEPS // _rounds(strategy, step_s)))
        return replace(_simulated(strategy, parameters, spec, few, step_s, seed)[0], workers=workers)
    full, busy_s = _simulated(strategy, parameters, spec, few, step_s, seed)
    half, _ = _simulated(strategy, parameters, spec, few // 2, step_s, seed)
    growth = max(0.0, (full.step_s - half.step_s) / (few - few // 2))
    longer = max(growth * (workers - few), workers * busy_s - full.step_s)
    return replace(full, workers=workers, step_s=full.step_s + longer, transfer_s=full.transfer_s + longer)


def _rounds(strategy: Strategy, step_s: float) -> int:
    """Steps of each worker in an epoch: whole periods."""
    period = strategy.sync.expected_period(step_s)
    return -(-_ROUNDS // period) * period


@lru_cache(256)
def _simulated(
    strategy: Strategy, parameters: int, spec: ClusterSpec, workers: int, step_s: float, seed: int
) -> tuple[Prediction, float]:
    """The prediction, and the seconds of the busiest server, or of its link, per worker and step."""
    rounds = _rounds(strategy, step_s)
    samples = torch.zeros(workers * rounds, _SIDE), torch.zeros(workers * rounds, dtype=torch.int64)
    data = DataSet("noise", samples, None, 2, identity)
    plan = TrainingPlan(3, 1, seed, evaluate=False, evaluate_last=False, worst=False)
    alone_s = None if spec.alone_s is None or spec.step_s is None else spec.alone_s * step_s / spec.step_s
    cluster = VirtualCluster(workers, spec=replace(spec, step_s=step_s, alone_s=alone_s), seed=seed)
    sgd = lambda params: torch.optim.SGD(params, 0.1)  # noqa: E731
    training = train_rows(_small, nn.functional.cross_entropy, sgd, data, strategy, cluster, plan, engine=Noise)
    assert isinstance(training, AsyncSimulation)
    protocol = training.protocol
    protocol.network.scale = parameters / protocol.replicas.layout.parameters
    epochs = training.run()
    next(epochs)
    links = protocol.links
    before = torch.tensor([links.sent, links.worked], dtype=torch.float64)
    entry = next(epochs)
    sent, worked = (torch.tensor([links.sent, links.worked], dtype=torch.float64) - before).tolist()
    own, servers = sum(sent[:workers]), sent[workers:]
    busiest = max(own / len(servers), *servers) / (spec.bandwidth * spec.links) if servers else 0.0
    busiest = max(busiest, *worked)
    seconds, compute, wait, transfer, hidden = (
        entry[name] / rounds for name in ("seconds", "compute_s", "wait_s", "transfer_s", "transfer_hidden_s")
    )
    found = Prediction(str(strategy), workers, seconds, compute, wait, transfer, hidden, own / workers / rounds)
    return found, busiest / workers / rounds


def _small() -> nn.Module:
    return nn.Linear(_SIDE, _SIDE, bias=False)


class Noise:
    """A gradient engine that computes nothing."""

    def __init__(self, layout: Layout) -> None:
        generator = torch.Generator().manual_seed(0)
        self._noise = [torch.randn(b.size, generator=generator) for b in layout.buckets]
        self._slots = sum(len(b.slots) for b in layout.buckets)

    def gradients(
        self, weights: list[Tensor], buffers: dict[str, Tensor], inputs: Any, targets: Any, grads: list[Tensor], keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        for rows, noise in zip(grads, self._noise, strict=True):
            rows.copy_(noise.expand_as(rows))
        rows_here = grads[0].shape[0]
        return torch.zeros(rows_here), torch.ones(rows_here, self._slots, dtype=torch.bool)
