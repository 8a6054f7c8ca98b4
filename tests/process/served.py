"""Shards and workers for tests/process/test_server.py: each a fork of the nursery, told what ``hocket train`` would tell it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.data import load
from hocket.drivers import shard_process
from hocket.drivers.server_runtime import Observer
from hocket.models import build, loss_for
from hocket.programs.server.push_encoder import Slices
from hocket.programs.server.wire import link_bytes
from hocket.train.async_worker import WorkerTask, read_worker_task, work
from hocket.train.checks import layout_for
from hocket.train.evaluate import Evaluator
from hocket.train.replicas import swapped_weights
from hocket.train.settings import RunSettings
from hocket.train.simulate import seeded
from process.cases import batch, flat, net, sgd
from process.launch import Group, Nursery, eventually

LIMIT_S = 60.0


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def other() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 25), nn.ReLU(), nn.Linear(25, 10))


# --- what forks run ----------------------------------------------------------------------------------------------------------


def shard(rank: int, folder: str, arguments: list[str]) -> None:
    shard_process.main(arguments)


def worker(rank: int, folder: str, post: dict[str, Any]) -> None:
    work(read_worker_task(post))


def on_hooks(rank: int, folder: str, strategies: list[str]) -> None:
    """Users' own loops, one strategy after another, under torchrun; shards are children of theirs."""
    cluster = hocket.init(device="cpu", exact=True)
    found: dict[str, Any] = {}
    for text in strategies:
        model = net()
        optimizer = sgd(model)
        with torch.no_grad():
            for p in model.parameters():
                p += rank  # worker 0's weights count
        job = hocket.parallelize(model, optimizer, text)
        for t in range(6):
            optimizer.zero_grad()
            x, y = batch(t, rank)
            F.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
        with job.averaged() as mean:
            during = flat(mean)
        summary = job.summary(all_workers=True) if text != "bulk" else {}
        job.finish()
        found[text] = {"weights": flat(model), "during": during, "summary": summary}
    assert cluster.size == 3
    torch.save(found, f"{folder}/{rank}.pt")


class Sometimes(nn.Module):
    """One layer of two is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return (self.first, self.second)[which](x)


def accumulating(rank: int, folder: str) -> None:
    """Several backward passes make a step, each worker uses another layer, and a scaler is refused."""
    hocket.init(device="cpu", exact=True)
    results = []
    for text in ("bulk", "bulk + server"):
        torch.manual_seed(0)
        model = Sometimes()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        try:
            hocket.parallelize(model, optimizer, "async + server", scaler=object())
        except hocket.HocketError as error:
            sentence = str(error)
        job = hocket.parallelize(model, optimizer, text, accumulate=2)
        for t in range(4):
            optimizer.zero_grad()
            for k in range(2):
                x = torch.full((3, 4), float(t + k + rank))
                (model(x, rank % 2).square().mean() / 2).backward()
            optimizer.step()
        job.finish()
        results.append(flat(model))
    torch.save({"weights": results, "sentence": sentence}, f"{folder}/{rank}.pt")


def unfinished(rank: int, folder: str) -> None:
    """A script that simply ends, one worker long before the other."""
    hocket.init(device="cpu")
    model = net()
    optimizer = sgd(model)
    hocket.parallelize(model, optimizer, "async + server")
    for t in range(3 + 20 * rank):
        optimizer.zero_grad()
        x, y = batch(t, rank)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.02)


def one_stops(rank: int, folder: str) -> None:
    """Worker 1 stops before the workers compare their models."""
    hocket.init(device="cpu", liveness_timeout_s=2.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    model = net()
    hocket.parallelize(model, sgd(model), "async + server")


def alone(rank: int, folder: str) -> None:
    """One worker: plain training; with an optimiser of the server's a shard is started all the same."""
    found: dict[str, Any] = {}
    for text in ("async + server", "ssp(2) + server(shards=2) + topk(0.01)", "bulk + server(optimizer=sgd)"):
        hocket.init(device="cpu")
        model, plain = net(), net()
        optimizers = sgd(model, momentum=0.0), sgd(plain, momentum=0.0)
        job = hocket.parallelize(model, optimizers[0], text)
        for t in range(5):
            for m, o in zip((model, plain), optimizers, strict=True):
                o.zero_grad()
                x, y = batch(t, 0)
                F.cross_entropy(m(x), y).backward()
                o.step()
        sent = job.summary(all_workers=True)["bytes_sent"]
        job.finish()
        found[text] = [flat(model), flat(plain), sent]
    torch.save(found, f"{folder}/{rank}.pt")


def by_address(rank: int, folder: str, servers: str, workers: int, strategy: str, steps: int) -> None:
    """No launcher: servers that run already, and a number for each worker."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    hocket.init(device="cpu", servers=servers, rank=rank, world_size=workers)
    model = net()
    optimizer = sgd(model, momentum=0.0)
    job = hocket.parallelize(model, optimizer, strategy)
    for t in range(steps):
        optimizer.zero_grad()
        x, y = batch(t, rank)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    job.finish()
    torch.save(flat(model), f"{folder}/{rank}.pt")


# --- a job -------------------------------------------------------------------------------------------------------------------


class Service:
    """A job of ``settings``: its shards, its workers, and a look at the global weights."""

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        settings: RunSettings,
        snapshot_s: float = 0.0,
        liveness_timeout_s: float = 10.0,
        keys: Any = None,
    ) -> None:
        self.nursery, self.folder, self.settings, self.keys = nursery, folder, settings, keys
        self.snapshot_s, self.liveness_timeout_s = snapshot_s, liveness_timeout_s
        self.job = secrets.token_bytes(16)
        self.strategy = settings.strategy
        self.data = load("digits")
        self.model = seeded(lambda: build(settings.model, self.data), settings.seed)
        optimizer = settings.optimizer_for(self.model)(list(self.model.parameters()))
        self.layout = layout_for(self.model, optimizer, self.strategy, None, None)
        self.slices = Slices.of(self.strategy, self.layout, settings.workers.count)
        self.groups: list[Group] = []
        self.shards = [self.start_shard(place) for place in range(self.slices.shards)]
        self.addresses = [self.address(group) for group in self.shards]
        self.workers = [self.start_worker(k) for k in range(settings.workers.count)]
        most = link_bytes(self.strategy, self.layout)
        self.observer = Observer(self.addresses, self.job, self.layout, self.slices, most, None)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody is left."""
        self.observer.close(0)
        for group in self.groups:
            for pid in group.pids:
                with contextlib.suppress(ProcessLookupError):
                    if group.poll()[0] is None:
                        os.kill(pid, signal.SIGKILL)
        for group in self.groups:
            assert eventually(lambda group=group: None not in group.poll())

    def start_shard(self, place: int, bind: str = "tcp://127.0.0.1:0") -> Group:
        arguments = [
            "--place",
            str(place),
            "--bind",
            bind,
            "--liveness-timeout",
            str(self.liveness_timeout_s),
            "--stay",
        ]
        arguments += ["--snapshots", str(self.folder / "snapshots"), "--snapshot", str(self.snapshot_s)]
        return self._start("process.served:shard", f"shard-{place}", environ={"HOCKET_JOB": self.job.hex()}, arguments=arguments)

    def start_worker(self, k: int, replaces: bool = False, **changes: Any) -> Group:
        settings = self.settings.by_name() | changes
        post = WorkerTask(
            settings, k, self.addresses, self.job.hex(), liveness_timeout_s=self.liveness_timeout_s, incarnation=int(replaces)
        )
        return self._start("process.served:worker", f"worker-{k}", post=post.describe())

    def _start(self, function: str, name: str, **arguments: Any) -> Group:
        group = self.nursery.start(function, 1, self.folder / f"{name}-{len(self.groups)}", **arguments)
        self.groups.append(group)
        return group

    def address(self, group: Group) -> str:
        path = group.folder / "0.out"
        assert eventually(lambda: path.exists() and path.read_text().endswith("\n"), LIMIT_S), group.said()
        return str(json.loads(path.read_text())["address"])

    def kill(self, group: Group) -> None:
        os.kill(group.pids[0], signal.SIGKILL)
        assert group.wait(LIMIT_S) == [-signal.SIGKILL]

    def restart(self, place: int) -> None:
        self.shards[place] = self.start_shard(place, self.addresses[place])
        self.address(self.shards[place])

    def status(self) -> dict[str, Any]:
        return self.observer.statuses(2.0).get(0) or {"progress": 0, "here": [], "lost": 0, "workers": {}}

    def reaches(self, progress: int, seconds: float = LIMIT_S) -> bool:
        """Whether so many mini-batches are done in time."""
        return eventually(lambda: self.status()["progress"] >= progress, seconds)

    def ends(self, *without: int) -> dict[str, Any]:
        """Wait until all workers have ended well; the last status."""
        for k, group in enumerate(self.workers):
            if k not in without:
                assert group.wait(LIMIT_S) == [0], group.said()
        return self.status()

    def weights(self) -> list[Tensor]:
        found = self.observer.global_weights(5.0)
        assert found is not None
        return found.rows

    def accuracy(self) -> float:
        with swapped_weights(self.model, self.layout, self.weights(), {}):
            accuracy = Evaluator(self.data, loss_for(self.data)).tally(self.model, self.data.test).accuracy
        assert accuracy is not None
        return accuracy

    def said(self) -> str:
        return "".join(group.said() for group in self.groups)
