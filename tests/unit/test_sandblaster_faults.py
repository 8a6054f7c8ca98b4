"""Sandblaster's programs on a network that loses, repeats, reorders and delays, with processes that crash and come back, by seed.

Whatever happens: every evaluation has the loss and the gradient of the whole batch, the run ends, and with ``exact`` it ends at the
bits of a run in which nothing happened.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.drivers.simulation import Call, Simulation
from hocket.messages.frame import Envelope, Kind
from hocket.programs.base import Compute, Finished, Restore, Snapshot
from hocket.sandblaster import coordinator as coordinators
from hocket.sandblaster.coordinator import CoordinatorConfig, SandblasterCoordinator
from hocket.sandblaster.lbfgs import Evaluate, Settings, lbfgs
from hocket.sandblaster.protocol import COORDINATOR
from hocket.sandblaster.roles import SandblasterShard, SandblasterWorker
from hocket.sandblaster.vectors import cuts

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


class Network:
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


class Cluster:
    """The programs, their snapshots, and what befalls them."""

    def __init__(self, seed: int, exact: bool, faulty: bool = True, settings: Settings | None = None) -> None:
        self.dice = random.Random(seed)
        self.faulty, self.finished = faulty, False
        settings = settings or Settings(history=3, max_iter=6, max_eval=30, tolerance_change=0.0)
        backups = self.dice.random() < 0.7
        self.config = CoordinatorConfig(settings, PORTIONS, SHARDS, backups, exact, liveness_timeout_s=4.0)
        self.network = Network(self.dice, faulty)
        self.simulation = Simulation(self.network)
        self.simulation.on_effect, self.simulation.on_call = self.carry_out, self.happen
        self.snapshots: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.incarnations: dict[Any, int] = defaultdict(lambda: -1)
        self.tasks: dict[str, Compute] = {}
        self.evaluations = 0
        self.nodes = [CENTRE, *(("shard", i) for i in range(SHARDS)), *(("worker", i) for i in range(WORKERS))]
        for _ in range(self.dice.randrange(8) if faulty else 0):
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
        program = self.simulation.nodes[node].program
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
                self.simulation.carry_out(call.node, node.program.computed(task.portion, loss, gradient, now))

    def vector(self, name: str) -> Tensor:
        return torch.cat([self.simulation.nodes["shard", i].program.shard.vectors[name] for i in range(SHARDS)])

    @property
    def x(self) -> Tensor:
        """The weights that the shards saved last; a shard may be dead by now."""
        iteration = self.snapshots[CENTRE][""]["state"]["iteration"]
        return torch.cat([self.snapshots["shard", i][str(iteration)]["x"] for i in range(SHARDS)])

    def checked(self, settings: Settings, state: Any) -> Iterator[Any]:
        """L-BFGS, whose every evaluation is compared with that of the whole batch."""
        conversation, answer = lbfgs(settings, state), None
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
                losses, gradients = zip(*(portion(self.vector(request.at), p) for p in range(PORTIONS)), strict=True)
                assert answer[0] == pytest.approx(sum(losses), rel=1e-12)
                torch.testing.assert_close(self.vector(request.into), sum(gradients[1:], gradients[0]), rtol=1e-12, atol=1e-12)

    def run(self, monkeypatch: pytest.MonkeyPatch, until: int | None = None) -> SandblasterCoordinator:
        """Until the coordinator has finished, or saved iteration ``until``."""
        monkeypatch.setattr(coordinators, "lbfgs", self.checked)
        for node in self.nodes:
            self.start(node)
        while not self.finished:
            assert self.simulation.step()
            assert self.simulation.now < MOST_S, "the run hangs"
            saved = self.snapshots[CENTRE].get("")
            if until is not None and saved is not None and saved["state"]["iteration"] == until:
                break
        return self.simulation.nodes[CENTRE].program


def losses(program: SandblasterCoordinator) -> list[float]:
    return [row["loss"] for row in program.metrics]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("tens", range(6))
def test_every_evaluation_is_that_of_the_whole_batch_whatever_happens(
    exact: bool, tens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = Cluster(0, exact, faulty=False)
    expected = calm.run(monkeypatch)
    assert calm.evaluations == expected.state.evaluations >= 7
    for seed in range(10 * tens, 10 * tens + 10):
        cluster = Cluster(seed, exact)
        program = cluster.run(monkeypatch)
        assert program.state.ended == expected.state.ended, f"seed {seed}"
        assert cluster.evaluations >= 1
        if exact:
            assert torch.equal(cluster.x, calm.x), f"seed {seed}"
            assert losses(program) == losses(expected), f"seed {seed}"
        else:
            torch.testing.assert_close(cluster.x, calm.x, rtol=1e-6, atol=1e-8)


def test_the_same_seed_gives_the_same_faults_and_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for _ in range(2):
        cluster = Cluster(5, exact=False)
        program = cluster.run(monkeypatch)
        runs.append((program.metrics, cluster.simulation.now, cluster.simulation.order, cluster.x.tolist()))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("stop", [0, 1, 4, 6])
def test_it_goes_on_from_any_iteration_as_if_nothing_had_happened(stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, first, second = (Cluster(0, exact=True, faulty=False) for _ in range(3))
    expected = whole.run(monkeypatch)
    first.run(monkeypatch, until=stop)
    second.snapshots = first.snapshots
    program = second.run(monkeypatch)
    assert torch.equal(second.x, whole.x)
    assert (program.state.evaluations, program.state.ended) == (expected.state.evaluations, expected.state.ended)
    assert losses(program) == losses(expected)
    assert [row["evaluations"] for row in program.metrics] == [row["evaluations"] for row in expected.metrics]


def test_a_worker_that_comes_too_late_gets_portions_of_the_next_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(1, exact=True, faulty=False)
    asked: set[int] = set()

    def arrivals(now: float, source: Any, target: Any, message: Envelope) -> list[float]:
        late = source == ("worker", 0) and message.kind == Kind.FETCH
        if late:
            asked.add(message.step)
        return [now + (3.0 if late else 0.01)]

    cluster.network.arrivals = arrivals  # type: ignore[method-assign]
    cluster.config = replace(cluster.config, backups=True)
    program = cluster.run(monkeypatch)
    assert len(asked) >= 2
    assert sum(row["lost"] for row in program.metrics) == 0
