"""What one worker calls alone, and parameters that cannot be exchanged as others are."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from loops.harness import Loop, Start, flat, refusal
from loops.test_steps import batch, net, sgd

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]


def lonely(rank: int, strategy: str, steps: int, finishes: bool = False) -> dict[str, Any]:
    """Rank 0 enters ``job.averaged()``, or ``finish()``, alone after two steps; the others make ``steps``, and end."""
    model = net()
    optimizer = sgd(model)
    job = hocket.parallelize(model, optimizer, strategy)
    found: dict[str, Any] = {}
    for step in range(2 if rank == 0 else steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    if rank == 0:
        found["seconds"] = job.summary()["seconds"]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found["refused"] = refusal(job.finish if finishes else job.averaged().__enter__)
        found["said"] = [str(w.message) for w in said]
    return found


@pytest.mark.parametrize("strategy", ["local(2)", "local(4) + gossip"])
def test_one_worker_alone_in_averaged_is_told_that_all_must_enter(start: Start, strategy: str) -> None:
    group = start(lonely, strategy=strategy, steps=2)
    assert group.wait(60) == [0, 0], group.said()
    told = group.results()[0]
    assert told["seconds"] > 0
    assert told["refused"].startswith(
        "Process 1 has ended without job.averaged(), in which process 0 waits: all workers must enter"
    )
    assert "died" not in group.said()


def test_one_worker_alone_in_finish_is_told_that_all_must_enter(start: Start) -> None:
    group = start(lonely, strategy="bulk", steps=2, finishes=True)
    assert group.wait(60) == [0, 0], group.said()
    assert group.results()[0]["refused"].startswith("Process 1 has ended without job.finish(), in which process 0 waits")


def elsewhere(rank: int) -> str:
    """Rank 0 ends the training, the other one looks at the mean model."""
    model = net()
    job = hocket.parallelize(model, sgd(model), "local(2)")
    return refusal(job.finish if rank == 0 else job.averaged().__enter__)


def test_workers_that_enter_something_else_are_refused(loop: Loop) -> None:
    first, second = loop(elsewhere)
    assert first.startswith("Process 1 is in job.averaged(), but process 0 in job.finish()")
    assert second.startswith("Process 0 is in job.finish(), but process 1 in job.averaged()")


def test_bulk_has_nothing_to_average_so_one_worker_may_enter_alone(start: Start) -> None:
    group = start(lonely, strategy="bulk", steps=2)
    assert group.wait(60) == [0, 0], group.said()
    assert group.results()[0]["refused"] == ""


def test_a_worker_that_does_not_come_is_named_before_the_timeout(start: Start) -> None:
    """The other one waits in an exchange of its next step meanwhile: both would wait for long, so rank 0 says why."""
    group = start(stepping_on)
    assert group.wait(60)[0] == 3, group.said()
    assert "Process 1 has not come to job.averaged() for 5 s: all workers must enter" in group.said()


def stepping_on(rank: int) -> None:
    warnings.simplefilter("error")  # so that the test does not wait for the timeout
    try:
        lonely_step(rank)
    except UserWarning as warning:
        import os
        import sys

        print(warning, file=sys.stderr, flush=True)
        os._exit(3)


def lonely_step(rank: int) -> None:
    model = net()
    optimizer = sgd(model)
    job = hocket.parallelize(model, optimizer, "local(1) + gossip")
    for step in range(4):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        if rank == 0 and step == 1:
            with job.averaged():
                pass


# --- parameters without values, and sparse ones ----------------------------------------------------------------------------------


class Odd(nn.Module):
    """A layer and, in a group of its own, a parameter without values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(12, 2), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.empty.sum()


def grouped(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    groups = [{"params": [p for p in params if p.numel()]}, {"params": [p for p in params if not p.numel()], "lr": 0.5}]
    return torch.optim.SGD(groups, 0.1)


CODES = ["bulk + topk(0.2)", "bulk + ternary", "bulk + randomk(0.5)", "bulk + gossip", "local(2) + sign", "bulk + server"]


def with_nothing(rank: int) -> dict[str, Tensor]:
    found = {}
    for strategy in CODES:
        model = Odd()
        optimizer = grouped(model.parameters())
        job = hocket.parallelize(model, optimizer, strategy)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        found[strategy] = flat(job.finish())
    return found


def test_a_parameter_without_values_is_no_bucket(loop: Loop) -> None:
    first, second = loop(with_nothing)
    for strategy in CODES:
        assert torch.equal(first[strategy], second[strategy])


@pytest.mark.parametrize("strategy", [*CODES, "async + server + topk(0.2)", "async + gossip"])
def test_a_parameter_without_values_is_simulated(strategy: str) -> None:
    data = torch.randn(24, 12), torch.arange(24) % 2
    run = hocket.simulate(Odd, nn.functional.cross_entropy, data, strategy=strategy, workers=3, batch_size=4, optimizer=grouped)
    assert run.model.empty.shape == (0, 3)


@pytest.mark.parametrize("engine", ["auto", "loop", "vmap"])
@pytest.mark.parametrize("strategy", ["bulk", "local(2) + gossip", "async + server"])
def test_sparse_gradients_are_refused_by_simulate(strategy: str, engine: str) -> None:
    make = lambda: nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))  # noqa: E731
    data = torch.randint(9, (24, 2)), torch.arange(24) % 2
    options = {"strategy": strategy, "workers": 3, "batch_size": 4, "engine": engine}
    sentence = refusal(hocket.simulate, make, nn.functional.cross_entropy, data, **options)
    assert sentence == "A gradient is sparse; exchanges are dense, so build the embedding with sparse=False."


def in_turn(rank: int) -> float:
    """A gossip job, then a collective one; worker 1 comes late to the mean."""
    found = 0.0
    for strategy in ("async + gossip", "local(2)"):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        job = hocket.parallelize(model, optimizer, strategy)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3) * (rank + 1)).square().mean().backward()
            optimizer.step()
        if strategy == "local(2)":
            time.sleep(0.3 * rank)
            with job.averaged() as mean:
                found = float(mean.weight.detach().sum())
        job.finish()
    return found


def test_a_job_after_one_of_gossip_has_a_mean(loop: Loop) -> None:
    first, second = loop(in_turn)
    assert first == second
