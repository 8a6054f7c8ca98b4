"""Processes that read shards: a training that changes its number of workers, and a reader that keeps its position in a file."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from pathlib import Path
from typing import Any

import hocket
from hocket.cluster.join import join
from hocket.data import load
from hocket.files import write_whole
from hocket.train.elastic_loop import ElasticTraining
from hocket.train.run import make_training
from hocket.train.settings import RunSettings
from process.launch import eventually

CLONE_NEWNET = 0x40000000
"""Of Linux's sched.h."""


def train(rank: int, folder: str, url: str, strategy: str, workers: int, victim: int, at: int, epochs: int) -> None:
    """A worker of an elastic run over shards writes which samples each of its steps computed; the victim dies before its step
    ``at``, when the others have completed the one before."""
    deal, told = ElasticTraining._deal, Path(folder, f"{rank}.steps")

    def recorded(training: Any, round_: Any, stream: Any) -> Any:
        if rank == victim and training.step == at:
            others = [Path(folder, f"{other}.steps") for other in range(workers) if other != rank]
            assert eventually(lambda: all(len(path.read_text().splitlines()) >= at for path in others))
            os.kill(os.getpid(), signal.SIGKILL)
        epoch, own = training.epoch, round_.indices[stream.worker].tolist()
        loss = deal(training, round_, stream)
        with told.open("a") as out:
            out.write(json.dumps([epoch, own]) + "\n")
        return loss

    ElasticTraining._deal = recorded  # type: ignore[method-assign]
    told.touch()
    settings = RunSettings.of(
        data=f"shards:{url}", model="mlp", strategy=strategy, workers=workers, batch_size=8, epochs=epochs, lr=0.01
    )
    cluster = join(device="cpu")
    training = make_training(settings, cluster, load(settings.data.name))
    for _ in training.run():
        pass
    cluster.close()


def read(rank: int, folder: str, url: str, workers: int, worker: int, hold: int = -1, netns: str = "", **options: Any) -> None:
    """One epoch, one batch after the other; after each the position and all samples so far are in a file. ``hold``: wait there
    until the file ``go`` is there; ``netns``: the network it reads from."""
    if netns:
        with open(f"/run/netns/{netns}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
    kept = Path(folder, f"{worker}.json")
    data = hocket.data.stream(
        url, batch_size=10, workers=workers, worker=worker, decode=number, collate=list, threads=2, prefetch=2, **options
    )
    seen: list[int] = []
    if kept.exists():
        saved = json.loads(kept.read_text())
        data.load_state_dict(saved["state"])
        seen = saved["seen"]
    if data.epoch == 0:
        for batch in data:
            seen += batch
            state = {"state": data.state_dict(), "seen": seen, "fetched": data.bytes_fetched, "batches": len(seen) // 10}
            write_whole(kept, json.dumps(state).encode())
            if len(seen) // 10 == hold:
                assert eventually(Path(folder, "go").exists)


def number(sample: dict[str, bytes]) -> int:
    """The number that a sample is."""
    return int(sample["txt"])
