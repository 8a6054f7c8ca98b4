"""Workers of an elastic run that meet with an accident, for tests/process/test_elastic.py."""

from __future__ import annotations

import copy
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import hocket
import hocket.drivers.elastic as drivers
from hocket.cluster import live_groups
from hocket.cluster.elastic_exchange import ElasticExchange
from hocket.cluster.exchange_thread import ExchangeThread
from hocket.cluster.join import RendezvousInfo
from hocket.cluster.live_groups import LiveGroups
from hocket.drivers.sockets import SocketDriver
from hocket.programs.elastic.rendezvous import Rendezvous
from hocket.train import handover
from hocket.train.runtimes import regroup
from hocket.transport import Listener
from process.cases import net, sgd
from process.late import held_up_by_its_data
from process.launch import eventually

SAMPLES, BATCH, EPOCHS = 120, 4, 3
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGUSR1")


@contextmanager
def rendezvous(workers: int, least: int = 1, hang_timeout_s: float = 600.0) -> Iterator[tuple[Rendezvous, dict[str, str]]]:
    """A rendezvous in a thread of this process, and what its workers find it by."""
    program, ended, job = (
        Rendezvous(least, 8, workers, liveness_timeout_s=2.0, hang_timeout_s=hang_timeout_s),
        Event(),
        secrets.token_bytes(16),
    )
    with Listener("tcp://127.0.0.1:0", job) as listener:
        driver = SocketDriver(program, listener=listener)

        def serve() -> None:
            driver.begin(program.start)
            while not ended.is_set():
                driver.poll(0.05)

        thread = Thread(target=serve)
        thread.start()
        try:
            yield program, {**RendezvousInfo(listener.address, job).environ, "GLOO_SOCKET_IFNAME": "lo"}
        finally:
            ended.set()
            thread.join()


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x[:, :4].argmax(1), torch.arange(SAMPLES))


def break_next(mark: Path) -> None:
    """The connections of this process break when others have all that they need for the next exchange, and it has no result."""
    wait = ElasticExchange.wait

    def broken(exchange: ElasticExchange) -> list[Any]:
        ElasticExchange.wait = wait  # type: ignore[method-assign]
        mark.touch()
        exchange.settle([])
        time.sleep(0.2)  # others go on
        raise RuntimeError("The connection is broken.")

    ElasticExchange.wait = broken  # type: ignore[method-assign]


def slow_down(module: Any, name: str, seconds: float) -> None:
    """Calls of a function take that much longer."""
    before = getattr(module, name)

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return before(*arguments)

    setattr(module, name, slow)


def train(
    rank: int,
    folder: str,
    strategy: str,
    fault: str = "",
    victim: int = 1,
    at: int = 8,
    elastic: bool = True,
    epochs: int = EPOCHS,
    saved: list[str] | None = None,
    until: str = "",
    keys: str | None = None,
    build_s: float = 0.0,
    hosts: str = "",
    device: str = "cpu",
) -> None:
    """Three epochs; the victim ends or stops after a step, and all leave what they have computed and what became of them.

    With the fault "save" all end after a step, with "leave" all are told to, with "die" the victim dies when it has saved; with
    what ``saved`` names another run goes on.
    With "hang" the victim is held up until there is a file ``go``, with "slow" it takes longer than ``build_s``. Steps are slow
    ``until`` that file exists. ``hosts`` are names of machines, by rank."""
    if build_s:
        regroup.BUILD_S = build_s
        slow_down(handover, "pack_state", 2 * build_s)
    if hosts:
        drivers.host_name = lambda: hosts[rank]
    computed: list[list[int]] = []

    def save(job: hocket.Job) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "job": job.state_dict()}
        torch.save({**state, "step": job.step}, f"{folder}/{job.cluster.rank}.saved")
        if fault == "die" and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + 2.0  # the victim may have left before the others
        while fault == "die" and not job.runtime.member.inside and time.monotonic() < deadline:
            time.sleep(0.01)

    hocket.init(device=device, seed=1, keys=keys)
    torch.manual_seed(0)
    model = net().to(device)
    optimizer = sgd(model, lr=0.05)
    buckets = hocket.Buckets(64, 64) if "fragments" in strategy else hocket.Buckets()
    limits = hocket.Elastic(1, 8, on_leave=save) if elastic else None
    job = hocket.parallelize(model, optimizer, strategy, buckets=buckets, elastic=limits)
    if saved is not None:
        job.load_workers([torch.load(path) for path in saved])
    first = job.step
    for _ in hocket.epochs(epochs):
        computed.append([])
        for x, y, number in hocket.distribute(DataLoader(data(), batch_size=BATCH, shuffle=True)):
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            try:
                optimizer.step()
            finally:  # also where it leaves at the end of the step
                computed[-1] += number.tolist()
                Path(folder, f"{rank}.computed").write_text(json.dumps(computed))
            Path(folder, f"{rank}.steps").write_text(str(job.step))
            if until and not Path(until).exists():
                time.sleep(0.05)
            if fault == "break" and rank == victim and job.step == at:
                break_next(Path(folder, "broken"))
            elif fault == "save" and job.step == at:
                save(job)
                job.finish()
                return
            elif fault == "hang" and rank == victim and job.step == at:
                held_up_by_its_data(Path(folder, "go"))
            elif fault == "slow" and rank == victim and job.step == at:
                time.sleep(2 * build_s)
            elif fault in ("leave", "die") and job.step == at:
                os.kill(os.getpid(), signal.SIGTERM)
                while job.runtime.member.latest.number == job.cluster.generation:  # the end of the next step is that of this run
                    time.sleep(0.01)
            elif fault in SIGNALS and rank == victim and job.step == at:
                os.kill(os.getpid(), getattr(signal, fault))
    steps = job.step
    job.finish()
    weights = [p.detach().cpu() for p in model.parameters()]
    found = {"weights": weights, "computed": computed, "first": first, "steps": steps, "host_size": job.cluster.host_size}
    torch.save({**found, **job.summary(), "generation": getattr(job.cluster, "generation", 0)}, f"{folder}/{rank}.pt")


def train_split(
    rank: int,
    folder: str,
    strategy: str,
    mesh: str,
    fault: str = "",
    victim: int = 1,
    at: int = 8,
    elastic: bool = True,
    epochs: int = EPOCHS,
    times: int = 1,
    until: str = "",
    device: str = "cpu",
    saved: list[str] | None = None,
) -> None:
    """The same with a model that is split; each process leaves its part, and its state as it ``begun``.

    Steps are slow ``until`` that file exists."""
    hocket.init(device=device, seed=1)
    torch.manual_seed(0)
    model = net().to(device)
    optimizer = sgd(model, lr=0.05)
    x = torch.zeros(BATCH, 64, device=device)
    pipeline = hocket.Pipeline(loss=F.cross_entropy, sample=x, cut=["1"] if "pipeline" in mesh else None)
    job = hocket.parallelize(model, optimizer, strategy, mesh=mesh, pipeline=pipeline, elastic="1:8" if elastic else None)
    if saved is not None:
        job.load_workers([torch.load(path)["state"] for path in saved])
    first, losses, begun = job.step, [], copy.deepcopy(job.state_dict())
    for _ in hocket.epochs(epochs):
        for x, y, _number in hocket.distribute(DataLoader(ConcatDataset([data()] * times), batch_size=BATCH, shuffle=True)):
            losses.append(float(job.train(x.to(device), y.to(device))))
            Path(folder, f"{rank}.steps").write_text(str(job.step))
            if fault and rank == victim and job.step == at:
                os.kill(os.getpid(), getattr(signal, fault))
            if until and not Path(until).exists():
                time.sleep(0.05)
    steps, state = job.step, job.full_state() if elastic else None
    own = {"model": job.model.state_dict(), "optimizer": optimizer.state_dict(), "job": job.state_dict()}
    found = {"state": copy.deepcopy(own), "begun": begun, "process": job.cluster.process}
    job.finish()
    weights = {name: p.detach().cpu() for name, p in job.model.named_parameters()}
    found |= {"weights": weights, "part": rank % 2, "whole": None if state is None else state["model"]}
    torch.save({**found, "first": first, "steps": steps, "losses": losses, **job.summary()}, f"{folder}/{rank}.pt")


def send_to_one_that_is_stopped(rank: int, folder: str) -> None:
    """Process 1 stops when it has received a part of a message; process 0 aborts the group, and ends process 1."""
    live_groups._LOOK_S = 0.02
    stopped, message, groups = Path(folder, "stopped"), torch.zeros(1 << 26, dtype=torch.uint8), LiveGroups()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    groups.begin(1)
    groups.add(dist.group.WORLD)
    if rank == 1:
        dist.irecv(message, 0)
        stopped.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    assert eventually(lambda: stopped.exists() and psutil.Process(int(stopped.read_text())).status() == psutil.STATUS_STOPPED)
    ended = ExchangeThread(groups.result).submit(lambda: handover._end(dist.isend(message, 1)), lambda error: error)
    time.sleep(0.2)
    groups.abort()
    try:
        ended()
    except RuntimeError:
        Path(folder, "failed").touch()
    os.kill(int(stopped.read_text()), signal.SIGKILL)
