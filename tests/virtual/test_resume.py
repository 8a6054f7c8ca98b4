"""Resuming equals never having stopped, bit for bit, whatever the strategy uses_error_feedback."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.nn import functional as F

import hocket
from hocket.cluster import VirtualCluster
from hocket.data.base import DataSet, identity
from hocket.errors import HocketError
from hocket.strategy import Strategy
from hocket.train.loop import TrainingPlan
from hocket.train.simulate import train_rows
from virtual.world import FEATURES, Tiny, World, sgd

TABLE = [
    "bulk", "bulk + topk(0.1)", "bulk + threshold(keep=0.2)", "bulk + lowrank(1)", "bulk + dgc(0.1, warmup=6)", "bulk + sign",
    "bulk + qsgd(4)", "bulk + randomk(0.2)", "bulk + dgc(0.1) | qsgd(4)", "bulk + threshold(keep=0.2) | ternary",
    "bulk + demo(8, 0.9)", "bulk + topk(0.1, feedback=ef21)", "diloco(3) + sign(feedback=ef21)",
    "bulk + sign + updates", "bulk + topk(0.1) | qsgd(4) + updates",
    "local(3, moments=1)", "local(3)", "local(3) + topk(0.1)", "local(2) + gossip", "local(2, mean=after) + sign",
    "local(3, residual=weights) + topk(0.1) | qsgd(4)",
    "local(2) + gossip + exchange=gradients",
    "gossip", "gossip + topk(0.1)", "gossip(exponential) + qsgd(2)", "gossip(random)", "gossip(ring) + lowrank(1)",
    "gossip + threshold(keep=0.2)", "gossip + topk(0.1) + exchange=gradients", "postlocal(2, 4)", "postlocal(2, 4) + topk(0.1)",
    "postlocal(3, 2) + gossip + topk(0.2)", "diloco(3)", "diloco(3) + topk(0.2)",
    "diloco(4, overlap=3, keep=eager) + sign", "diloco(4, fragments=2, overlap=2) + topk(0.2)", "diloco(3, guard=3)",
    "diloco(2) + gossip + sign", "acco", "acco + topk(0.2)", "acco + hierarchical(size=2) + qsgd(4)",
    "hierarchical(allreduce, gossip, size=2, every=2) + topk(0.2)", "hierarchical(gossip, gossip, size=2) + lowrank(1)",
]  # fmt: skip


def _saved(state: object) -> object:
    """Through a file, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("strategy", TABLE)
def test_a_run_that_was_stopped_is_the_run_that_was_not(strategy: str) -> None:
    optimizer = sgd(0.1) if "dgc" in strategy or "demo" in strategy else sgd(0.1, momentum=0.9)
    whole = World(strategy, optimizer=optimizer).step(12)
    first = World(strategy, optimizer=optimizer)
    for stop in (1, 2, 5):  # with and without a mean under way, twice over
        first.step(stop)
        second = World(strategy, optimizer=optimizer)
        second.replicas.load_state_dict(_saved(first.replicas.state_dict()))
        second.at = first.at
        first = second
    first.step(12 - first.at)
    assert torch.equal(first.rows, whole.rows)


@pytest.mark.parametrize("strategy", ["local(3) + topk(0.1)", "gossip + qsgd(4)", "bulk + dgc(0.1)"])
def test_saving_changes_nothing_and_is_a_copy(strategy: str) -> None:
    whole, watched = World(strategy).step(8), World(strategy)
    for _ in range(8):
        watched.step()
        state = watched.replicas.state_dict()
    assert torch.equal(watched.rows, whole.rows)
    before = copy.deepcopy(state)
    watched.step(2)
    assert all(torch.equal(a, b) for a, b in zip(state["weights"], before["weights"], strict=True))
    assert str(state["job"]) == str(before["job"])


@pytest.mark.parametrize(
    "other, word",
    [(("local(2)", 4, {}), "strategy"), (("gossip", 5, {}), "workers"), (("gossip", 4, {"caps": (16, 16)}), "layout")],
)
def test_a_checkpoint_of_something_else_is_refused(other: tuple, word: str) -> None:
    state = World("gossip").step(2).replicas.program.state_dict()
    text, workers, options = other
    with pytest.raises(HocketError, match=word):
        World(text, workers, **options).replicas.program.load_state_dict(state)


@pytest.mark.parametrize("strategy", ["bulk + topk(0.1)", "local(3)", "gossip + sign", "diloco(2)"])
def test_a_whole_training_resumes_after_an_epoch(strategy: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(70, FEATURES, generator=generator), torch.randint(0, 3, (70,), generator=generator)

    def training():
        data = DataSet("d", (x, y), (x, y), 3, identity)
        plan = TrainingPlan(epochs=3, batch_size=4, seed=1, lr_schedule="cosine", warmup_epochs=1)
        return train_rows(Tiny, F.cross_entropy, sgd(0.1, momentum=0.9), data, Strategy.parse(strategy), VirtualCluster(4), plan)

    whole, first, second = training(), training(), training()
    for _ in whole.run():
        pass
    next(first.run())
    second.load_state_dict(_saved(first.state_dict()))
    for _ in second.run():
        pass
    assert all(torch.equal(a, b) for a, b in zip(whole.replicas.weights, second.replicas.weights, strict=True))
    assert [m["loss"] for m in second.metrics] == [m["loss"] for m in whole.metrics]
    assert whole.metrics[-1]["accuracy"] == second.metrics[-1]["accuracy"]


def test_simulate_is_a_function_of_its_seed() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, FEATURES, generator=generator), torch.randint(0, 3, (64,), generator=generator)
    runs = [
        hocket.simulate(Tiny, F.cross_entropy, (x, y), workers=4, batch_size=4, strategy="gossip + topk(0.2)", seed=seed, epochs=2)
        for seed in (0, 0, 1)
    ]
    losses = [[m["loss"] for m in r.metrics] for r in runs]
    assert losses[0] == losses[1] != losses[2]
    assert runs[0].ledger.bytes_sent == runs[1].ledger.bytes_sent > 0
