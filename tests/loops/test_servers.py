"""Servers run the optimiser that the loop has: its options as schedulers change them, and its state; and unused parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hocket
from loops.harness import Loop, flat, refusal
from loops.test_steps import batch, net

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]
MAKE = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
}


def cycling(rank: int, strategy: str, kind: str, warm: int) -> Tensor:
    """Steps under OneCycleLR, which cycles momentum, with a weight decay that grows; ``warm`` steps alone come first."""
    model = net()
    optimizer = MAKE[kind](model.parameters())
    for step in range(warm):
        optimizer.zero_grad()
        model(batch(7, step)).square().mean().backward()
        optimizer.step()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    job = hocket.parallelize(model, optimizer, strategy)
    for step in range(8):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.param_groups[0]["weight_decay"] += 0.02
    return flat(job.finish())


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("kind", sorted(MAKE))
@pytest.mark.parametrize("strategy", ["bulk + server", "ssp(0) + server(shards=3)"])
def test_servers_follow_all_options_and_go_on_from_the_optimisers_state(loop: Loop, strategy: str, kind: str, warm: int) -> None:
    served = loop(cycling, strategy=strategy, kind=kind, warm=warm)
    reduced = loop(cycling, strategy="bulk + allreduce", kind=kind, warm=warm)
    for one, other in zip(served, reduced, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def alone(rank: int, strategy: str) -> dict[str, Tensor]:
    return {text: cycling(rank, text, "sgd", 2) for text in (strategy, "bulk")}


@pytest.mark.parametrize("strategy", ["async + server(lr=1.0, optimizer=sgd)", "async + server(shards=2)"])
def test_a_worker_that_waits_for_nobody_sends_its_options_too(loop: Loop, strategy: str) -> None:
    """Of one worker, which equals plain training; another optimiser than the worker's has neither its momentum nor its state."""
    (worker,) = loop(alone, 1, strategy=strategy)
    assert torch.allclose(worker[strategy], worker["bulk"], atol=1e-6) == ("optimizer" not in strategy)


def warm() -> torch.optim.Optimizer:
    """An optimiser that has made a step."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model(batch(0, 0)).square().mean().backward()
    optimizer.step()
    return optimizer


def refused(rank: int) -> dict[str, str]:
    found = {}
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    job = hocket.parallelize(model, optimizer, "bulk + server")
    model(batch(rank, 0)).square().mean().backward()
    optimizer.param_groups[0]["amsgrad"] = True
    found["option"] = refusal(optimizer.step)
    saved = warm().state_dict()
    found["loaded"] = refusal(optimizer.load_state_dict, saved)
    optimizer.load_state_dict({**saved, "state": {}})  # rates and other options alone are followed
    job.detach()
    optimizer.load_state_dict(saved)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model[2].weight.square().sum().backward()
    optimizer.step()
    found["state"] = refusal(hocket.parallelize, model, optimizer, "bulk + server")
    return found


def test_what_servers_cannot_take_over_is_refused(loop: Loop) -> None:
    for worker in loop(refused):
        assert worker["option"].startswith(
            "The optimiser's option amsgrad has changed to True, but servers can change only numbers"
        )
        assert worker["loaded"].startswith("optimizer.load_state_dict(…) after hocket.parallelize(…): the optimiser runs on")
        assert worker["state"].startswith("The optimiser has stepped some parameters more often than others")


# --- parameters without gradients ------------------------------------------------------------------------------------------------


class Unused(nn.Module):
    """A layer, and a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(12, 4), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def decaying(rank: int, strategy: str) -> Tensor:
    model = Unused()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.1)
    job = hocket.parallelize(model, optimizer, strategy)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return job.finish().unused.detach()


@pytest.mark.parametrize(
    "strategy", ["bulk", "bulk + server", "async + server", "downpour(2) + server", "stale(2) + server", "async + gossip"]
)
def test_virtual_workers_decay_unused_parameters_where_real_ones_do(loop: Loop, strategy: str) -> None:
    """Where servers run the optimiser an unused parameter counts as zeros, and decays; where workers do, it is left alone."""
    data = torch.randn(40, 12), torch.zeros(40, dtype=torch.long)
    run = hocket.simulate(
        Unused,
        nn.functional.cross_entropy,
        data,
        strategy=strategy,
        workers=2,
        batch_size=5,
        epochs=1,
        optimizer=lambda params: torch.optim.AdamW(params, 0.1, weight_decay=0.1),
    )
    served = "server" in strategy and "stale" not in strategy
    for unused in loop(decaying, strategy=strategy):
        assert torch.equal(unused, run.model.unused.detach())
        assert torch.equal(unused, torch.ones(3)) != served


def clipped(rank: int, strategy: str) -> dict[str, Tensor]:
    """A step of gradients that each worker clips, and one of gradients that are not."""
    found = {}
    for limit in (None, 0.01):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        job = hocket.parallelize(model, optimizer, strategy)
        (10**rank * model(batch(rank, 0)).square().mean()).backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        found[str(limit)] = flat(job.finish())
    return found


def test_servers_differ_from_allreduce_in_clipping_as_documented(loop: Loop) -> None:
    served, reduced = loop(clipped, strategy="bulk + server"), loop(clipped, strategy="bulk")
    start = flat(net())
    assert torch.allclose(served[0]["None"], reduced[0]["None"], atol=1e-6)
    assert float((reduced[0]["0.01"] - start).norm()) == pytest.approx(0.1 * 0.01, rel=1e-3)
    assert float((served[0]["0.01"] - start).norm()) < 0.1 * 0.01 * 0.999
