"""Trainings in which somebody is late, for tests/process/test_late.py."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.nn import functional as F

import hocket
from process.cases import batch, net, sgd
from process.launch import Group

STEP = 6
"""In this step worker 1 is held up."""


def said(group: Group, rank: int, *parts: str) -> bool:
    """Whether a worker has written a line with all of these."""
    path = group.folder / f"{rank}.err"
    lines = path.read_text().splitlines() if path.exists() else []
    return any(all(part in line for part in parts) for line in lines)


def held_up_by_its_data(path: Path) -> None:
    """Block until the test has seen what it waits for."""
    while not path.exists():
        time.sleep(0.02)


def pipeline(rank: int, folder: str) -> None:
    """The second stage of a pipeline is held up before step 6."""
    hocket.init(device="cpu", liveness_timeout_s=30.0)
    model = net()
    how = hocket.Pipeline(measure="flops", loss=F.cross_entropy, sample=batch(0, 0)[0])
    job = hocket.parallelize(model, sgd(model, lr=0.01), mesh="pipeline=2", pipeline=how)
    for t in range(8):
        if rank == 1 and t + 1 == STEP:
            held_up_by_its_data(Path(folder, "go"))
        job.train(*batch(t, 0))
    job.finish()


def train(rank: int, folder: str, strategy: str, steps: int, hold: str = "data", liveness_timeout_s: float = 30.0) -> None:
    """Worker 1 is held up in its own code in step 6, or comes to job.finish() then, while the others train on."""
    hocket.init(device="cpu", liveness_timeout_s=liveness_timeout_s)
    model = net()
    optimizer = sgd(model, lr=0.01)
    job = hocket.parallelize(model, optimizer, strategy)
    with open(f"{folder}/{rank}.steps", "wb", buffering=0) as progress:
        for t in range(STEP - 1 if hold == "finish" and rank == 1 else steps):
            if rank == 1 and t + 1 == STEP and hold == "data":
                held_up_by_its_data(Path(folder, "go"))
            optimizer.zero_grad()
            x, y = batch(t, rank)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if t < 100:
                progress.write(b".")
    late = job.summary()["late"]
    job.finish()
    torch.save({"late": late, "steps": job.summary()["step_times"]}, f"{folder}/{rank}.pt")
