"""Real processes, each with a disk of its own: a checkpoint counts when all of them have it whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from process.launch import Nursery

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def found(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    before = tmp_path_factory.mktemp("dies")
    dies = nursery.start("process.kept:dies", 2, before)
    assert dies.wait(60)[1] == -9, dies.said()
    assert sorted(p.name for p in Path(before, "killed", "disk-1", "checkpoints", "3").iterdir()) == ["process-1.pt.tmp"]
    group = nursery.start("process.kept:main", 2, tmp_path_factory.mktemp("kept"), before=str(before))
    assert group.wait(100, together=True) == [0, 0], group.said()
    return group.results()


@pytest.mark.parametrize("name", ["killed", "flipped"])
def test_a_run_goes_on_from_the_newest_that_is_whole_and_ends_at_the_same_bits(found: list[dict[str, Any]], name: str) -> None:
    for worker in found:
        assert all(torch.equal(a, b) for a, b in zip(worker[name]["weights"], worker["whole"]["weights"], strict=True))
        assert worker[name]["kept"] == {"killed": ["4", "5"], "flipped": ["5", "6"]}[name], "no number is used twice"


def test_it_says_which_and_why_on_the_first_process_alone(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert not second["killed"]["said"] + second["flipped"]["said"] + second["full"]["said"]
    assert "Goes on from checkpoint 2 (epoch 2, step " in first["killed"]["said"][0]
    assert "Checkpoint 3 is passed over: process 0 was never finished." in first["killed"]["said"][0]
    assert "Goes on from checkpoint 1 (epoch 1, step " in first["flipped"]["said"][0]
    why = "Checkpoint 3 is passed over: process 1 has a damaged process-1.pt (its checksum is another)."
    assert why in first["flipped"]["said"][0]


def test_a_full_disk_on_one_process_costs_that_checkpoint_alone(found: list[dict[str, Any]]) -> None:
    assert found[0]["full"]["said"] == [
        "Checkpoint 2 was not saved: process 1 cannot write process-1.pt (No space left on device); "
        "checkpoint 1 is the newest, and training goes on."
    ]
    assert [worker["full"]["kept"] for worker in found] == [["1", "3"]] * 2
