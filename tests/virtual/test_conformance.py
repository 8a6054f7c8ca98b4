"""The conformance table: the full product of the axes, every method of the registries, on four virtual workers.

The model is a quadratic, ``loss_i(w) = ½‖w − target_i‖²``: its gradient costs nothing, so that the whole product takes seconds.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from hocket.cluster import VirtualCluster, layout_of
from hocket.errors import HocketError
from hocket.programs.two_stage import program_for
from hocket.strategy import Strategy
from hocket.sync import Moment
from virtual.methods import COMPRESSION, SYNC, TOPOLOGY, missing

WORKERS, STEPS, LR = 4, 6, 0.1
EXCHANGES = ("weights", "gradients", "updates")
LAYOUT = layout_of(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)).named_parameters(), None, 100, 60)


def _randn(seed: int, rows: int = WORKERS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, b.size, generator=generator) for b in LAYOUT.buckets]


TARGETS = _randn(1)


class Descent:
    """The program of one strategy, driven by the gradient of the quadratic."""

    def __init__(self, strategy: Strategy) -> None:
        self.cluster = VirtualCluster(WORKERS)
        self.weights = [w.expand(WORKERS, -1).clone() for w in _randn(0, 1)]
        self.program = program_for(strategy, LAYOUT, self.cluster, self.weights)

    def step(self, lr: float = LR) -> None:
        gradients = [lr * (w - t) for w, t in zip(self.weights, TARGETS, strict=True)]
        for bucket, rows in enumerate(gradients):
            self.program.gradient_ready(bucket, rows)
        self.program.gradients_done()
        self.program.before_update(self.weights)
        for w, g in zip(self.weights, gradients, strict=True):
            w -= g
        self.program.after_update(self.weights)

    def loss(self) -> float:
        """Of the mean model on everybody's data."""
        return sum(float(((w.mean(0) - t) ** 2).sum()) for w, t in zip(self.weights, TARGETS, strict=True))


def _parse(*parts: str) -> Strategy | None:
    """The strategy, or None where it is refused with one sentence."""
    try:
        return Strategy.parse(" + ".join(parts))
    except HocketError as error:
        sentence = str(error)
        assert sentence.endswith(".")
        assert "\n" not in sentence
        assert len(sentence) > 30
        return None


def _exchanges(strategy: Strategy, step: int) -> bool:
    """Whether bytes leave during ``step``: its own exchange, or the mix for the next one, launched early."""
    own = strategy.moment(step) in (Moment.GRADIENTS, Moment.AFTER) or (step == 1 and strategy.moment(1) is Moment.BEFORE)
    return own or strategy.moment(step + 1) is Moment.BEFORE


def test_every_registered_method_has_a_row() -> None:
    assert missing() == [], "add the new method to tests/virtual/methods.py"


@pytest.mark.parametrize("sync", SYNC)
@pytest.mark.parametrize("topology", TOPOLOGY)
def test_the_product(sync: str, topology: str) -> None:
    """Weights stay finite, a second run has equal bits, and bytes leave exactly when workers exchange."""
    accepted = 0
    for compression, exchange in itertools.product(COMPRESSION, EXCHANGES):
        strategy = _parse(sync, topology, compression, f"exchange={exchange}")
        if strategy is None:
            continue
        accepted += 1
        one, two = Descent(strategy), Descent(strategy)
        for step in range(1, STEPS + 1):
            before = one.cluster.ledger.bytes_sent
            one.step()
            sent = (one.cluster.ledger.bytes_sent - before) > 0
            assert sent.tolist() == [_exchanges(strategy, step)] * WORKERS, (strategy, step)
        for _ in range(STEPS):
            two.step()
        for a, b in zip(one.weights, two.weights, strict=True):
            assert bool(torch.isfinite(a).all()), strategy
            assert torch.equal(a, b), strategy
        assert torch.equal(one.cluster.ledger.bytes_sent, two.cluster.ledger.bytes_sent), strategy
    if sync == "acco" and not Strategy.parse(topology).topology.uniform:
        assert accepted == 0
        return
    assert accepted >= len(COMPRESSION) // 24  # gossip(random) carries compressed gradients only; nothing is refused wholesale


@pytest.mark.parametrize("sync", ["bulk", "acco"])
@pytest.mark.parametrize("topology", TOPOLOGY)
def test_everybody_holds_the_same_where_everybody_hears_the_same(topology: str, sync: str) -> None:
    for compression, exchange in itertools.product(COMPRESSION, ("gradients", "updates")):
        strategy = _parse(sync, topology, compression, f"exchange={exchange}")
        if strategy is None or not strategy.topology.uniform:
            continue
        run = Descent(strategy)
        for _ in range(STEPS):
            run.step()
        assert all(torch.equal(w, w[:1].expand_as(w)) for w in run.weights), strategy


@pytest.mark.parametrize("sync", ["bulk", "local(2)", "local(3, mean=after)"])
def test_mixing_alone_keeps_the_mean(sync: str) -> None:
    """Without gradients: any plain topology, and compressed gossip, whose public copies cancel."""
    for topology, compression in itertools.product(TOPOLOGY, COMPRESSION):
        strategy = _parse(sync, topology, compression, "exchange=weights")
        outer = getattr(strategy.topology, "outer", strategy.topology) if strategy else None
        if strategy is None or (compression != "none" and outer.uniform):
            continue  # a compressed mean of everybody keeps its error in memory instead
        run = Descent(strategy)
        for w, noise in zip(run.weights, _randn(2), strict=True):
            w += noise
        means = [w.mean(0) for w in run.weights]
        for _ in range(8):
            run.step(lr=0.0)
        for w, mean in zip(run.weights, means, strict=True):
            torch.testing.assert_close(w.mean(0), mean, rtol=0, atol=1e-5, msg=lambda m, s=strategy: f"{s}: {m}")


BEST = sum(float(((t.mean(0) - t) ** 2).sum()) for t in TARGETS)


# An outer momentum of 0.9 amplifies what feedback delays: with few local steps it needs a calmer one.
CALM = [s if "diloco" not in s else "diloco(2, lr=0.5, momentum=0.2)" for s in SYNC]


@pytest.mark.parametrize("sync", CALM)
def test_the_loss_goes_down_to_where_it_can(sync: str) -> None:
    """Most of the way to the optimum, for a third of all pairs of topology and compressor, another one under each schedule."""
    pairs = list(itertools.product(TOPOLOGY, COMPRESSION))[CALM.index(sync) % 3 :: 3]
    for k, (topology, compression) in enumerate(pairs):
        strategy = _parse(sync, topology, compression, f"exchange={EXCHANGES[k % (3 if sync == 'bulk' else 2)]}")
        if strategy is None or "feedback=False" in compression or getattr(strategy.compression, "sign", False):
            continue  # without feedback the small values never arrive; DeMo's signs are steps of 1, whatever the gradient
        run = Descent(strategy)
        start = run.loss()
        for _ in range(60):
            run.step(lr=0.01 if "dgc" in compression else 0.05)  # dgc brings a momentum of 0.9
        assert run.loss() - BEST < 0.35 * (start - BEST), (str(strategy), start, run.loss(), BEST)
