"""What the ledger of a job on servers tells of ages and losses, to any worker, during the training and after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hocket
from hocket.drivers import server_runtime as driver
from hocket.drivers.snapshots import Snapshots
from hocket.drivers.sockets import SocketDriver
from hocket.programs.base import Effects
from hocket.strategy import Strategy
from hocket.train.job import Job
from hocket.train.runtimes.messages import server_runtime
from hocket.transport import Envelope, Kind
from process.cases import batch, net, sgd
from process.launch import Nursery
from shard_servers import ShardServers

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

LIMIT_S = 100.0
STEPS = 12
PUSHES = {
    "ssp(4) + server(shards=2) + topk(0.01)": STEPS,
    "downpour(3, 3) + server": STEPS // 3,
    "stale(2) + server": 0,
}
"""How often a worker pushes gradients."""


def loop(job: Job, steps: range, rank: int = 0) -> None:
    for t in steps:
        job.optimizer.zero_grad()
        x, y = batch(t, rank)
        F.cross_entropy(job.model(x), y).backward()
        job.optimizer.step()


def telling(rank: int, folder: str) -> None:
    """A loop of one's own per strategy, in every process of a group."""
    hocket.init(device="cpu")
    found: dict[str, Any] = {}
    for text in PUSHES:
        model = net()
        job = hocket.parallelize(model, sgd(model), text)
        assert type(job) is hocket.Job
        loop(job, range(STEPS // 2), rank)
        during = job.summary(all_workers=True)
        loop(job, range(STEPS // 2, STEPS), rank)
        job.finish()
        found[text] = {"during": during, "after": job.summary(all_workers=True)}
    torch.save(found, f"{folder}/{rank}.pt")


def test_every_push_has_an_age_in_every_workers_ledger(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.test_served_ledger:telling", 2, tmp_path)
    assert group.wait(LIMIT_S) == [0, 0], group.said()
    results = group.results()
    for text, pushes in PUSHES.items():
        for result in results:
            during, after = result[text]["during"], result[text]["after"]
            assert sum(after["staleness"].values()) == 2 * pushes, text
            assert pushes // 4 <= sum(during["staleness"].values()) <= 2 * pushes, "at least one's own that have been answered"
            assert after["staleness"] == results[0][text]["after"]["staleness"], "all have ended, so all know the same"
            assert during["lost"] == after["lost"] == 0
        ages = [int(age) for age in results[0][text]["after"]["staleness"]]
        assert ages == sorted(ages)


class Shards(ShardServers):
    """Two shards with snapshots; ``deaf``: they do not say where they stand."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.deaf = folder, False
        super().__init__(2)

    def driver(self, place: int, snapshots: Snapshots | None = None, **options: Any) -> SocketDriver:
        return super().driver(place, Snapshots(self.folder, place), snapshot_s=1e6)

    def handle(self, place: int, sender: bytes, message: Envelope, now: float) -> Effects:
        return [] if self.deaf and message.kind is Kind.ORDER else super().handle(place, sender, message, now)

    def save(self) -> None:
        """Both make a snapshot."""
        with self.lock:
            for driver in self.drivers:
                Snapshots(self.folder, driver.program.place).save(driver.program.state_dict())  # type: ignore[attr-defined]

    def restart(self, place: int) -> None:
        """One dies, and another goes on from its snapshot."""
        with self.lock:
            self.drivers[place] = self.driver(place)


def test_what_a_restarted_shard_forgot_is_lost_and_has_no_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker pushes to two shards; whichever has lost most says how much, and the first one knows the ages."""
    strategy = Strategy.parse("async + server(shards=2)")
    with Shards(tmp_path) as shards:
        model = net()
        runtime = server_runtime(lambda layout: shards.runtime(str(strategy), layout, 0, 1))
        job = Job(model, sgd(model), strategy, runtime)

        def told() -> tuple[dict[str, int], int]:
            summary = job.summary(all_workers=True)
            return summary["staleness"], summary["lost"]

        loop(job, range(3))
        shards.save()
        loop(job, range(3, 5))
        assert told() == ({"0": 5}, 0)
        shards.restart(1)
        loop(job, range(5, 6))
        assert told() == ({"0": 6}, 2), "what shard 1 lost counts"
        shards.restart(0)
        loop(job, range(6, 7))
        assert told() == ({"0": 4}, 3), "three of before the snapshot and one since; three are lost"
        sent = job.summary(all_workers=True)["bytes_sent"]
        monkeypatch.setattr(driver, "STATUS_S", 0.1)
        shards.deaf = True
        assert told() == ({"0": 4}, 3), "who does not answer has said so before"
        assert job.summary(all_workers=True)["bytes_sent"] == sent, "asking counts for nothing"
        shards.deaf = False
        job.finish()
        assert told() == ({"0": 4}, 3)
