"""The steps of a strategy whose workers step together, on the virtual clock and without values.

The program is the one that real processes and virtual workers run (:class:`hocket.programs.collective.CollectiveProgram`); its
one row, on the ``meta`` device, stands for all workers (:mod:`hocket.cluster.one_row`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.layout import Layout
from hocket.cluster.one_row import OneRowCluster
from hocket.cluster.spec import ClusterSpec
from hocket.programs.collective import CollectiveProgram
from hocket.programs.two_stage import program_for
from hocket.strategy import Strategy

MEASURED = 8
"""So many steps at least are averaged, after one period (or two steps) to warm up."""


@dataclass(frozen=True)
class Prediction:
    """What one strategy costs with so many workers; seconds and bytes are of one step of one worker, on average."""

    strategy: str
    workers: int
    step_s: float = math.nan
    compute_s: float = math.nan
    wait_s: float = math.nan
    transfer_s: float = math.nan
    transfer_hidden_s: float = math.nan
    bytes_sent: float = math.nan
    memory_bytes: float = math.nan
    """Of a worker: weights, gradients, the optimiser's state, the strategy's, and activations as far as they are known."""
    samples_per_s: float = math.nan
    """Of all workers, checkpoints and failures included."""
    cost: float | None = None
    """Of 1,000 mini-batches, where the cluster has a price."""
    mesh: str = ""
    refused: str | None = None
    """Why there is no prediction."""

    @property
    def efficiency(self) -> float:
        """The share of their time in which workers compute."""
        return self.compute_s / self.step_s

    @property
    def exchange_s(self) -> float:
        """What a worker spends waiting and on transfers that computing does not hide."""
        return self.wait_s + self.transfer_s

    def plain(self) -> dict[str, Any]:
        """For JSON and CSV."""
        found = {**vars(self), "efficiency": self.efficiency}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}


def step_together(
    strategy: Strategy, layout: Layout, spec: ClusterSpec, workers: int, step_s: float, steps: int | None = None, seed: int = 0
) -> tuple[Prediction, float]:
    """The mean step, and the bytes of the strategy's own state; of the first ``steps`` steps where they are given."""
    cluster = OneRowCluster(workers, spec=spec, seed=seed, replays=steps is None and strategy.topology.uniform)
    clock = cluster.clock
    assert clock is not None
    clock.step_s = step_s
    weights, grads = ([b.empty(1) for b in layout.buckets] for _ in range(2))
    program = program_for(strategy, layout, cluster, weights, seed)
    program.momentum = _Momentum(program) if strategy.exchanged == "momentum" else None
    program.moments = _Moments(weights)
    period = strategy.sync.period
    warm = 0 if steps is not None else max(period, 2)
    measured = steps if steps is not None else -(-MEASURED // period) * period
    if steps is None:  # from where it goes on as it is
        program.step = -(-getattr(strategy.sync, "after", 0) // period) * period
        program.exchanges = getattr(strategy.compression, "warmup", 0)
    for step in range(warm + measured):
        if step == warm:
            clock.take()
            cluster.ledger.sent.zero_()
            cluster.ledger.sent_varying.zero_()
        _step(program, step, weights, grads)
    seconds, wait, transfer, hidden = (clock.take().mean(0) / measured).tolist()
    sent = float(cluster.ledger.bytes_sent[0]) / measured
    state = _bytes([program.gradient_state, program.weight_state, program.outer_state])
    if workers > 1:  # the copy that travels; under acco gradients of two halves, what travels, and the weights to go back to
        state += layout.bytes * (4 if strategy.sync.predicts else int(strategy.weights))
    found = Prediction(str(strategy), workers, seconds, seconds - wait - transfer, wait, transfer, hidden, sent)
    return found, state


def _step(program: CollectiveProgram, step: int, weights: list[Tensor], grads: list[Tensor]) -> None:
    """What :meth:`hocket.train.replicas.StackedReplicas.step` does, without gradients."""
    clock, layout = program.cluster.clock, program.layout
    assert clock is not None
    clock.compute(step)
    mixing = program.mixes_gradients
    for b, rows in enumerate(grads):
        program.gradient_ready(b, rows)
    if mixing:
        slots = sum(len(b.slots) for b in layout.buckets)
        program.flags_ready(torch.empty(1, slots + 1, dtype=torch.bool, device="meta"))
        program.gradients_done()
    program.before_update(weights)
    program.after_update(weights)


class _Momentum:
    """1-bit Adam after its warm-up, 0/1 Adam between two refreshes."""

    def __init__(self, program: CollectiveProgram) -> None:
        self._program = program

    @property
    def exchanges(self) -> bool:
        return (self._program.step + 1) % self._program.strategy.sync.period == 0

    def enter(self, bucket: int, gradients: Tensor) -> bool:
        return True


class _Moments:
    """An optimiser with both moments."""

    def __init__(self, weights: list[Tensor]) -> None:
        self._weights = weights

    def read(self, bucket: int, second: bool) -> Tensor:
        return torch.empty_like(self._weights[bucket])

    def write(self, bucket: int, second: bool, rows: Tensor) -> None:
        """There are no values."""


def _bytes(state: Any) -> float:
    """Bytes of all tensors in nested dicts and lists."""
    if isinstance(state, Tensor):
        return float(state.numel() * state.element_size())
    found = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(_bytes(value) for value in found)
