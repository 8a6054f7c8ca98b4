"""Trainings that meet with an accident, for tests/process/test_faults.py."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hocket
from process.cases import batch, net, sgd

FOREVER = 10**9


def endless(rank: int, folder: str, strategy: str, liveness_timeout_s: float = 3.0) -> None:
    """Train until somebody ends it; the number of steps done is in a file of one byte each."""
    hocket.init(device="cpu", liveness_timeout_s=liveness_timeout_s)
    _train(rank, folder, strategy, FOREVER)


def accident(rank: int, folder: str, strategy: str, what: str) -> None:
    """Worker 1 ends at its fifth step in one way or another."""
    hocket.init(device="cpu", liveness_timeout_s=10.0)
    _train(rank, folder, strategy, 5 if rank == 1 else FOREVER)
    if what == "exception":
        raise ValueError("an accident")
    if what == "exit code":
        sys.exit(7)


def saver(rank: int, folder: str) -> None:
    """Everybody survives the loss of worker 1 long enough to save what there is."""
    hocket.init(device="cpu", liveness_timeout_s=3.0)
    try:
        _train(rank, folder, "bulk", FOREVER)
    except hocket.WorkerLost as lost:
        end = time.monotonic() + 5.0  # longer than the grace of those who are stuck
        while time.monotonic() < end:
            time.sleep(0.1)
        Path(folder, f"{rank}.saved").write_text(str(lost.worker))
        raise


def slow_end(rank: int, folder: str) -> None:
    """Process 0, which keeps the store, is done long before process 1."""
    hocket.init(device="cpu", liveness_timeout_s=3.0)
    _train(rank, folder, "local(4)", 6)
    end = time.monotonic() + 5.0
    while rank == 1 and time.monotonic() < end:
        time.sleep(0.1)


def poisoned(rank: int, folder: str, strategy: str) -> None:
    """Worker 1's gradient turns into NaN at step 3."""
    hocket.init(device="cpu", liveness_timeout_s=3.0)
    model = net()
    optimizer = sgd(model)
    job = hocket.parallelize(model, optimizer, strategy)
    model[1].weight.register_hook(lambda g: g * float("nan") if job.step == 2 and rank == 1 else g)
    for t in range(20):
        optimizer.zero_grad()
        x, y = batch(t, rank)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def different(rank: int, folder: str) -> None:
    hocket.init(device="cpu")
    model = nn.Linear(3, 2 + (rank == 1))
    hocket.parallelize(model, sgd(model))


def too_early(rank: int, folder: str, what: str) -> None:
    model = nn.Linear(3, 2)
    if what == "distribute":
        list(hocket.distribute([1, 2, 3]))
    hocket.parallelize(model, sgd(model))


def joins(rank: int, folder: str, timeout_s: float) -> None:
    hocket.init(device="cpu", timeout_s=timeout_s)


def alone(rank: int, folder: str) -> None:
    """A world of one: everything works, nothing is sent."""
    hocket.init(device="cpu")
    found: dict[str, Any] = {}
    for strategy in ("bulk + topk(0.01)", "local(4) + gossip + qsgd(4)", "bulk + lowrank(1)"):
        model, plain = net(), net()
        optimizers = sgd(model), sgd(plain)
        job = hocket.parallelize(model, optimizers[0], strategy, accumulate=1)
        for t in range(5):
            for m, o in zip((model, plain), optimizers, strict=True):
                o.zero_grad()
                x, y = batch(t, 0)
                F.cross_entropy(m(x), y).backward()
                o.step()
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        found[strategy] = [same, job.summary(all_workers=True)["bytes_sent"]]
        job.finish()
    torch.save(found, f"{folder}/{rank}.pt")


def _train(rank: int, folder: str, strategy: str, steps: int) -> None:
    model = net()
    optimizer = sgd(model, lr=0.01)
    hocket.parallelize(model, optimizer, strategy)
    with open(f"{folder}/{rank}.steps", "wb", buffering=0) as progress:
        for t in range(steps):
            optimizer.zero_grad()
            x, y = batch(t, rank)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if t < 100:
                progress.write(b".")
