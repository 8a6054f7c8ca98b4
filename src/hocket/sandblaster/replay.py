"""A recorded run of Sandblaster on processes, replayed: the same weights, losses and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.drivers.record import read_whole
from hocket.drivers.replay import Event, ReplayNode, call_by_name
from hocket.drivers.simulation import Key
from hocket.programs.base import Compute, Effect, Effects
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
        computing = _Computing(job.objective())
        events = read_whole(folder / f"worker-{w}.jsonl")
        nodes["worker", w] = ReplayNode(
            SandblasterWorker(len(point), job.shards), events, to_all, computing, on_effect=computing.on_effect
        )
    return nodes


class _Computing:
    """What a worker computed, again."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._task: Compute | None = None

    def on_effect(self, effect: Effect) -> None:
        if isinstance(effect, Compute):
            self._task = effect

    def __call__(self, worker: Any, event: Event) -> Effects:
        if event.get("name") != "computed":
            return call_by_name(worker, event)
        assert self._task is not None
        return worker.computed(self._task.portion, *self._objective.portion(self._task.point, self._task.portion), event["now"])
