"""Runs of server strategies under a fault schedule, and the invariants that they must keep.

Gradients are chosen so that the weights count: the gradient of worker ``w`` at step ``t`` is −1 at a place of its own (once per
shard) and 0 elsewhere, and the shards run SGD with a learning rate of 1. So after the run a shard's weights say how many times
each push was applied; a code such as top-k sends such a gradient without loss. Under ``stale`` every local step adds 1 to all
weights, so that weights which a worker brings to a meeting say where it began: at the shard's last mean. Where workers push
displacements, their own steps add these ones, and the shards' outer optimiser has a learning rate of 1 and no momentum.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from faults.simulated import Fault, FaultyNetwork, Outcome, Schedule
from hocket.cluster.layout import layout_of
from hocket.drivers.simulation import Call, Key, Simulation
from hocket.programs.base import Effects, Send, Snapshot
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.programs.server.requests import WorkerConfig
from hocket.programs.server.shard import AveragingShard
from hocket.programs.server.shard_server import ShardServer
from hocket.programs.server.worker import ServerWorker
from hocket.strategy import Strategy
from hocket.transport.frame import Envelope, Kind

MAX_TIME_S, MAX_EVENTS = 1000.0, 50_000
"""A run that has not ended by then hangs."""
_SGD = OptimizerSpec("sgd", ({"lr": 1.0},))


@dataclass
class _Worker:
    """A worker's process, and where it stands in its step."""

    program: ServerWorker
    rows: list[Tensor]
    phase: str = "batch"
    incarnation: int = 0


class ServerRun:
    """``strategy`` with ``workers`` workers of ``steps`` steps each (where mini-batches are dispatched: on average)."""

    def __init__(self, strategy: str, schedule: Schedule, workers: int = 3, steps: int = 5) -> None:
        self.strategy, self.schedule, self.size, self.steps = Strategy.parse(strategy), schedule, workers, steps
        self.shards = self.strategy.topology.num_shards(workers)
        self.total = workers * steps
        self.columns = self.total + steps
        values = self.shards * workers * self.columns
        parameter = nn.Parameter(torch.zeros(values))
        self.layout = layout_of([("w", parameter)], [[parameter]], 1 << 30, 1 << 30)
        self.network = FaultyNetwork(schedule)
        self.simulation = Simulation(self.network)
        self.simulation.on_effect, self.simulation.on_call, self.simulation.on_idle = self._effect, self._call, self._idle
        self.servers: dict[int, ShardServer] = {}
        self.snapshots: dict[int, dict[str, Any]] = {}
        """What is on the disk of each shard."""
        self.writes: dict[int, list[dict[str, Any]]] = {}
        """What a shard's thread writes, and what follows it."""
        self.written, self.writing = 0, dict[int, int]()
        self._disk = random.Random(schedule.seed ^ 0xD15C)
        self.workers: dict[int, _Worker] = {}
        self.computed: set[tuple[int, int]] = set()
        """Gradients (worker, step); a worker that was away skips steps."""
        self.acknowledged: set[tuple[int, int]] = set()
        """Those of them that all shards have answered."""
        self.outcome = Outcome(schedule.seed, faults=len(schedule.faults) + len(schedule.partitions))
        self._rng = random.Random(schedule.seed ^ 0xC10C)
        self._finished: set[int] = set()
        self._dead: set[int] = set()
        self._crashed: set[int] = set()
        self.shards_crash = any(f.kind == "crash" and f.node[0] == "shard" for f in schedule.faults)
        self.watched: list[AveragingShard] = []
        for place in range(self.shards):
            self._start_shard(place)
        for worker in range(workers):
            self._start_worker(worker)
        self.simulation.put(0.0, Call("beats", None))
        for number, fault in enumerate(schedule.faults):
            self.simulation.put(fault.at, Call(f"fault {number}", None))

    # --- processes -----------------------------------------------------------------------------------------------------------

    def _start_shard(self, place: int) -> None:
        server = self.servers[place] = ShardServer(place, snapshot_s=1.0, stays=True)
        key = ("shard", place)
        self.simulation.add(key, server, b"s%d" % place, {})
        self.simulation.carry_out(key, server.start(self.simulation.now, self.snapshots.get(place)))

    def _start_worker(self, worker: int, incarnation: int = 0) -> None:
        config = WorkerConfig(
            self.strategy, self.layout, worker, self.size, give_up_s=1e6, total=self.total, per_epoch=self.total,
            replaces=incarnation > 0,
        )  # fmt: skip
        rows = [b.empty(1) for b in self.layout.buckets]
        own = self.workers[worker] = _Worker(ServerWorker(config), rows, incarnation=incarnation)
        key = ("worker", worker)
        routes = {place: ("shard", place) for place in range(self.shards)}
        self.simulation.add(key, own.program, b"w%d.%d" % (worker, incarnation), routes)
        outer = self.strategy.sync.outer_optimizer
        optimizer = _SGD if outer is None else OptimizerSpec("delayednesterov", (outer,))
        self._do(worker, own.program.join(rows, optimizer, self.simulation.now))

    def _effect(self, key: Key, effect: Any) -> None:
        if isinstance(effect, Snapshot):
            assert isinstance(key, tuple)
            place, state = key[1], self.servers[key[1]].state_dict()
            if effect.durable:
                self.snapshots[place] = state
                self.writes.pop(place, None)
                return
            self.writes[place] = [*self.writes.get(place, [])[:1], state]
            if len(self.writes[place]) == 1:
                self._write(place)

    def _write(self, place: int) -> None:
        """The thread begins to write; a shard that crashes before the end has its snapshots of before."""
        self.written += 1
        self.writing[place] = self.written
        took = self._disk.choice((0.0, 0.05, 3.0))
        self.simulation.put(self.simulation.now + took, Call(f"written {self.written}", ("shard", place)))

    def _has_written(self, place: int, number: int) -> None:
        waiting = self.writes.get(place, [])
        if waiting and self.writing[place] == number:
            self.snapshots[place] = waiting.pop(0)
            if waiting:
                self._write(place)

    def _fault(self, fault: Fault) -> None:
        assert isinstance(fault.node, tuple)
        kind, number = fault.node
        node = self.simulation.nodes.get(fault.node)
        if node is None or (kind == "worker" and number in self._finished):
            return
        if fault.kind == "stop":
            node.stopped_until = self.simulation.now + fault.seconds
        elif fault.kind == "jump":
            node.clock_offset_s += fault.seconds
        else:
            self.simulation.remove(fault.node)
            if kind == "worker":
                self._crashed.add(number)
            else:
                self.writes.pop(number, None)
            if fault.kind == "crash":
                self.simulation.put(self.simulation.now + fault.seconds, Call("restart", fault.node))
            elif len(self._dead) < self.size - 1:
                self._dead.add(number)
            else:
                self.simulation.put(self.simulation.now + fault.seconds, Call("restart", fault.node))

    def _restart(self, node: tuple[str, int]) -> None:
        if node in self.simulation.nodes:
            return
        if node[0] == "shard":
            self._start_shard(node[1])
        else:
            self._start_worker(node[1], self.workers[node[1]].incarnation + 1)

    def _beat(self) -> None:
        """Every second all workers that are neither dead nor stopped tell the shards that they live, as a thread of theirs does."""
        now = self.simulation.now
        self.simulation.put(now + 1.0, Call("beats", None))
        for worker in self.workers:
            node = self.simulation.nodes.get(("worker", worker))
            if node is not None and node.stopped_until <= now and worker not in self._finished:
                self._do(worker, [Send(place, Envelope(Kind.BEAT, worker)) for place in range(self.shards)])

    # --- a worker's step -----------------------------------------------------------------------------------------------------

    def _call(self, call: Call) -> None:
        if call.name.startswith("fault"):
            self._fault(self.schedule.faults[int(call.name.split()[1])])
        elif call.name == "beats":
            self._beat()
        elif call.name == "restart":
            self._restart(call.node)
        elif call.name.startswith("written"):
            self._has_written(call.node[1], int(call.name.split()[1]))
        elif call.node in self.simulation.nodes:
            name, incarnation = call.name.split()
            assert isinstance(call.node, tuple)
            own = self.workers[call.node[1]]
            if name == "computed" and own.incarnation == int(incarnation):
                own.phase = "before"
                self._do(call.node[1], own.program.before_update(self._gradient(call.node[1], own), self._time(call.node)))
                self._idle(call.node)

    def _gradient(self, worker: int, own: _Worker) -> list[Tensor]:
        gradient = torch.zeros(self.layout.parameters)
        self.computed.add((worker, own.program.step + 1))
        column = worker * self.columns + own.program.step % self.columns
        for part in own.program.slices.cut(0, gradient):
            part[column] = -1.0
        return [gradient]

    def _idle(self, key: Key) -> None:
        if not isinstance(key, tuple) or key[0] != "worker":
            return
        worker, own = key[1], self.workers[key[1]]
        program = own.program
        while not program.busy:
            self._acknowledge(worker, program)
            if own.phase == "batch":
                self._next(worker, own)
            elif own.phase == "before":
                own.phase = "after"
                if self.strategy.sync.averages_weights:
                    own.rows[0] += 1.0
                elif self.strategy.sync.outer_optimizer is not None:
                    own.rows[0] -= self._gradient(worker, own)[0]
                self._do(worker, program.after_update([1.0], None, self._time(key)))
            elif own.phase == "after":
                own.phase = "batch"
            elif own.phase == "finishing":
                own.phase = "left"
                self._finished.add(worker)
                self._do(worker, program.leave(self._time(key)))
            else:
                return

    def _next(self, worker: int, own: _Worker) -> None:
        program, now = own.program, self._time(("worker", worker))
        if self.strategy.sync.static_partition:
            number = program.step * self.size + worker if program.step < self.steps else None
        else:
            number = program.next_batch()
            if number is None and program.may_get_batch:
                self._do(worker, program.take_batch(now))
                return
        if number is None:
            own.phase = "finishing"
            self._do(worker, program.finish(now))
            return
        own.phase = "computing"
        self._check_staleness(worker, program.step)
        seconds = self.schedule.speeds[worker] * self._rng.uniform(0.5, 1.5)
        self.simulation.put(self.simulation.now + seconds, Call(f"computed {own.incarnation}", ("worker", worker)))

    def _acknowledge(self, worker: int, program: ServerWorker) -> None:
        self.acknowledged |= {(worker, step) for step in range(1, program.pushed + 1)} & self.computed

    def _do(self, worker: int, effects: Effects) -> None:
        self.simulation.carry_out(("worker", worker), effects)

    def _time(self, key: Key) -> float:
        return self.simulation.time(key)

    # --- invariants ----------------------------------------------------------------------------------------------------------

    def violate(self, sentence: str) -> None:
        """An invariant does not hold."""
        self.outcome.violations.append(f"{self.simulation.now:.3f} s: {sentence}")

    def _check_staleness(self, worker: int, step: int) -> None:
        """A shard that restarts forgets pushes: until they are made up for, workers seem to be ahead."""
        bound = self.strategy.sync.max_staleness
        if self.shards_crash or self.strategy.sync.averages_weights:
            return
        for place, server in self.servers.items():
            done = {} if server.shard is None else server.shard.done
            if worker in done and step - min(done.values()) > bound:
                self.violate(f"worker {worker} begins step {step + 1}, on shard {place} the slowest has done {min(done.values())}")

    def run(self) -> Outcome:
        """Until all workers that live have finished; the outcome."""
        outcome, stale = self.outcome, self.strategy.sync.averages_weights
        while len(self._finished | self._dead) < self.size and not outcome.violations:
            if outcome.events > MAX_EVENTS or self.simulation.now > MAX_TIME_S or not self.simulation.step():
                self.violate(f"the run hangs: { ({w: own.phase for w, own in self.workers.items()}) }")
                break
            outcome.events += 1
            if stale:
                for server in self.servers.values():
                    watch_meetings(self, server)
        outcome.end_s = self.simulation.now
        if not outcome.violations:
            self._check_end()
        return outcome

    def _check_end(self) -> None:
        for place, server in self.servers.items():
            if server.shard is None:
                self.violate(f"shard {place} has no weights at the end")
            elif not self.strategy.sync.averages_weights:
                self._check_counts(place, server)
        first = self.servers[0]
        if first.dispatcher is not None and first.dispatcher.counted + first.all_lost < self.total:
            done, lost = first.dispatcher.counted, first.all_lost
            self.violate(f"of {self.total} mini-batches {done} are done and {lost} lost at the end")
        if self.strategy.sync.static_partition:
            for worker in self._finished:
                if (step := self.workers[worker].program.step) < self.steps:
                    self.violate(f"worker {worker} has finished after {step} of {self.steps} steps")
        finals = [self.workers[worker].rows for worker in sorted(self._finished)]
        calm = not self.schedule.faults and not self.schedule.partitions
        if calm and not all(torch.equal(a, b) for rows in finals for a, b in zip(rows, finals[0], strict=True)):
            self.violate("workers have finished with different weights")

    def _check_counts(self, place: int, server: ShardServer) -> None:
        """Every push is applied exactly once or counted as lost."""
        assert server.shard is not None
        counts = torch.cat(server.shard.weights).view(self.size, self.columns)
        together = self.strategy.sync.max_staleness == 0
        wrong = (counts != 0) & (counts != 1)
        if (
            self.strategy.sync.push_quorum > 1 or self.strategy.sync.push_average[2]
        ):  # a mean of several workers' pushes holds a part of each
            wrong = (counts < 0) | (counts > 1)
        if not together and bool(wrong.any()):
            worker, step = (int(n) for n in wrong.nonzero()[0])
            found = float(counts[worker, step])
            self.violate(f"shard {place} applied step {step + 1} of worker {worker} {found:g} times")
        total, version = float(counts.sum()), server.shard.version
        if together and (abs(total - version) > 1e-3 or float(counts.max()) > 1 + 1e-6):
            self.violate(f"shard {place} made {version} updates, but the weights of all pushes add up to {total:g}")
        # What a shard forgot only its sender can tell; where that is gone too, other workers get its mini-batches again.
        forgotten = self._crashed if self.shards_crash else set()
        acknowledged = [(w, t) for w, t in sorted(self.acknowledged) if w not in forgotten]
        missing, lost = [(w, t) for w, t in acknowledged if counts[w, t - 1] == 0], max(s.all_lost for s in self.servers.values())
        if len(missing) > lost:
            self.violate(f"shard {place} lacks {len(missing)} acknowledged pushes, {missing[:3]} …, and counts {lost} as lost")


def watch_meetings(run: ServerRun, server: ShardServer) -> None:
    """Under ``stale``: whatever a worker brings to a meeting is the last mean, and its own steps since."""
    shard = server.shard
    if not isinstance(shard, AveragingShard) or shard in run.watched or run.shards_crash:
        return
    run.watched.append(shard)
    meet = shard._meet

    def watched() -> None:
        mean = float(shard.weights[0][0])
        for worker, (steps, weights) in shard._arrived.items():
            began = float(weights[0][0]) - steps
            if steps and abs(began - mean) > 1e-3:
                run.violate(f"worker {worker} began at {began:g} and brings {steps} steps to a meeting after mean {mean:g}")
        meet()

    shard._meet = watched  # type: ignore[method-assign]
