"""Workers and shards for tests/process/test_replay.py: real processes that record what happens to them and save how they ended."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.layout import layout_of
from hocket.drivers.gossip_runtime import GossipRuntime
from hocket.drivers.record import Recorder
from hocket.drivers.server_runtime import ServerRuntime
from hocket.drivers.shard_process import start_serving
from hocket.programs.gossip.links import PeerConfig
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.programs.server.requests import WorkerConfig
from hocket.programs.server.shard_server import ShardServer
from hocket.programs.server.worker import ServerWorker
from hocket.strategy import Strategy
from hocket.transport import Listener

JOB = bytes(range(16))
WORKERS, BATCHES = 2, 24
PEER_STEPS = 25
LAYOUT = layout_of(nn.Linear(9, 5).named_parameters())
ADAM = OptimizerSpec("adam", ({"lr": 0.05},))


def start_rows() -> list[Tensor]:
    return [torch.full((1, LAYOUT.parameters), 0.1)]


def config_of(text: str, worker: int) -> WorkerConfig:
    return WorkerConfig(Strategy.parse(text), LAYOUT, worker, WORKERS, 5, total=BATCHES, per_epoch=BATCHES)


def gradient(rows: list[Tensor], batch: int) -> list[Tensor]:
    """Of a made-up loss that depends on the mini-batch."""
    noise = torch.randn(rows[0].shape[1], generator=torch.Generator().manual_seed(batch))
    return [(rows[0][0] - noise).sin()]


def local_step(worker: ServerWorker, rows: list[Tensor], batch: int) -> None:
    if worker.steps_locally:
        rows[0] -= 0.1 * gradient(rows, batch)[0]


def shard_state(server: ShardServer) -> dict[str, Any]:
    """What the law compares of a shard: weights, optimiser, counts."""
    assert server.shard is not None
    return {"shard": server.shard.state_dict(), "counts": [server.progress, server.lost, server.pushed, dict(server.rejected)]}


def worker_state(worker: ServerWorker) -> dict[str, Any]:
    """What the law compares of a worker: weights, residuals, steps, bytes, seconds."""
    account = {name: value for name, value in vars(worker.account).items() if name not in ("begun", "paused")}
    return {"rows": [r.clone() for r in worker.rows], "step": worker.step, "code": worker._encoder.state_dict(), "account": account}


def shard(rank: int, folder: str, place: int, record: str) -> None:
    server = ShardServer(place)
    with Listener("tcp://127.0.0.1:0", JOB) as listener:
        driver = start_serving(server, listener, recorder=Recorder(record))
        Path(folder, "address").write_text(json.dumps(listener.address) + "\n")
        driver.serve()
        driver.close()
    torch.save(shard_state(server), f"{record}.pt")


def worker(rank: int, folder: str, text: str, number: int, addresses: list[str], record: str) -> None:
    torch.set_num_threads(1)
    runtime = ServerRuntime(addresses, JOB, config_of(text, number), record=Path(record))
    train(runtime)
    torch.save(worker_state(runtime.program), f"{record}.pt")


def train(runtime: Any) -> None:
    """A worker's loop, on real links and in the replay."""
    rows, program, number = start_rows(), runtime.program, runtime.worker
    runtime.join(rows, ADAM)
    while True:
        if program.sync.static_partition:
            own = program.step * WORKERS + number
            batch = runtime.record_batch(own if own < BATCHES else None)
        else:
            batch = runtime.next_batch()
        if batch is None:
            break
        time.sleep(0.002 * (1 + number))  # somebody is slower
        runtime.before_update(gradient(rows, batch))
        local_step(program, rows, batch)
        runtime.after_update([0.05], None)
    runtime.finish()
    runtime.leave()


# --- gossip --------------------------------------------------------------------------------------------------------------------


def peer_config(kind: str, worker: int, world: int) -> PeerConfig:
    return PeerConfig(worker, world, kind, seed=5)


def peer(rank: int, folder: str, kind: str, world: int, record: str) -> None:
    """Worker ``rank``; the workers find each other by files in ``folder``."""
    torch.set_num_threads(1)

    def find(address: str) -> list[str]:
        Path(folder, f"address-{rank}").write_text(address + "\n")
        files = [Path(folder, f"address-{w}") for w in range(world)]
        while not all(file.exists() and file.read_text().endswith("\n") for file in files):
            time.sleep(0.01)
        return [file.read_text().strip() for file in files]

    runtime = GossipRuntime(peer_config(kind, rank, world), JOB, 1 << 22, find, record=Path(f"{record}-{rank}"))
    train_peer(runtime)
    torch.save({"rows": runtime.program.rows, **runtime.program.state_dict()}, f"{record}-{rank}.pt")


def train_peer(runtime: Any) -> None:
    """A gossip worker's loop, on real links and in the replay."""
    rows, buffers, number = [row + runtime.worker for row in start_rows()], torch.zeros(2), runtime.worker
    momentum = torch.zeros_like(rows[0][0])
    runtime.join(rows, None, buffers)
    for step in range(PEER_STEPS):
        batch = runtime.record_batch(step * 10 + number)
        found = gradient(rows, batch)
        time.sleep(0.001 * (1 + number))  # somebody is slower
        runtime.before_update()
        momentum = 0.9 * momentum + found[0]
        rows[0] -= 0.1 * momentum
        runtime.after_update([0.1], buffers + step)
    runtime.finish()
    runtime.leave()
