"""Recorded trajectories: a change leaves these numbers as they are, unless it claims otherwise.

To record anew, after a change that means to alter results (say so in CHANGELOG.md):

    .venv/bin/python tests/golden/test_golden.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from virtual.world import World, sgd

RECORD = Path(__file__).with_name("trajectories.json")
STEPS = 10
STRATEGIES = [
    "bulk", "bulk + topk(0.1)", "bulk + qsgd(4)", "bulk + threshold(keep=0.2) | ternary", "bulk + lowrank(1)",
    "bulk + dgc(0.1, warmup=4)",
    "local(3)", "local(2) + sign", "gossip", "gossip + topk(0.1)", "local(2) + gossip(exponential) + exchange=gradients",
    "postlocal(2, 4) + gossip(ring)", "diloco(3) + cast(bf16)", "hierarchical(allreduce, gossip, size=2) + randomk(0.2)",
]  # fmt: skip


def trajectory(strategy: str) -> dict[str, object]:
    """Ten steps of four workers: losses, weights in brief, exchanges."""
    world = World(strategy, optimizer=sgd(0.2), seed=7).step(STEPS)
    rows = world.rows
    return {
        "losses": [round(x, 7) for x in world.losses],
        "norms": [round(x, 7) for x in rows.norm(dim=1).tolist()],
        "projection": [round(x, 7) for x in (rows @ torch.linspace(-1, 1, rows.shape[1], dtype=torch.float64)).tolist()],
        "exchanges": world.replicas.program.exchanges,
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_trajectory_is_the_recorded_one(strategy: str) -> None:
    recorded, now = json.loads(RECORD.read_text())[strategy], trajectory(strategy)
    for name, values in recorded.items():
        assert now[name] == pytest.approx(values, rel=1e-5, abs=1e-5), name


def test_every_recorded_strategy_is_tested() -> None:
    assert sorted(json.loads(RECORD.read_text())) == sorted(STRATEGIES)


if __name__ == "__main__":
    torch.set_num_threads(1)
    RECORD.write_text(json.dumps({s: trajectory(s) for s in STRATEGIES}, indent=1) + "\n")
    print(f"{len(STRATEGIES)} trajectories in {RECORD}")
