"""Laws of what a step costs beside computing and the network: handling at servers, shared cores, hooks, ready gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import hocket
from hocket import ClusterSpec, HocketError
from hocket.cluster import Subgroups
from hocket.cluster.clock import Clock
from hocket.drivers.links import LinkModel
from hocket.drivers.simulation import Call, Simulation
from hocket.prediction.steps import Prediction
from hocket.train.asynchronous.cores import SharedCores

VALUES = 1e6
MESSAGE_S, BYTE_S, OWN_S = 0.02, 1e-9, 0.03


def predicted(strategy: str, spec: ClusterSpec, workers: int, step_s: float) -> Prediction:
    return hocket.predict(parameters=VALUES, step_s=step_s, cluster=spec, workers=workers, strategies=[strategy]).rows[0]


@pytest.mark.parametrize("on_workers", [False, True])
def test_a_push_costs_its_handling_wherever_the_shard_is(on_workers: bool) -> None:
    spec = ClusterSpec(
        server_message_s=MESSAGE_S, server_byte_s=BYTE_S, coding={"server": (OWN_S, 0.0)}, servers_on_workers=on_workers
    )
    handling = MESSAGE_S + 8 * VALUES * BYTE_S  # float32 values come in and go out
    assert predicted("async + server", spec, 2, 1.0).step_s == pytest.approx(1.0 + OWN_S + handling, rel=1e-3)
    assert predicted("async + server", ClusterSpec(servers_on_workers=on_workers), 2, 1.0).step_s == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("workers", [4, 16, 100])
def test_a_server_handles_one_push_after_another(workers: int) -> None:
    spec = ClusterSpec(server_message_s=MESSAGE_S)
    assert predicted("async + server", spec, workers, 1e-3).step_s == pytest.approx(workers * MESSAGE_S, rel=0.02)
    halves = replace(spec, server_message_s=0.0, server_byte_s=BYTE_S)
    one, two = (predicted(f"async + server({n})", halves, workers, 1e-4).step_s for n in (1, 2))
    assert one == pytest.approx(workers * 8 * VALUES * BYTE_S, rel=0.03)
    assert two == pytest.approx(one / 2, rel=0.03), "each shard has half of the bytes"


def test_a_message_in_flight_does_not_keep_a_shard_busy() -> None:
    links = LinkModel(ClusterSpec(), 1)
    assert links.work(0.0, 10.0, 0, 1.0) == 11.0
    assert links.work(1.0, 1.0, 0, 2.0) == 3.0, "it is there before the first one arrives"
    assert links.work(1.0, 9.5, 0, 1.0) == 12.0, "it would end after the first one has arrived"
    assert links.worked == [4.0]


def ends(spec: ClusterSpec, workers: int, begun: dict[int, float]) -> dict[int, float]:
    """When each worker ends what takes 1 s while all compute, begun at these times."""
    network: Any = None
    simulation, found = Simulation(network), {}
    cores = SharedCores(spec, workers, simulation, "computed")

    def call(event: Call) -> None:
        if event.name == "begin":
            cores.begin(event.node, 1.0)
        elif cores.ended(event.node):
            found[event.node] = simulation.now

    simulation.on_call = call
    for worker, at in begun.items():
        simulation.put(at, Call("begin", worker))
    while simulation.step():
        pass
    return found


def test_fewer_workers_on_the_same_cores_compute_faster() -> None:
    shared = ClusterSpec(step_s=1.0, alone_s=0.5)
    assert ends(shared, 2, {0: 0.0, 1: 0.0}) == pytest.approx({0: 1.0, 1: 1.0})
    assert ends(shared, 2, {0: 0.0}) == pytest.approx({0: 0.5})
    # Alone for a quarter of a second worker 0 does half of its step, then both go on at full crowding, then worker 1 alone.
    assert ends(shared, 2, {0: 0.0, 1: 0.25}) == pytest.approx({0: 0.75, 1: 1.0})
    assert ends(shared, 4, {0: 0.0, 1: 0.0}) == pytest.approx({0: 0.5, 1: 0.5}), "two cores for four workers"
    assert ends(replace(shared, host_size=2), 4, {0: 0.0, 2: 0.0, 3: 0.0}) == pytest.approx({0: 0.5, 2: 1.0, 3: 1.0})
    assert ends(replace(shared, alone_s=None), 2, {0: 0.0, 1: 0.25}) == pytest.approx({0: 1.0, 1: 1.25})


def test_a_worker_beside_waiting_ones_has_their_cores() -> None:
    slow = ClusterSpec(step_s=1.0, bandwidth=8 * VALUES / 9, servers_on_workers=True)  # worker 1 waits for its link
    apart, shared = (predicted("async + server", replace(slow, alone_s=a), 2, 1.0).step_s for a in (None, 0.5))
    assert shared < 0.8 * apart


def test_gradients_leave_when_they_are_ready() -> None:
    clock = Clock(ClusterSpec(step_s=4.0, bandwidth=1.0, ready=((0.9, 0.5), (1.0, 0.75))), 2)
    clock.compute(0)
    clock.launch(0.9)
    clock.ring(1, Subgroups.world(2))
    assert clock.net.tolist() == pytest.approx([2.0 + 1] * 2)
    clock.launch(1.0)
    clock.ring(1, Subgroups.world(2))
    clock.wait()
    assert clock.now.tolist() == pytest.approx([4.0] * 2), "both are over before the step"
    in_proportion = Clock(ClusterSpec(step_s=4.0, bandwidth=1.0), 2)
    in_proportion.compute(0)
    in_proportion.launch(0.9)
    assert in_proportion.net.tolist() == pytest.approx([4.0 * (1 / 3 + 0.9 * 2 / 3)] * 2)


def test_only_steps_that_exchange_gradients_pay_for_hooks() -> None:
    spec = ClusterSpec(coding={"gradients": (0.5, 0.0)})
    assert predicted("bulk", spec, 4, 1.0).step_s == pytest.approx(1.5)
    assert predicted("local(4)", spec, 4, 1.0).step_s == pytest.approx(1.0)
    assert predicted("bulk", spec, 1, 1.0).step_s == pytest.approx(1.0)


@pytest.mark.parametrize("ready", [((0.5, 0.9), (1.0, 0.8)), ((0.5, 1.2),), ((0.6, 0.5), (0.5, 0.6)), ((-0.1, 0.0),)])
def test_shares_that_do_not_rise_are_refused(ready: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(HocketError, match="give pairs of shares"):
        ClusterSpec(ready=ready)
