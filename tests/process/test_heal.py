"""A link that is cut during training heals by itself, and what was lost meanwhile is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from process.launch import run_script
from process.test_netlab import needs_lab

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "heal.py"


@needs_lab
def test_a_worker_whose_link_was_cut_is_back_and_nothing_is_missing(tmp_path: Path) -> None:
    """The cut is longer than the shard's patience, so the others go on meanwhile."""
    arguments = ["--cut", "4", "--liveness-timeout", "2", "--epochs", "8", "--strategies", "async + server", "--json"]
    code, said = run_script([sys.executable, str(PROGRAM), *arguments], tmp_path, 100)
    assert code == 0, said
    found = json.loads(said.splitlines()[-1])
    assert found["done"] == found["total"], "all mini-batches were done, by whoever was there"
    assert found["back_s"] < 15, "it pushed again"
    assert found["silent_s"] >= 4, "it had really been cut off"
    assert "worker 1 has been silent" in found["said"]
    assert 1 <= found["lost"] <= 10, "what it was working on was given to the other"
