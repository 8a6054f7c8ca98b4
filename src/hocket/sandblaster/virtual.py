"""Sandblaster on virtual workers: the same programs as on processes, real gradients, a virtual clock.

A worker computes a portion in the time that the cluster's spec gives its operations, times the worker's slowdown and the step's
disturbance (where the spec states a step's seconds, a step is a worker's equal share of the batch). A shard takes two operations
per value for each order that is answered. The coordinator, each shard and each worker have one link (``hocket.drivers.links``), so
many workers that fetch from one shard wait for each other. Everything is determined by the spec and the seed.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.spec import ClusterSpec
from hocket.drivers.links import LinkModel
from hocket.drivers.simulation import Call, Key, Simulation
from hocket.errors import HocketError, WorkerLost
from hocket.programs.base import Compute, Effect, Finished, Snapshot
from hocket.sandblaster.coordinator import CoordinatorConfig, SandblasterCoordinator
from hocket.sandblaster.objective import Objective
from hocket.sandblaster.protocol import COORDINATOR, message_bytes
from hocket.sandblaster.roles import SandblasterShard, SandblasterWorker
from hocket.sandblaster.vectors import cuts
from hocket.transport.frame import Envelope

_CENTRE = ("coordinator", 0)
_DIES, _FOUND_DEAD, _COMPUTED = "dies", "found dead", "computed"


class VirtualWorld:
    """A coordinator, shards and workers; worker w dies at ``deaths[w]`` seconds, the coordinator knows it ``notice_s`` later."""

    def __init__(
        self,
        objective: Objective,
        config: CoordinatorConfig,
        spec: ClusterSpec,
        workers: int,
        seed: int = 0,
        deaths: Mapping[int, float] | None = None,
        notice_s: float = 1.0,
    ) -> None:
        deaths = deaths or {}
        unknown = [w for w in deaths if w not in range(workers)]
        if unknown:
            raise HocketError(f"deaths: there is no worker {unknown[0]}; they are numbered 0 … {workers - 1}.")
        self.objective, self.spec, self.seed, self.workers = objective, spec, seed, workers
        self._factors = spec.factors(workers).tolist()
        self._flops = objective.flops() if spec.step_s is None else 0.0
        self._steps: Counter[int] = Counter()
        self._disturbances: dict[int, list[float]] = {}
        self._computing: dict[Key, Compute] = {}
        self._point: tuple[int, Tensor] = (-1, objective.point)
        self._finished = False
        self.coordinator = SandblasterCoordinator(config)
        point = objective.point
        self.shards = [SandblasterShard(i, point[part], config.exact) for i, part in enumerate(cuts(len(point), config.shards))]
        self.simulation = Simulation(_Network(spec, self.shards, workers, deaths), timers=False)
        self.simulation.on_effect, self.simulation.on_call = self._carry_out, self._happen
        for w, death in deaths.items():
            self.simulation.put(death, Call(_DIES, ("worker", w)))
            self.simulation.put(death + notice_s, Call(_FOUND_DEAD, ("worker", w)))
        routes: dict[int, Key] = {COORDINATOR: _CENTRE, **{i: ("shard", i) for i in range(config.shards)}}
        programs: dict[Any, Any] = {_CENTRE: self.coordinator}
        programs |= {("shard", i): shard for i, shard in enumerate(self.shards)}
        programs |= {("worker", w): SandblasterWorker(len(point), config.shards) for w in range(workers)}
        for key, program in programs.items():
            self.simulation.add(key, program, _identity(key), routes)
        for key, program in programs.items():
            self.simulation.carry_out(key, program.start(0.0))

    @property
    def x(self) -> Tensor:
        """The weights."""
        return torch.cat([shard.shard.vectors["x"] for shard in self.shards])

    def ideal_s(self) -> float:
        """An evaluation's seconds if all workers computed all the time, messages took none and nothing disturbed a step."""
        work = sum(self._undisturbed_s(p) for p in range(len(self.objective.portions)))
        return work / sum(1 / f for f in self._factors)

    def run(self, watch: Callable[[dict[str, Any]], None]) -> None:
        """Minimise; ``watch`` sees each iteration's metrics as they come."""
        self._tell, self._reported = watch, 0
        while not self._finished:
            if not self.simulation.step():
                raise WorkerLost(
                    "All virtual workers have died, so the batch cannot be finished; leave at least one worker out of deaths=."
                )

    # --- what happens --------------------------------------------------------------------------------------------------------

    def _carry_out(self, node: Any, effect: Effect) -> None:
        if isinstance(effect, Compute):
            self._computing[node] = effect
            self.simulation.put(self.simulation.now + self._seconds(node[1], effect.portion), Call(_COMPUTED, node))
        elif node == _CENTRE and isinstance(effect, Snapshot):
            for row in self.coordinator.metrics[self._reported :]:
                self._reported += 1
                self._tell(row)
        elif node == _CENTRE and isinstance(effect, Finished):
            self._finished = True

    def _happen(self, call: Call) -> None:
        node: Any = call.node
        now = self.simulation.now
        if call.name == _DIES:
            self.simulation.remove(node)
        elif call.name == _FOUND_DEAD:
            self.simulation.carry_out(_CENTRE, self.coordinator.peer_lost(_identity(node), now))
        elif node in self.simulation.nodes:
            worker, task = self.simulation.nodes[node].program, self._computing.pop(node)
            assert isinstance(worker, SandblasterWorker)
            if worker.evaluation != self._point[0]:  # all workers have the same point, so the model moves there once
                self._point = worker.evaluation, task.point
            loss, gradient = self.objective.portion(self._point[1], task.portion)
            self.simulation.carry_out(node, worker.computed(task.portion, loss, gradient, now))

    # --- time ----------------------------------------------------------------------------------------------------------------

    def _seconds(self, worker: int, portion: int) -> float:
        step = self._steps[worker]
        self._steps[worker] += 1
        if step not in self._disturbances:
            self._disturbances[step] = self.spec.disturbance(self.workers, step, self.seed).tolist()
        return self._undisturbed_s(portion) * self._factors[worker] * self._disturbances[step][worker]

    def _undisturbed_s(self, portion: int) -> float:
        share = self.objective.share(portion)
        if self.spec.step_s is not None:
            return self.spec.step_s * share * self.workers
        return self.spec.seconds(self._flops * share * len(self.objective.inputs))


class _Network:
    """One link per node; what a worker has not sent off when it dies is lost."""

    def __init__(self, spec: ClusterSpec, shards: list[SandblasterShard], workers: int, deaths: Mapping[int, float]) -> None:
        self._spec, self._shards, self._deaths = spec, shards, deaths
        self._links = LinkModel(spec, 1 + len(shards) + workers)
        self._first = {"coordinator": 0, "shard": 1, "worker": 1 + len(shards)}

    def arrivals(self, now: float, source: Any, target: Any, message: Envelope) -> list[float]:
        kind, number = source
        if "answers" in message.metadata:  # the shard has carried out so many orders before it sends this
            values = len(self._shards[number].shard.vectors["x"])
            now += 2 * len(message.metadata["answers"]) * values / self._spec.flops
        sender, receiver = self._first[kind] + number, self._first[target[0]] + target[1]
        arrives = self._links.send(now, sender, receiver, message_bytes(message))
        lost = kind == "worker" and self._links.out[sender] >= self._deaths.get(number, math.inf)
        return [] if lost else [arrives]


def _identity(key: tuple[str, int]) -> bytes:
    return f"{key[0]} {key[1]}".encode()
