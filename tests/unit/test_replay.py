"""A recorded real run replays to the same bits: the programs are given the same events again, without sockets and clocks."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from faults.gossip_world import GossipWorld
from hocket.cluster.layout import layout_of
from hocket.drivers.record import Recorder, read_record
from hocket.drivers.replay import ReplayNode, call_by_name, replay
from hocket.drivers.server_runtime import ServerRuntime
from hocket.drivers.shard_process import start_serving
from hocket.programs.base import Effects
from hocket.programs.gossip.peer import GossipPeer
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.programs.server.requests import WorkerConfig
from hocket.programs.server.shard_server import ShardServer
from hocket.programs.server.worker import ServerWorker
from hocket.strategy import Strategy
from hocket.transport import Envelope, Listener

JOB = bytes(range(16))
LAYOUT = layout_of(nn.Linear(9, 5).named_parameters())
SGD = OptimizerSpec("sgd", ({"lr": 0.1, "momentum": 0.9},))
WORKERS, BATCHES = 3, 30


def gradient(rows: Sequence[Tensor], batch: int) -> list[Tensor]:
    """Of a made-up loss that depends on the mini-batch."""
    noise = torch.randn(rows[0].shape[1], generator=torch.Generator().manual_seed(batch))
    return [(rows[0][0] - noise).sin()]


def steps_of(worker: ServerWorker, number: int | None) -> int | None:
    """The mini-batch of the next step, where every worker has its own part."""
    if not worker.sync.static_partition:
        return number
    return own if (own := worker.step * WORKERS + worker.config.worker) < BATCHES else None


def train(runtime: ServerRuntime, rows: list[Tensor]) -> None:
    runtime.join(rows, SGD)
    while True:
        static = runtime.program.sync.static_partition
        number = runtime.record_batch(steps_of(runtime.program, None)) if static else runtime.next_batch()
        if number is None:
            break
        runtime.before_update(gradient(rows, number))
        if runtime.steps_locally:
            rows[0] -= 0.1 * gradient(rows, number)[0]
        runtime.after_update([0.1], None)
    runtime.finish()
    runtime.leave()


class Real:
    """Workers and shards, each in a thread of its own, on links of this machine."""

    def __init__(self, text: str, folder: Path) -> None:
        strategy = Strategy.parse(text)
        self.servers = [ShardServer(place) for place in range(strategy.topology.num_shards(WORKERS))]
        listeners = [Listener("tcp://127.0.0.1:0", JOB) for _ in self.servers]
        drivers = [
            start_serving(server, listeners[place], recorder=Recorder(folder / f"shard-{place}"))
            for place, server in enumerate(self.servers)
        ]
        addresses = [listener.address for listener in listeners]
        self.configs = [WorkerConfig(strategy, LAYOUT, w, WORKERS, 5, total=BATCHES, per_epoch=BATCHES) for w in range(WORKERS)]
        runtimes = [ServerRuntime(addresses, JOB, c, record=folder / f"worker-{c.worker}") for c in self.configs]
        self.workers = [runtime.program for runtime in runtimes]
        self.rows = [[torch.full((1, 50), 0.1)] for _ in runtimes]
        threads = [threading.Thread(target=driver.serve) for driver in drivers]
        threads += [threading.Thread(target=train, args=(runtime, rows)) for runtime, rows in zip(runtimes, self.rows, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for driver in drivers:
            driver.close()


class Replay:
    """The same programs anew, on recordings in ``folder``."""

    def __init__(self, configs: Sequence[WorkerConfig], shards: int, folder: Path) -> None:
        self.servers = [ShardServer(place) for place in range(shards)]
        self.workers = [ServerWorker(config) for config in configs]
        self.rows = [[torch.full((1, 50), 0.1)] for _ in configs]
        routes = {place: ("shard", place) for place in range(shards)}
        nodes: dict[Any, ReplayNode] = {
            ("shard", s): ReplayNode(server, read_record(folder / f"shard-{s}"), call=start_shard)
            for s, server in enumerate(self.servers)
        }
        for w, worker in enumerate(self.workers):
            nodes["worker", w] = ReplayNode(worker, read_record(folder / f"worker-{w}"), routes, Steps(self.rows[w]))
        replay(nodes)


def start_shard(server: Any, event: dict[str, Any]) -> Effects:
    assert event["event"] == "start"
    return server.start(event["now"])


class Steps:
    """What a worker computed, again."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.rows, self.batch = rows, 0

    def __call__(self, worker: ServerWorker, event: dict[str, Any]) -> Effects:
        if event["event"] == "batch":
            self.batch = event["id"]
            assert worker.sync.static_partition or worker.next_batch() == self.batch
        if event["event"] != "call":
            return []
        name, now = event["name"], event["now"]
        if name == "join":
            return worker.join(self.rows, SGD, now)
        if name == "before_update":
            return worker.before_update(gradient(self.rows, self.batch), now)
        if name == "after_update":
            if worker.steps_locally:
                self.rows[0] -= 0.1 * gradient(self.rows, self.batch)[0]
            return worker.after_update(event["arguments"][0], None, now)
        return call_by_name(worker, event)


@pytest.mark.parametrize(
    "text",
    [
        "async + server(2)",
        "async(overlap=True) + server(2) + topk(0.2) | qsgd(4)",
        "async(adaptive) + server + sign",
        "ssp(1) + server(2)",
        "bulk + server(2)",
        "downpour(2, 3) + server(2, fetch=bf16)",
        "stale(2) + server(2)",
        "stale(3)",
    ],
)
def test_a_recorded_run_replays_to_the_same_bits(text: str, tmp_path: Path) -> None:
    real = Real(text, tmp_path)
    again = Replay(real.configs, len(real.servers), tmp_path)
    for one, other in zip(real.servers, again.servers, strict=True):
        assert one.shard is not None
        assert other.shard is not None
        assert _same(one.shard.state_dict(), other.shard.state_dict())
        assert (one.progress, one.lost, one.pushed) == (other.progress, other.lost, other.pushed)
    for one, other in zip(real.workers, again.workers, strict=True):
        assert torch.equal(one.rows[0], other.rows[0])
        assert (one.step, one.account.bytes_sent) == (other.step, other.account.bytes_sent)
        assert one.account.wait_s == other.account.wait_s
        assert _same(one._encoder.state_dict(), other._encoder.state_dict()), "what the code holds back"
    assert real.servers[0].progress == BATCHES


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


# --- gossip --------------------------------------------------------------------------------------------------------------------


class _Lossy:
    """Drops some messages and keeps the order of the others, as a link that is made anew does."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def arrivals(self, now: float, source: Any, target: Any, message: Envelope) -> list[float]:
        return [] if now < 20.0 and self.random.random() < 0.1 else [now + 0.01 * (1 + source[1])]


class _Recorded(GossipPeer):
    """A worker whose events are recorded."""

    recorder: Recorder

    def message(self, sender: Any, message: Envelope, now: float) -> Effects:
        self.recorder.message(sender, message, now)
        return super().message(sender, message, now)

    def timer(self, name: str, now: float) -> Effects:
        self.recorder.write("timer", name=name, now=now)
        return super().timer(name, now)

    def before_update(self, now: float) -> Effects:
        self.recorder.write("call", name="before_update", arguments=(), now=now)
        return super().before_update(now)

    def after_update(self, buffers: Tensor | None, now: float, exchange: bool = True) -> Effects:
        self.recorder.write("call", name="after_update", arguments=(), now=now)
        return super().after_update(buffers, now, exchange)

    def finish(self, now: float) -> Effects:
        self.recorder.write("call", name="finish", arguments=(), now=now)
        return super().finish(now)


@pytest.mark.parametrize("kind", ["rotating", "random", "pushsum"])
def test_a_recorded_run_of_gossip_workers_replays_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    size, steps = 4, 8
    world = GossipWorld(kind, size, steps, _Lossy(3), seed=1, dtype=torch.float32)
    for worker, peer in world.peers.items():
        peer.__class__ = _Recorded
        peer.recorder = Recorder(tmp_path / str(worker))  # type: ignore[attr-defined]
        peer.recorder.start(identity=world.simulation.nodes["worker", worker].identity.hex())  # type: ignore[attr-defined]
    world.go()
    nodes: dict[Any, ReplayNode] = {}
    again: list[GossipPeer] = []
    for worker, peer in world.peers.items():
        peer.recorder.close()  # type: ignore[attr-defined]
        new = GossipPeer(peer.config)
        rows = [row.clone() for row in world.start]
        updates = iter(world.workers[worker].updates)

        def call(program: Any, event: dict[str, Any], rows: list[Tensor] = rows, updates: Any = updates) -> Effects:
            if event["event"] == "start":
                return program.start(rows, 0.0)
            if event["name"] != "after_update":
                return call_by_name(program, event)
            for row in rows:
                row += next(updates)
            return program.after_update(None, event["now"])

        routes = {other: ("worker", other) for other in range(size) if other != worker}
        nodes["worker", worker] = ReplayNode(new, read_record(tmp_path / str(worker)), routes, call)
        again.append(new)
    replay(nodes)
    for worker, new in enumerate(again):
        old = world.peer(worker)
        assert _same(old.state.x, new.state.x)
        assert old.mean is not None
        assert new.mean is not None
        assert _same(old.mean.rows, new.mean.rows)
        assert (old.state.push_sum_weight, old.state.version) == (new.state.push_sum_weight, new.state.version)
        assert vars(old.account) == vars(new.account)
        assert torch.equal(world.workers[worker].rows[0], new.rows[0])
