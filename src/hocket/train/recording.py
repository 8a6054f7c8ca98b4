"""The workers and shards of a run that ``hocket train --record`` has recorded, for :mod:`hocket.drivers.replay`.

A worker's own text (:func:`hocket.train.async_worker.work`) runs again, with its program on the recorded events.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hocket.drivers.record import read_whole
from hocket.drivers.replay import DESCRIPTION, Event, ReplayLink, ReplayNode
from hocket.drivers.simulation import Key
from hocket.programs.base import Effects
from hocket.programs.gossip.links import PeerConfig
from hocket.programs.gossip.peer import GossipPeer
from hocket.programs.server.requests import WorkerConfig
from hocket.programs.server.shard_server import ShardServer
from hocket.programs.server.worker import ServerWorker
from hocket.train.async_worker import WorkerTask, work


def replay_nodes(folder: Path) -> dict[Key, ReplayNode]:
    """All processes of a recorded run."""
    described = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    workers, shards = described["settings"]["workers"], described["shards"]
    nodes: dict[Key, ReplayNode] = {}
    for place in range(shards):
        events = read_whole(folder / f"shard-{place}.jsonl")
        server = ShardServer(place, *(events[0][name] for name in ("liveness_timeout_s", "snapshot_s", "stays")))
        nodes["shard", place] = ReplayNode(server, events, call=_start)
    for worker in range(workers):
        events = read_whole(folder / f"worker-{worker}.jsonl")
        torch.set_num_threads(events[0]["threads"])
        kind, count = ("shard", shards) if shards else ("worker", workers)
        routes = {other: (kind, other) for other in range(count) if (kind, other) != ("worker", worker)}
        task = WorkerTask(
            described["settings"],
            worker,
            [],
            "",
            described["device"],
            described["data_dir"],
            liveness_timeout_s=events[0]["liveness_timeout_s"],
        )
        nodes["worker", worker] = ReplayNode(None, events, routes, work=_work(task, events[0]))
    return nodes


def _start(server: Any, event: Event) -> Effects:
    found: Effects = server.start(event["now"]) if event["event"] == "start" else []
    return found


def _work(task: WorkerTask, started: Event) -> Callable[[ReplayLink], None]:
    def again(link: ReplayLink) -> None:
        def connect(config: WorkerConfig | PeerConfig) -> ReplayLink:
            if isinstance(config, WorkerConfig):
                link.program = ServerWorker(config)
            else:
                link.program = GossipPeer(replace(config, address=started["address"], absent=tuple(started["absent"])))
            return link

        work(task, connect)

    return again
