"""Summation servers on a virtual clock: every worker gets the mean in worker order, and lost servers are noticed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.cluster.spec import ClusterSpec
from hocket.drivers.links import LinkModel, LinkNetwork
from hocket.drivers.simulation import Simulation
from hocket.errors import HocketError, WorkerLost
from hocket.programs.summation import SummationServer, SummationWorker
from hocket.transport.frame import Envelope

SPEC = ClusterSpec(bandwidth=1e6, latency_s=0.001)


def run(
    workers: int, spare: int, rows: list[torch.Tensor], network: Any = LinkNetwork, *settings: Any, **options: float
) -> Simulation:
    """All workers' means, with a server beside every worker and ``spare`` ones on machines of their own."""
    servers = workers + spare
    ends = {("worker", w): w for w in range(workers)} | {("server", s): s for s in range(servers)}
    simulation = Simulation(network(LinkModel(SPEC, servers), ends, *settings))
    for s in range(servers):
        simulation.add(("server", s), SummationServer(workers), b"s%d" % s, {})
    routes = {s: ("server", s) for s in range(servers)}
    for w, row in enumerate(rows):
        program = SummationWorker(w, workers, servers, **options)
        program.addresses = {s: f"tcp://server-{s}" for s in range(servers)}
        simulation.add(("worker", w), program, b"w%d" % w, routes)
        simulation.carry_out(("worker", w), program.mean(row, 0.0))
    return simulation


def to_the_end(simulation: Simulation) -> None:
    while simulation.step():
        pass


@given(st.integers(2, 5), st.integers(0, 4), st.integers(1, 60_000))
def test_every_worker_gets_the_mean_in_worker_order(workers: int, spare: int, size: int) -> None:
    rows = [torch.randn(size, generator=torch.Generator().manual_seed(w)) for w in range(workers)]
    expected = rows[0].clone()
    for row in rows[1:]:
        expected += row
    simulation = run(workers, min(spare, workers), rows)
    to_the_end(simulation)
    assert not any(simulation.nodes["worker", w].program.busy for w in range(workers))
    assert all(torch.equal(row, expected / workers) for row in rows)


def test_a_spare_server_that_is_lost_is_named() -> None:
    simulation = run(2, 1, [torch.ones(1000), torch.ones(1000)], silence_s=3.0)
    simulation.remove(("server", 2))
    with pytest.raises(WorkerLost, match="The summation server at tcp://server-2 has not answered for 3 s"):
        to_the_end(simulation)


def test_servers_that_live_wait_for_a_worker_that_does_not_come() -> None:
    simulation = run(2, 1, [torch.ones(1000)], silence_s=3.0, liveness_timeout_s=20.0)
    with pytest.raises(WorkerLost, match="A summation server has not answered for 20 s; a worker or a server has ended"):
        to_the_end(simulation)
    assert simulation.now == pytest.approx(20.0, abs=1.0)


class Broken(LinkNetwork):
    """A network whose connections break: what is under way is lost, and some messages come twice."""

    def __init__(self, links: LinkModel, ends: dict[Any, int], seed: int) -> None:
        super().__init__(links, ends)
        self.dice = random.Random(seed)

    def arrivals(self, now: float, source: Any, target: Any, message: Envelope) -> list[float]:
        (at,) = super().arrivals(now, source, target, message)
        return self.dice.choices(([], [at, at + self.dice.random()], [at]), (1, 1, 6))[0]


@pytest.mark.parametrize("seed", range(4))
def test_messages_that_are_lost_or_come_twice_change_no_bit_of_three_means(seed: int) -> None:
    workers, spare, size = 3, 1, 60_000
    rows = [torch.randn(size, generator=torch.Generator().manual_seed(w)) for w in range(workers)]
    expected = (rows[0] + rows[1] + rows[2]) / workers
    simulation = run(workers, spare, rows, Broken, seed, silence_s=1e6)
    for again in range(3):
        to_the_end(simulation)
        assert not any(simulation.nodes["worker", w].program.busy for w in range(workers))
        assert all(torch.equal(row, expected) for row in rows)
        for w in range(workers):
            rows[w].copy_(torch.randn(size, generator=torch.Generator().manual_seed(10 * again + w)))
        expected = (rows[0] + rows[1] + rows[2]) / workers
        for w in range(workers):
            program = simulation.nodes["worker", w].program
            assert isinstance(program, SummationWorker)
            simulation.carry_out(("worker", w), program.mean(rows[w], simulation.now))
    servers = [simulation.nodes["server", s].program for s in range(workers + spare)]
    assert all(isinstance(server, SummationServer) and len({row for row, _ in server._means}) <= 2 for server in servers)


def test_a_server_refuses_another_model_at_once() -> None:
    simulation = run(2, 0, [torch.ones(1000), torch.ones(999)])
    with pytest.raises(HocketError, match="build the same model everywhere"):
        to_the_end(simulation)
