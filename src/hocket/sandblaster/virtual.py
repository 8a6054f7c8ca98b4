"""Sandblaster on virtual workers: one process, real gradients, a virtual clock.

What happens is a queue of events, the earliest first: a message arrives, a worker has computed a portion, a worker is found dead. A
worker computes a portion in the time that the cluster's spec gives its operations, times the worker's slowdown and the step's
disturbance (where the spec states a step's seconds, a step is a worker's equal share of the batch). The coordinator, each shard and
each worker have one link, full duplex: a message holds its sender's way out and its receiver's way in, one after another, so many
workers that fetch from one shard wait for each other. A worker fetches the point once per evaluation, does one thing at a
time, and waits for the coordinator's answer between two portions. Everything is determined by the spec and the seed.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from hocket.cluster.spec import ClusterSpec
from hocket.errors import HocketError, WorkerLost
from hocket.sandblaster.figures import Figures
from hocket.sandblaster.lbfgs import Evaluate
from hocket.sandblaster.objective import Objective
from hocket.sandblaster.portions import Answer, Counts, Dispenser
from hocket.sandblaster.vectors import Order, VectorShard, combine, cuts

HEADER_BYTES = 64
COORDINATOR = "coordinator"


class VirtualLinks:
    """One link per node, by name; bytes that touched the coordinator are counted apart."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.bytes_coordinator = self.bytes_shards = 0
        self._out: dict[str, float] = defaultdict(float)
        self._in: dict[str, float] = defaultdict(float)

    def send(self, source: str, target: str, size: int, at: float) -> tuple[float, float]:
        """When a message handed over at ``at`` has left, and when it has arrived."""
        if COORDINATOR in (source, target):
            self.bytes_coordinator += size
        else:
            self.bytes_shards += size
        lasts = size / self.spec.bandwidth
        leaves = max(at, self._out[source])
        enters = max(leaves + self.spec.latency_s, self._in[target])
        self._out[source], self._in[target] = leaves + lasts, enters + lasts
        return leaves + lasts, enters + lasts


@dataclass
class _Worker:
    """``point``: of which evaluation it has the point; ``pending``: computed, not yet told to keep; ``total``: its sum."""

    name: str
    dies: float
    point: int = -1
    busy_until: float = 0.0
    steps: int = 0
    pending: Tensor | None = None
    total: Tensor | None = None


class VirtualWorld:
    """Virtual workers, shards and a coordinator; ``deaths`` are the seconds at which workers die, found out ``notice_s`` later."""

    def __init__(
        self,
        objective: Objective,
        spec: ClusterSpec,
        workers: int,
        shards: int,
        *,
        backups: bool = True,
        exact: bool = False,
        seed: int = 0,
        deaths: Mapping[int, float] | None = None,
        notice_s: float = 1.0,
    ) -> None:
        unknown = [w for w in deaths or {} if w not in range(workers)]
        if unknown:
            raise HocketError(f"deaths: there is no worker {unknown[0]}; they are numbered 0 … {workers - 1}.")
        self.objective, self.spec, self.seed = objective, spec, seed
        self.backups, self.exact = backups, exact
        self.now = 0.0
        self.links = VirtualLinks(spec)
        self.counts = Counts()
        self._cuts = cuts(len(objective.point), shards)
        self.shards = [VectorShard(objective.point[part], exact) for part in self._cuts]
        self._workers = [_Worker(f"worker {i}", (deaths or {}).get(i, math.inf)) for i in range(workers)]
        self._factors = spec.factors(workers).tolist()
        self._flops = objective.flops() if spec.step_s is None else 0.0
        self._disturbances: dict[int, list[float]] = {}
        self._idle = set(range(workers))
        self._gone: set[int] = set()
        self._evaluation = -1
        self._dispenser: Dispenser | None = None
        self._point: Tensor = objective.point
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._ticket = count()
        for worker, death in (deaths or {}).items():
            self._at(death + notice_s, lambda now, w=worker: self._found_dead(w, now))  # type: ignore[misc]

    @property
    def figures(self) -> Figures:
        """What has been spent so far."""
        return Figures(self.now, self.links.bytes_coordinator, self.links.bytes_shards, replace(self.counts))

    @property
    def x(self) -> Tensor:
        """The weights."""
        return torch.cat([shard.vectors["x"] for shard in self.shards])

    def ideal_s(self) -> float:
        """An evaluation's seconds if all workers computed all the time, messages took none and nothing disturbed a step."""
        work = sum(self._undisturbed_s(p) for p in range(len(self.objective.portions)))
        return work / sum(1 / f for f in self._factors)

    def ask(self, orders: tuple[Order, ...]) -> list[float]:
        """See :class:`World`."""
        answers, ends = [], []
        for i, shard in enumerate(self.shards):
            _, arrived = self.links.send(COORDINATOR, f"shard {i}", _size(orders), self.now)
            answers.append(shard.obey(orders))
            done = arrived + 2 * len(orders) * len(shard.vectors["x"]) / self.spec.flops
            ends.append(self.links.send(f"shard {i}", COORDINATOR, _size(answers[-1]), done)[1])
        self.now = max(ends)
        return [combine(order, terms) for order, terms in zip(orders, zip(*answers, strict=True), strict=True)]

    def evaluate(self, request: Evaluate) -> list[float]:
        """See :class:`World`."""
        self._evaluation += 1
        self.ask((*request.first, ("begin", self._evaluation, request.at)))
        while self._events and self._events[0][0] <= self.now:  # stragglers of the evaluation before
            self._happen()
        begun, self._point = self.now, torch.cat([shard.point for shard in self.shards])
        self._dispenser = Dispenser(len(self.objective.portions), len(self.shards), self.backups, self.exact, self.counts)
        for worker in sorted(self._idle):
            self._give(worker, begun)
        while not self._dispenser.complete:
            if not self._events:
                raise WorkerLost("All virtual workers are dead, so the batch cannot be finished; let some of them live.")
            self.now = max(self._happen(), begun)
        loss, self._dispenser = self._dispenser.loss, None
        _, *scalars = self.ask((("total", request.into), *request.then))
        return [loss, *scalars]

    # The coordinator's side.

    def _give(self, worker: int, now: float) -> None:
        assert self._dispenser is not None
        portion = self._dispenser.next(worker)
        if portion is None:
            self._idle.add(worker)
        else:
            self._idle.discard(worker)
            self._tell(worker, Answer(portion=portion), now)

    def _tell(self, worker: int, answer: Answer, now: float) -> None:
        _, arrives = self.links.send(COORDINATOR, self._workers[worker].name, _size(vars(answer)), now)
        evaluation = self._evaluation
        self._at(arrives, lambda t: self._told(worker, answer, evaluation, t))

    def _reported(self, worker: int, evaluation: int, portion: int, now: float) -> None:
        if worker in self._gone:
            return
        if self._dispenser is None or evaluation != self._evaluation:
            self.counts.wasted += 1
            self._idle.add(worker)
            if self._dispenser is not None:
                self._give(worker, now)
            return
        loss = 0.0
        if self._dispenser.wants(portion):  # a copy's gradient is the same: it need not be computed again
            loss, self._workers[worker].pending = self.objective.portion(self._point, portion)
        answer = self._dispenser.report(worker, portion, loss)
        if answer.portion is None:
            self._idle.add(worker)
        self._tell(worker, answer, now)

    def _acknowledged(self, worker: int, number: int, shard: int, evaluation: int, now: float) -> None:
        if self._dispenser is None or evaluation != self._evaluation:
            return
        orders = self._dispenser.staged(worker, number, shard)
        self._order(orders, now)
        if orders and (more := self._dispenser.bundle(worker)) is not None:
            self._tell(worker, Answer(bundle=more), now)

    def _found_dead(self, worker: int, now: float) -> None:
        self._gone.add(worker)
        self._idle.discard(worker)
        if self._dispenser is None:
            self.counts.lost += 1
            return
        self._order(self._dispenser.lost(worker), now)
        for other in sorted(self._idle):
            self._give(other, now)

    def _order(self, orders: list[Order], now: float) -> None:
        """Orders that need no answer."""
        if orders:
            for i, shard in enumerate(self.shards):
                self.links.send(COORDINATOR, f"shard {i}", _size(orders), now)
                shard.obey(orders)

    # A worker's side.

    def _told(self, worker: int, answer: Answer, evaluation: int, now: float) -> None:
        me = self._workers[worker]
        if now >= me.dies:
            return
        if now < me.busy_until:
            self._at(me.busy_until, lambda t: self._told(worker, answer, evaluation, t))
            return
        if answer.keep:
            assert me.pending is not None
            me.total = me.pending if me.total is None else me.total + me.pending
        if answer.bundle is not None:
            self._send_bundle(worker, answer.bundle, evaluation, now)
        if answer.portion is not None:
            self._compute(worker, answer.portion, evaluation, now)

    def _send_bundle(self, worker: int, number: int, evaluation: int, now: float) -> None:
        me = self._workers[worker]
        assert me.total is not None
        for i, part in enumerate(self._cuts):
            values = me.total[part]
            left, arrives = self.links.send(me.name, f"shard {i}", _bytes(values), now)
            if left < me.dies:
                self._at(arrives, lambda t, i=i, v=values: self._stage(i, worker, number, evaluation, v, t))  # type: ignore[misc]
        me.total = None

    def _compute(self, worker: int, portion: int, evaluation: int, now: float) -> None:
        me = self._workers[worker]
        if me.point != evaluation:
            me.point = evaluation
            now = max(self._fetch(me, i, now) for i in range(len(self.shards)))
        me.busy_until = now + self._undisturbed_s(portion) * self._factors[worker] * self._disturbed(me.steps)[worker]
        me.steps += 1
        self._at(me.busy_until, lambda t: self._computed(worker, portion, evaluation, t))

    def _computed(self, worker: int, portion: int, evaluation: int, now: float) -> None:
        me = self._workers[worker]
        left, arrives = self.links.send(me.name, COORDINATOR, _size((evaluation, portion, 0.1)), now)
        if left < me.dies:
            self._at(arrives, lambda t: self._reported(worker, evaluation, portion, t))

    def _fetch(self, me: _Worker, shard: int, now: float) -> float:
        _, asked = self.links.send(me.name, f"shard {shard}", HEADER_BYTES, now)
        return self.links.send(f"shard {shard}", me.name, _bytes(self._point[self._cuts[shard]]), asked)[1]

    # A shard's side.

    def _stage(self, shard: int, worker: int, number: int, evaluation: int, values: Tensor, now: float) -> None:
        if self.shards[shard].stage(evaluation, worker, number, values):
            _, arrives = self.links.send(f"shard {shard}", COORDINATOR, _size((evaluation, worker, number)), now)
            self._at(arrives, lambda t: self._acknowledged(worker, number, shard, evaluation, t))

    # Time.

    def _at(self, when: float, happening: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._ticket), happening))

    def _happen(self) -> float:
        when, _, happening = heapq.heappop(self._events)
        happening(when)
        return when

    def _undisturbed_s(self, portion: int) -> float:
        share = self.objective.share(portion)
        if self.spec.step_s is not None:
            return self.spec.step_s * share * len(self._workers)
        return self.spec.seconds(self._flops * share * len(self.objective.inputs))

    def _disturbed(self, step: int) -> list[float]:
        if step not in self._disturbances:
            self._disturbances[step] = self.spec.disturbance(len(self._workers), step, self.seed).tolist()
        return self._disturbances[step]


def _bytes(values: Tensor) -> int:
    return HEADER_BYTES + values.numel() * values.element_size()


def _size(content: object) -> int:
    """Bytes of a message of plain data."""
    return HEADER_BYTES + len(json.dumps(content))
