"""Workers of an elastic run that meet with an accident, for tests/process/test_elastic.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.drivers.sockets import SocketDriver
from hocket.programs.elastic.rendezvous import Rendezvous
from hocket.transport import Listener
from process.cases import net, sgd

SAMPLES, BATCH, EPOCHS = 120, 4, 3


@contextmanager
def rendezvous(workers: int, least: int = 1) -> Iterator[tuple[Rendezvous, dict[str, str]]]:
    """A rendezvous in a thread of this process, and what its workers find it by."""
    program, ended = Rendezvous(least, 8, workers, liveness_timeout_s=2.0), Event()
    with Listener("tcp://127.0.0.1:0", bytes(16)) as listener:
        driver = SocketDriver(program, listener=listener)

        def serve() -> None:
            driver.begin(program.start)
            while not ended.is_set():
                driver.poll(0.05)

        thread = Thread(target=serve)
        thread.start()
        try:
            yield program, {"HOCKET_RENDEZVOUS": listener.address, "GLOO_SOCKET_IFNAME": "lo"}
        finally:
            ended.set()
            thread.join()


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x[:, :4].argmax(1), torch.arange(SAMPLES))


def train(
    rank: int, folder: str, strategy: str, fault: str = "", victim: int = 1, at: int = 8, elastic: bool = True, epochs: int = EPOCHS
) -> None:
    """Three epochs; the victim ends or stops after a step, and all leave what they have computed and what became of them."""
    hocket.init(device="cpu", seed=1)
    torch.manual_seed(0)
    model = net()
    optimizer = sgd(model, lr=0.05)
    job = hocket.parallelize(model, optimizer, strategy, elastic="1:8" if elastic else None)
    computed: list[list[int]] = []
    first = job.step
    for _ in hocket.epochs(epochs):
        computed.append([])
        for x, y, number in hocket.distribute(DataLoader(data(), batch_size=BATCH, shuffle=True)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            computed[-1] += number.tolist()
            Path(folder, f"{rank}.steps").write_text(str(job.step))
            if fault and rank == victim and job.step == at:
                os.kill(os.getpid(), getattr(signal, fault))
    steps = job.step
    job.finish()
    weights = [p.detach().clone() for p in model.parameters()]
    torch.save({"weights": weights, "computed": computed, "first": first, "steps": steps, **job.summary()}, f"{folder}/{rank}.pt")
