"""Sandblaster's programs on a network that loses, repeats, reorders and delays, with processes that crash and come back, by seed.

Whatever happens: every evaluation has the loss and the gradient of the whole batch, the run ends, and with ``exact`` it ends at the
bits of a run in which nothing happened.
"""

from __future__ import annotations

import copy
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from faults.simulated import Outcome, trace_messages
from hocket.drivers.simulation import Call, Simulation
from hocket.programs.base import Compute, Finished, Restore, Snapshot
from hocket.sandblaster import coordinator as coordinators
from hocket.sandblaster.coordinator import CoordinatorConfig, SandblasterCoordinator
from hocket.sandblaster.lbfgs import Evaluate, Settings, lbfgs
from hocket.sandblaster.protocol import COORDINATOR
from hocket.sandblaster.roles import SandblasterShard, SandblasterWorker
from hocket.sandblaster.vectors import cuts
from hocket.transport.frame import Envelope

VALUES, PORTIONS, WORKERS, SHARDS = 5, 7, 3, 2
CENTRE = ("coordinator", 0)
FAULTS_S, MOST_S = 40.0, 2000.0
"""Faults end after so many virtual seconds; a run that has not ended by then, or long after, hangs."""

GENERATOR = torch.Generator().manual_seed(0)
BOWLS = torch.rand(PORTIONS, VALUES, generator=GENERATOR, dtype=torch.float64) + 0.1
CENTRES = torch.randn(PORTIONS, VALUES, generator=GENERATOR, dtype=torch.float64)
START = torch.zeros(VALUES, dtype=torch.float64)


def portion(x: Tensor, number: int) -> tuple[float, Tensor]:
    """A portion's share of a loss that is not quadratic."""
    away = x - CENTRES[number]
    return (BOWLS[number] * (away**2 + away**4 / 4)).sum().item(), BOWLS[number] * (2 * away + away**3)


class SandblasterNetwork:
    """Faulty until ``FAULTS_S``; nodes in ``cut_off`` hear and say nothing until the time given there."""

    def __init__(self, dice: random.Random, faulty: bool) -> None:
        self.dice, self.faulty = dice, faulty
        self.cut_off: dict[Any, float] = defaultdict(float)
        self.dropped, self.repeated = dice.choice([0.0, 0.02, 0.2]), dice.choice([0.0, 0.1, 0.5])
        self.delay_s, self.power = dice.choice([0.01, 0.3, 3.0]), dice.choice([2, 4, 8])

    def arrivals(self, now: float, source: Any, target: Any, message: Envelope) -> list[float]:
        if not self.faulty or now > FAULTS_S:
            return [now + 0.01]
        if now < max(self.cut_off[source], self.cut_off[target]) or self.dice.random() < self.dropped:
            return []
        copies = 2 if self.dice.random() < self.repeated else 1
        return [now + 0.01 + self.delay_s * self.dice.random() ** self.power for _ in range(copies)]


class SandblasterRun:
    """The programs, their snapshots, and what befalls them."""

    def __init__(self, seed: int, exact: bool, faulty: bool = True, settings: Settings | None = None) -> None:
        self.dice = random.Random(seed)
        self.faulty, self.finished = faulty, False
        settings = settings or Settings(history=3, max_iter=6, max_eval=30, tolerance_change=0.0)
        backups = self.dice.random() < 0.7
        self.config = CoordinatorConfig(settings, PORTIONS, SHARDS, backups, exact, liveness_timeout_s=4.0)
        self.network = SandblasterNetwork(self.dice, faulty)
        self.simulation = Simulation(self.network)
        self.simulation.on_effect, self.simulation.on_call = self.carry_out, self.happen
        self.snapshots: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.incarnations: dict[Any, int] = defaultdict(lambda: -1)
        self.tasks: dict[str, Compute] = {}
        self.evaluations = self.events = 0
        self.nodes = [CENTRE, *(("shard", i) for i in range(SHARDS)), *(("worker", i) for i in range(WORKERS))]
        self.faults = self.dice.randrange(8) if faulty else 0
        for _ in range(self.faults):
            victim = self.dice.choice(self.nodes)
            self.simulation.put(self.dice.uniform(0, FAULTS_S), Call(self.dice.choice(["crash", "cut off"]), victim))

    def start(self, node: Any) -> None:
        self.incarnations[node] += 1
        kind, number = node
        centre = {COORDINATOR: CENTRE}
        if kind == "coordinator":
            config = replace(self.config, incarnation=self.incarnations[node])
            program: Any = SandblasterCoordinator(config, copy.deepcopy(self.snapshots[node].get("")))
            routes: dict[int, Any] = {}
        elif kind == "shard":
            x = START[cuts(VALUES, SHARDS)[number]]
            program, routes = SandblasterShard(number, x, self.config.exact, "", self.incarnations[node]), centre
        else:
            program, routes = SandblasterWorker(VALUES, SHARDS), centre | {i: ("shard", i) for i in range(SHARDS)}
        self.simulation.add(node, program, f"{kind} {number} {self.incarnations[node]}".encode(), routes)
        self.simulation.carry_out(node, program.start(self.simulation.now))

    def carry_out(self, node: Any, effect: Any) -> None:
        program: Any = self.simulation.nodes[node].program
        if isinstance(effect, Snapshot):
            self.snapshots[node][effect.name] = copy.deepcopy(program.state_dict())
        elif isinstance(effect, Restore):
            state = copy.deepcopy(self.snapshots[node][effect.name])
            self.simulation.carry_out(node, program.restored(state, self.simulation.now))
        elif isinstance(effect, Compute):
            name = f"computed {self.simulation.nodes[node].identity!r}"
            self.tasks[name] = effect
            slow = 20.0 if self.faulty and self.dice.random() < 0.02 else 0.2
            self.simulation.put(self.simulation.now + slow * self.dice.random(), Call(name, node))
        elif isinstance(effect, Finished) and node == CENTRE:
            self.finished = True

    def happen(self, call: Call) -> None:
        now = self.simulation.now
        if call.name == "start":
            self.start(call.node)
        elif call.name == "cut off":
            self.network.cut_off[call.node] = now + 8 * self.dice.random()
        elif call.name == "crash":
            if call.node in self.simulation.nodes:
                self.simulation.remove(call.node)
                self.simulation.put(now + 3 * self.dice.random(), Call("start", call.node))
        elif call.node in self.simulation.nodes:
            node = self.simulation.nodes[call.node]
            if call.name == f"computed {node.identity!r}":
                task = self.tasks.pop(call.name)
                loss, gradient = portion(task.point, task.portion)
                program: Any = node.program
                self.simulation.carry_out(call.node, program.computed(task.portion, loss, gradient, now))

    def vector(self, name: str) -> Tensor:
        programs: list[Any] = [self.simulation.nodes["shard", i].program for i in range(SHARDS)]
        return torch.cat([program.shard.vectors[name] for program in programs])

    @property
    def x(self) -> Tensor:
        """The weights that the shards saved last; a shard may be dead by now."""
        iteration = self.snapshots[CENTRE][""]["state"]["iteration"]
        return torch.cat([self.snapshots["shard", i][str(iteration)]["x"] for i in range(SHARDS)])

    def checked(self, settings: Settings, state: Any) -> Iterator[Any]:
        """L-BFGS, whose every evaluation is compared with that of the whole batch."""
        conversation: Any = lbfgs(settings, state)
        answer: Any = None
        while True:
            try:
                request = conversation.send(answer)
            except StopIteration:
                return
            incarnations = [self.incarnations["shard", i] for i in range(SHARDS)]
            answer = yield request
            alive = all(("shard", i) in self.simulation.nodes for i in range(SHARDS))
            if isinstance(request, Evaluate) and alive and incarnations == [self.incarnations["shard", i] for i in range(SHARDS)]:
                self.evaluations += 1
                parts, gradients = zip(*(portion(self.vector(request.at), p) for p in range(PORTIONS)), strict=True)
                assert math.isclose(answer[0], sum(parts), rel_tol=1e-12), "the loss is not that of the whole batch"
                whole = sum(gradients[1:], gradients[0])
                same = torch.allclose(self.vector(request.into), whole, rtol=1e-12, atol=1e-12)
                assert same, "the gradient is not that of the whole batch"

    def run(self, until: int | None = None) -> SandblasterCoordinator:
        """Until the coordinator has finished, or saved iteration ``until``."""
        plain, coordinators.lbfgs = coordinators.lbfgs, self.checked  # type: ignore[assignment]
        try:
            for node in self.nodes:
                self.start(node)
            while not self.finished:
                self.events += 1
                assert self.simulation.step(), "nothing happens any more"
                assert self.simulation.now < MOST_S, "the run hangs"
                saved = self.snapshots[CENTRE].get("")
                if until is not None and saved is not None and saved["state"]["iteration"] == until:
                    break
        finally:
            coordinators.lbfgs = plain
        program = self.simulation.nodes[CENTRE].program
        assert isinstance(program, SandblasterCoordinator)
        return program


def run_schedule(seed: int, trace: Callable[[str], None] | None = None) -> Outcome:
    """One schedule: its run ends where a calm one ends, with the same bits if portions are summed in order (odd seeds)."""
    exact = bool(seed % 2)
    run, outcome = SandblasterRun(seed, exact), Outcome(seed)
    if trace is not None:
        plain = {name: value for name, value in vars(run.network).items() if name != "dice"}
        trace(f"exact={exact} {plain}")
        trace_messages(run.simulation, trace)
    expected, weights = _calm(exact)
    try:
        program = run.run()
        assert program.state.ended == expected.state.ended, f"it ended by {program.state.ended}, not by {expected.state.ended}"
        assert run.evaluations >= 1, "no evaluation could be checked"
        same = torch.equal(run.x, weights) if exact else torch.allclose(run.x, weights, rtol=1e-6, atol=1e-8)
        assert same, "it ended at other weights than a run without faults"
        assert not exact or losses(program) == losses(expected), "its losses are not those of a run without faults"
    except AssertionError as error:
        outcome.violations.append(f"{run.simulation.now:.3f} s: {str(error).splitlines()[0]}")
    outcome.events, outcome.end_s, outcome.faults = run.events, run.simulation.now, run.faults
    return outcome


@lru_cache
def _calm(exact: bool) -> tuple[SandblasterCoordinator, Tensor]:
    calm = SandblasterRun(0, exact, faulty=False)
    return calm.run(), calm.x


def losses(program: SandblasterCoordinator) -> list[float]:
    """After every iteration."""
    return [row["loss"] for row in program.metrics]
