"""What a worker keeps of its state when the number of workers changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hocket
from hocket.cluster.virtual import VirtualCluster
from hocket.compression.base import Context
from hocket.strategy import Strategy
from hocket.topology import AllReduce


def _rows_of(state: dict[str, Any], row: int) -> dict[str, Any]:
    return {name: _rows_of(value, row) if isinstance(value, dict) else value[row : row + 1] for name, value in state.items()}


def test_residuals_of_the_workers_that_are_left_keep_their_sum() -> None:
    """What a worker holds back, for itself and as the owner of a slice, is what it holds back afterwards for itself: the next mean
    of the workers that are left includes all of it."""
    workers, left, size = 4, [0, 2, 3], 101
    cluster, code = VirtualCluster(workers), Strategy.parse("bulk + topk(0.1)").compression
    channel = AllReduce().bind(cluster, cluster.world, 0)
    rows = torch.randn(workers, size, generator=torch.Generator().manual_seed(0))
    _, state = channel.gradients(code, rows, {}, Context(0, 1, 0, 0, torch.arange(workers), workers))
    after = AllReduce().bind(VirtualCluster(len(left)), VirtualCluster(len(left)).world, 0)
    wanted, found = torch.zeros(size), torch.zeros(size)
    for row in left:
        channel._places = torch.tensor([row])  # as the channel of that worker's own process has it
        own = _rows_of(state, row)
        owned = channel._held_by_owners(code, own["inner"]["error"], size, len(left))[0]
        assert bool(owned.any())
        wanted += own["error"][0] + owned
        kept = after.regrouped(code, own, channel, size)
        assert kept["inner"] == {}
        found += kept["error"][0]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("strategy", "workers", "found"),
    [
        ("local(2) + hierarchical(allreduce, gossip, size=2)", 4, "hierarchical"),
        ("local(2) + hierarchical(allreduce, gossip, size=2)", 3, "gossip"),
        ("gossip(matrix=[[0.5, 0.5], [0.5, 0.5]])", 2, "gossip"),
        ("gossip(matrix=[[0.5, 0.5], [0.5, 0.5]])", 3, "gossip"),
    ],
)
def test_a_topology_that_does_not_fit_gives_way_to_one_that_does(strategy: str, workers: int, found: str) -> None:
    cluster = VirtualCluster(workers)
    topology = Strategy.parse(strategy).topology.for_workers(workers, workers)
    assert topology.name == found
    topology.bind(cluster, cluster.world, 0)


@pytest.mark.parametrize("given", ["8:2", "2", "a:b", "0:3", ":"])
def test_limits_that_cannot_be_are_refused(given: str) -> None:
    with pytest.raises(hocket.HocketError, match="such as 2:8"):
        hocket.Elastic.parse(given)


def test_an_elastic_job_needs_a_rendezvous() -> None:
    hocket.init(device="cpu")
    model = torch.nn.Linear(2, 1)
    with pytest.raises(hocket.HocketError, match="hocket launch --elastic 2:8"):
        hocket.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), elastic="2:8")
