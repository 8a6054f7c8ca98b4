"""Sandblaster's programs under simulated faults (tests/faults/sandblaster_run.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from faults.sandblaster_run import SandblasterRun, losses
from hocket.transport.frame import Envelope, Kind


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("tens", range(6))
def test_every_evaluation_is_that_of_the_whole_batch_whatever_happens(exact: bool, tens: int) -> None:
    calm = SandblasterRun(0, exact, faulty=False)
    expected = calm.run()
    assert calm.evaluations == expected.state.evaluations >= 7
    for seed in range(10 * tens, 10 * tens + 10):
        cluster = SandblasterRun(seed, exact)
        program = cluster.run()
        assert program.state.ended == expected.state.ended, f"seed {seed}"
        assert cluster.evaluations >= 1
        if exact:
            assert torch.equal(cluster.x, calm.x), f"seed {seed}"
            assert losses(program) == losses(expected), f"seed {seed}"
        else:
            torch.testing.assert_close(cluster.x, calm.x, rtol=1e-6, atol=1e-8)


def test_the_same_seed_gives_the_same_faults_and_the_same_run() -> None:
    runs = []
    for _ in range(2):
        cluster = SandblasterRun(5, exact=False)
        program = cluster.run()
        runs.append((program.metrics, cluster.simulation.now, cluster.simulation.order, cluster.x.tolist()))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("stop", [0, 1, 4, 6])
def test_it_goes_on_from_any_iteration_as_if_nothing_had_happened(stop: int) -> None:
    whole, first, second = (SandblasterRun(0, exact=True, faulty=False) for _ in range(3))
    expected = whole.run()
    first.run(until=stop)
    second.snapshots = first.snapshots
    program = second.run()
    assert torch.equal(second.x, whole.x)
    assert (program.state.evaluations, program.state.ended) == (expected.state.evaluations, expected.state.ended)
    assert losses(program) == losses(expected)
    assert [row["evaluations"] for row in program.metrics] == [row["evaluations"] for row in expected.metrics]


def test_a_worker_that_comes_too_late_gets_portions_of_the_next_evaluation() -> None:
    cluster = SandblasterRun(1, exact=True, faulty=False)
    asked: set[int] = set()

    def arrivals(now: float, source: Any, target: Any, message: Envelope) -> list[float]:
        late = source == ("worker", 0) and message.kind == Kind.FETCH
        if late:
            asked.add(message.step)
        return [now + (3.0 if late else 0.01)]

    cluster.network.arrivals = arrivals  # type: ignore[method-assign]
    cluster.config = replace(cluster.config, backups=True)
    program = cluster.run()
    assert len(asked) >= 2
    assert sum(row["lost"] for row in program.metrics) == 0
