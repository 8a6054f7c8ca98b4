"""Partitions by label: every sample has one owner, all workers own equally many, and rounds give each once, over shards too."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.data import load
from hocket.data.label_skew import owners
from hocket.data.partition import Partition
from hocket.data.shards.order import ShardOrder
from hocket.errors import HocketError, SettingError
from hocket.train.loop import TrainingPlan
from hocket.train.settings import RunSettings

LABELS = torch.arange(1003) * 7 % 10


@pytest.mark.parametrize("text", ["label(1)", "label(2)", "dirichlet(0.1)", "dirichlet(100)"])
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("workers, batch_size", [(1, 10), (4, 25), (7, 32), (10, 200)])
def test_every_sample_of_an_epoch_goes_to_its_owner_once(text: str, shards: bool, workers: int, batch_size: int) -> None:
    own = owners(text, LABELS, workers, seed=3)
    assert own is not None
    counts = own.bincount(minlength=workers)
    assert int(counts.max() - counts.min()) <= (2 if text.startswith("label") else 1)
    order = ShardOrder([250] * 4 + [3], seed=3) if shards else None
    partition = Partition(1003, workers, batch_size, 3, order=order, owners=own)
    for epoch in range(2):
        rounds = partition.rounds(epoch)
        assert len(rounds) == len(partition)
        given: Counter[int] = Counter()
        for r in rounds:
            assert len(r.indices) == workers
            for worker, part in enumerate(r.indices):
                assert len(part)
                assert (own[part] == worker).all()
                given.update(part.tolist())
        assert given == Counter(range(1003))
        assert all(size == batch_size for r in rounds[:-1] for size in r.sizes)


def test_skew_grows_as_it_is_asked_for() -> None:
    def classes(text: str) -> float:
        """The mean number of classes that a worker has at least 2 % of its samples in."""
        own = owners(text, LABELS, 10, seed=0)
        assert own is not None
        tables = [LABELS[own == worker].bincount(minlength=10) for worker in range(10)]
        return sum(int((table > 0.02 * table.sum()).sum()) for table in tables) / 10

    assert classes("dirichlet(0.02)") + 1 < classes("dirichlet(0.5)") < classes("dirichlet(100)") - 1
    assert 1 <= classes("label(1)") <= 2
    assert 1.5 <= classes("label(2)") <= 3
    same, other = (owners("dirichlet(0.5)", LABELS, 4, seed) for seed in (1, 2))
    assert same is not None
    assert other is not None
    again = owners("dirichlet(0.5)", LABELS, 4, 1)
    assert again is not None
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


def test_packed_shards_and_memory_have_the_same_owners_by_label(tmp_path: Path) -> None:
    packed = CliRunner().invoke(app, ["data", "pack", "digits", str(tmp_path), "--shard-mb", "0.3"], catch_exceptions=False)
    assert packed.exit_code == 0, packed.output
    there = load(f"shards:{tmp_path}")
    labels = there.samples.labels()
    assert labels is not None
    assert torch.equal(labels, there.samples[torch.arange(len(labels))][1])
    plan = TrainingPlan(batch_size=20, partition="label(2)")
    rounds = plan.sequence(there, 4).partition.rounds(0)
    for worker in range(4):
        own = labels[torch.cat([r.indices[worker] for r in rounds])]
        assert len(own.unique()) <= 6
    assert sum(len(part) for r in rounds for part in r.indices) == len(labels)


def test_what_cannot_be_is_said_in_one_sentence() -> None:
    for text in ("label", "label(0)", "label(1.5)", "dirichlet(-1)", "dirichlet(nan)", "dirichlet(1e)", "noniid"):
        with pytest.raises(SettingError, match="it is iid, label"):
            TrainingPlan(partition=text)
    with pytest.raises(HocketError, match="divides data by label"):
        owners("label(2)", None, 2, 0)
    with pytest.raises(SettingError, match="one by one"):
        RunSettings.of(strategy="async + server", workers=2, partition="label(2)")
    with pytest.raises(SettingError, match=r"leave .*balance"):
        TrainingPlan(partition="label(2)", balance="speed")
