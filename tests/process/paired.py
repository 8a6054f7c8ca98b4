"""Workers without servers for tests/process/test_pairs.py: each function runs in every process of a group."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.data import load
from hocket.train.job import Job
from process.cases import batch, flat, net, sgd

LIVENESS_TIMEOUT_S = 2.0
"""Where somebody dies or stops; elsewhere nobody is to be missed, however busy the machine is."""
LONG_S = 60.0


def _job(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: str) -> Job:
    job = hocket.parallelize(model, optimizer, strategy)
    assert isinstance(job, Job)
    return job


def _end(job: Job) -> dict[str, Any]:
    own = flat(job.model)
    model = job.finish()
    assert job.runtime.link.mean is not None
    return {
        "own": own,
        "steps": job.step,
        "end": flat(model),
        "here": job.runtime.link.mean.here,
        "weight": job.runtime.link.mean.push_sum_weight,
        "ledger": job.summary(all_workers=True),
        "refused": job.runtime.link.refused,
    }


def _model_and_held(job: Job) -> list[bool]:
    """Whether the model is x / ω; nothing where others changed x since the model was shown, or where ω is 1."""
    program = job.runtime.link.program
    with job.runtime.link.driver.lock:
        state = program.state
        if state.push_sum_weight == 1.0 or state.changes != program._changes:
            return []
        return [all(torch.equal(w.flatten(), x / state.push_sum_weight) for w, x in zip(job.weights, state.x, strict=True))]


def mixing(rank: int, folder: str, strategies: list[str], steps: int) -> None:
    """Without updates there is nothing but mixing of weights that differ; all step on until everybody has made ``steps``."""
    cluster = hocket.init(device="cpu", liveness_timeout_s=LONG_S)
    results = {}
    for k, text in enumerate(strategies):
        model = net()
        job, begun = _differing(model, rank, text)

        def enough(k: int = k) -> bool:
            counts = [Path(folder, f"{r}.{k}.steps") for r in range(cluster.size)]
            return all(path.exists() and int(path.read_text() or 0) >= steps for path in counts)

        _until(enough, Path(folder, f"{rank}.{k}.steps"), job, rank)
        with job.averaged() as mean:
            during = flat(mean)
        results[text] = {**_end(job), "begun": begun, "during": during}
    torch.save(results, f"{folder}/{rank}.pt")


def learning(rank: int, folder: str, strategies: list[str], epochs: int) -> None:
    """A loop of one's own over a share of the digits."""
    hocket.init(device="cpu", liveness_timeout_s=LONG_S)
    data = load("digits")
    loader = DataLoader(TensorDataset(data.prepare(data.train[0]), data.train[1]), batch_size=32)
    results = {}
    for text in strategies:
        model = net()
        optimizer = sgd(model, momentum=0.0)
        job = _job(model, optimizer, text)
        seen: list[bool] = []
        for epoch in range(epochs):
            for x, y in hocket.distribute(loader, epoch, even=True):  # one worker alone could take nearly all of so little
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                seen += _model_and_held(job)
        found = {**_end(job), "seen": seen}
        with torch.no_grad():
            right = (model(data.prepare(data.test[0])).argmax(-1) == data.test[1]).float().mean()
        results[text] = {**found, "accuracy": float(right)}
    torch.save(results, f"{folder}/{rank}.pt")


def between_hosts(keys: str) -> None:
    """The same loop on hosts of their own; what became of it is one line of JSON."""
    cluster = hocket.init(device="cpu", liveness_timeout_s=LONG_S, keys=keys or None)
    data = load("digits")
    loader = DataLoader(TensorDataset(data.prepare(data.train[0]), data.train[1]), batch_size=32)
    model = net()
    optimizer = sgd(model, momentum=0.0)
    job = _job(model, optimizer, "async + gossip")
    losses = []
    for epoch in range(4):
        total = []
        for x, y in hocket.distribute(loader, epoch, even=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total.append(float(loss.detach()))
        losses.append(sum(total) / len(total))
    doors = list(job.runtime.link.addresses)
    found = _end(job)
    digest = hashlib.sha256(found["end"].numpy().tobytes()).hexdigest()
    told = {name: found[name] for name in ("steps", "here", "ledger", "refused")}
    print(json.dumps({"worker": cluster.workers.start, "losses": losses, "doors": doors, "end": digest, **told}))


def enduring(rank: int, folder: str, strategy: str) -> None:
    """Mix weights that differ until the file ``enough`` appears; where it says ``all``, until nobody is silent."""
    hocket.init(device="cpu", liveness_timeout_s=LIVENESS_TIMEOUT_S)
    job, begun = _differing(net(), rank, strategy)
    told = Path(folder, "enough")

    def enough() -> bool:
        silent = any(peer.silent for peer in job.runtime.link.program.peers.values())
        return told.exists() and not (silent and told.read_text() == "all")

    _until(enough, Path(folder, f"{rank}.steps"), job, rank)
    torch.save({**_end(job), "begun": begun}, f"{folder}/{rank}.pt")


def leaving(rank: int, folder: str) -> None:
    """Scripts that simply end: worker 1 after a few steps, worker 0 when it has heard so, long before its patience ends."""
    hocket.init(device="cpu", liveness_timeout_s=600.0)
    job, _ = _differing(net(), rank, "async + gossip")
    while job.step < 5 if rank else not job.runtime.link.program.peers[1].left:
        _step(job, job.step, rank)


def served(rank: int, folder: str) -> None:
    """There are no servers to name."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    hocket.init(device="cpu", servers="tcp://127.0.0.1:1", rank=0, world_size=2)
    model = net()
    try:
        hocket.parallelize(model, sgd(model), "async + gossip")
    except hocket.HocketError as error:
        Path(folder, "sentence").write_text(str(error))


def _differing(model: nn.Module, rank: int, strategy: str) -> tuple[Job, torch.Tensor]:
    job = _job(model, sgd(model, lr=0.0), strategy)
    with torch.no_grad():
        for p in model.parameters():
            p += rank  # as from a user who changes weights between steps
    return job, flat(model)


def _until(enough: Callable[[], bool], told: Path, job: Job, rank: int) -> None:
    while not enough():
        _step(job, job.step, rank)
        time.sleep(0.003)  # a step that takes longer and costs no more
        told.write_text(str(job.step))
        told.with_suffix(".changes").write_text(str(job.runtime.link.program.state.changes))


def _step(job: Job, t: int, rank: int) -> None:
    job.optimizer.zero_grad()
    x, y = batch(t, rank)
    F.cross_entropy(job.model(x), y).backward()
    job.optimizer.step()
