"""Published training loops on virtual workers: bulk equals a plain loop, every other strategy trains, or all refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.data import Partition
from hocket.train.lr_schedule import factor
from loops.harness import flat
from loops.simulated import SIMULATED, WORKERS, Simulated
from loops.strategies import STRATEGIES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
EPOCHS = 2


def simulated(loop: Simulated, strategy: str) -> hocket.Run:
    return hocket.simulate(
        loop.model,
        loop.loss,
        loop.data(),
        strategy=strategy,
        workers=WORKERS,
        optimizer=loop.optimizer,
        batch_size=loop.batch_size,
        epochs=EPOCHS,
        seed=3,
        **loop.options,
    )


def part(inputs: Any, indices: Tensor) -> Any:
    return {name: x[indices] for name, x in inputs.items()} if isinstance(inputs, dict) else inputs[indices]


def plain(loop: Simulated) -> nn.Module:
    """One model that sees the mini-batches of all workers in every step."""
    torch.manual_seed(3)
    model = loop.model()
    optimizer = loop.optimizer(list(model.parameters()))
    (inputs, targets), options = loop.data(), loop.options
    partition = Partition(len(targets), WORKERS, loop.batch_size, seed=3)
    rounds = [r for epoch in range(EPOCHS) for r in partition.rounds(epoch)]
    rate, at = optimizer.param_groups[0]["lr"], factor(options.get("lr_schedule", "constant"), len(rounds))
    for step, round_ in enumerate(rounds):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = rate * at(step)
        for indices, weight in zip(round_.indices, round_.weights, strict=True):
            x = part(inputs, indices)
            with torch.autocast("cpu", options.get("autocast"), enabled="autocast" in options):
                found = model(**x) if isinstance(x, dict) else model(x)
                loss = loop.loss(found, targets[indices])
            (loss * weight / WORKERS).backward()
        if "clip" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["clip"])
        optimizer.step()
    return model


@pytest.mark.parametrize("name", [name for name, loop in SIMULATED.items() if loop.equal and not loop.refused])
def test_bulk_on_virtual_workers_equals_a_plain_loop(name: str) -> None:
    loop = SIMULATED[name]
    ours, theirs = flat(simulated(loop, "bulk").model), flat(plain(loop))
    assert float((ours - theirs).abs().max()) < 1e-5


@pytest.mark.parametrize("name", SIMULATED)
def test_a_published_loop_on_virtual_workers(name: str) -> None:
    loop = SIMULATED[name]
    for strategy in STRATEGIES:
        if loop.refused:
            with pytest.raises(hocket.HocketError, match=loop.refused):
                simulated(loop, strategy)
            continue
        run = simulated(loop, strategy)
        first, last = (epoch["loss"] for epoch in (run.metrics[0], run.metrics[-1]))
        assert last < first, f"{strategy}: {first} -> {last}"
        assert bool(torch.isfinite(flat(run.model)).all()), strategy
