"""The law for asynchronous runs: a recorded run of real processes replays to the same bits, without sockets and clocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.drivers.record import read_record
from hocket.drivers.replay import ReplayNode, call_by_name, replay
from hocket.programs.base import Effects
from hocket.programs.server.shard_server import ShardServer
from hocket.programs.server.worker import ServerWorker
from hocket.strategy import Strategy
from process.launch import Nursery, eventually
from process.replayed import ADAM, BATCHES, WORKERS, config_of, gradient, local_step, shard_state, start_rows, worker_state

pytestmark = pytest.mark.process
LIMIT_S = 60.0


class _Steps:
    """What a worker computed, again."""

    def __init__(self) -> None:
        self.rows, self.batch = start_rows(), 0

    def __call__(self, worker: ServerWorker, event: dict[str, Any]) -> Effects:
        name, now = event.get("name"), event.get("now", 0.0)
        if event["event"] == "batch":
            self.batch = event["id"]
            assert worker.sync.static_partition or worker.next_batch() == self.batch
        if event["event"] != "call":
            return []
        if name == "join":
            return worker.join(self.rows, ADAM, now)
        if name == "before_update":
            return worker.before_update(gradient(self.rows, self.batch), now)
        if name == "after_update":
            local_step(worker, self.rows, self.batch)
            return worker.after_update(event["arguments"][0], None, now)
        return call_by_name(worker, event)


def _start(server: ShardServer, event: dict[str, Any]) -> Effects:
    return server.start(event["now"])


@pytest.mark.parametrize(
    "text",
    [
        "async + server(2)",
        "async + server(2) + topk(0.2) | qsgd(4)",
        "async(overlap=True) + server + sign",
        "ssp(1) + server(2)",
        "ssp(2) + server + qsgd(4)",
        "downpour(2, 3) + server(2)",
        "downpour(2, 2) + server + topk(0.1)",
        "stale(2) + server(2)",
    ],
)
def test_a_recorded_run_of_real_processes_replays_to_the_same_bits(text: str, nursery: Nursery, tmp_path: Path) -> None:
    count = Strategy.parse(text).topology.num_shards(WORKERS)
    shards = [
        nursery.start("process.replayed:shard", 1, tmp_path / f"s{place}", place=place, record=str(tmp_path / f"shard-{place}"))
        for place in range(count)
    ]
    files = [group.folder / "address" for group in shards]
    assert eventually(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files), LIMIT_S)
    addresses = [json.loads(file.read_text()) for file in files]
    groups = [
        nursery.start(
            "process.replayed:worker",
            1,
            tmp_path / f"w{w}",
            text=text,
            number=w,
            addresses=addresses,
            record=f"{tmp_path}/worker-{w}",
        )
        for w in range(WORKERS)
    ]
    for group in (*groups, *shards):
        assert group.wait(LIMIT_S) == [0], group.said()

    servers, workers = [ShardServer(place) for place in range(count)], [ServerWorker(config_of(text, w)) for w in range(WORKERS)]
    routes = {place: ("shard", place) for place in range(count)}
    nodes: dict[Any, ReplayNode] = {
        ("shard", s): ReplayNode(server, read_record(tmp_path / f"shard-{s}"), call=_start) for s, server in enumerate(servers)
    }
    for w, worker in enumerate(workers):
        nodes["worker", w] = ReplayNode(worker, read_record(tmp_path / f"worker-{w}"), routes, _Steps())
    replay(nodes)
    for s, server in enumerate(servers):
        assert _same(torch.load(tmp_path / f"shard-{s}.pt", weights_only=False), shard_state(server))
        assert server.progress == BATCHES
    for w, worker in enumerate(workers):
        assert _same(torch.load(tmp_path / f"worker-{w}.pt", weights_only=False), worker_state(worker))
        assert worker.account.bytes_sent > 0


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
