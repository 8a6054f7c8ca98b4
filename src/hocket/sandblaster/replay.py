"""A recorded run of Sandblaster on processes, replayed: the same weights, losses and bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.drivers.record import read_whole
from hocket.drivers.replay import Event, ReplayNode, call_by_name
from hocket.drivers.simulation import Key
from hocket.programs.base import Compute, Effects
from hocket.sandblaster.coordinator import SandblasterCoordinator
from hocket.sandblaster.objective import Objective
from hocket.sandblaster.protocol import COORDINATOR
from hocket.sandblaster.roles import SandblasterShard, SandblasterWorker
from hocket.sandblaster.vectors import cuts

if TYPE_CHECKING:
    from hocket.sandblaster.api import Sandblaster


def replay_nodes(folder: Path, job: Sandblaster) -> dict[Key, ReplayNode]:
    """The coordinator, shards and workers of a run of ``job`` that was recorded in ``folder``, for ``replay``."""
    point = job.objective().point.cpu()
    centre = ("coordinator", 0)
    to_all: dict[int, Key] = {COORDINATOR: centre, **{i: ("shard", i) for i in range(job.shards)}}
    events = read_whole(folder / "coordinator-0.jsonl")
    config = job.config(**{name: events[0][name] for name in ("incarnation", "liveness_timeout_s")})
    nodes: dict[Key, ReplayNode] = {centre: ReplayNode(SandblasterCoordinator(config), events)}
    for i, part in enumerate(cuts(len(point), job.shards)):
        events = read_whole(folder / f"shard-{i}.jsonl")
        shard = SandblasterShard(i, point[part], job.exact, events[0]["address"], events[0]["incarnation"])
        nodes["shard", i] = ReplayNode(shard, events, to_all)
    for w in range(job.workers):
        worker, events = SandblasterWorker(len(point), job.shards), read_whole(folder / f"worker-{w}.jsonl")
        nodes["worker", w] = _computing(ReplayNode(worker, events, to_all), job.objective())
    return nodes


def _computing(node: ReplayNode, objective: Objective) -> ReplayNode:
    """The same node; what its worker computed is computed again."""
    tasks: list[Compute] = []

    def call(worker: Any, event: Event) -> Effects:
        if event.get("name") != "computed":
            return call_by_name(worker, event)
        task = tasks.pop()
        return worker.computed(task.portion, *objective.portion(task.point, task.portion), event["now"])

    return replace(node, call=call, on_effect=lambda effect: tasks.append(effect) if isinstance(effect, Compute) else None)
