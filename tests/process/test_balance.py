"""Shares by speed on real processes: all of them come to the same ones, and the slow worker gets less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from process.launch import Hocket

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

TRAIN = ["train", "--workers", "2", "--balance", "speed", "--slowdown", "1,3"]
TRAIN += ["--model", "cnn", "--batch-size", "32", "--lr", "0.05", "--device", "cpu"]


@pytest.mark.parametrize(
    ("strategy", "stages"), [("bulk + allreduce", (("1", []), ("2", ["--resume"]))), ("local(4)", (("2", []),))]
)
def test_the_slow_process_gets_fewer_samples_and_all_know(
    hocket: Hocket, tmp_path: Path, strategy: str, stages: tuple[tuple[str, list[str]], ...]
) -> None:
    for epochs, more in stages:
        ended = hocket(*TRAIN, "--strategy", strategy, "--epochs", epochs, "--out", str(tmp_path / "run"), *more)
        assert ended.returncode == 0, ended.stderr
        newest = tmp_path / "run" / "checkpoints" / epochs
        states = [torch.load(newest / f"process-{rank}.pt", weights_only=True) for rank in (0, 1)]
        known = [[*(m["shares"] for m in state["metrics"]), state["shares"]] for state in states]
        assert known[0] == known[1]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    shares = [*(m["shares"] for m in metrics), states[0]["shares"]]
    assert shares == known[0]
    assert shares[0] == [32, 32]
    assert all(sum(s) == 64 and min(s) >= 1 for s in shares)
    fast, slow = (sum(column) for column in zip(*shares[1:], strict=True))
    assert slow < fast
    assert json.loads((tmp_path / "run" / "run.json").read_text())["share"] == "speed"
    replicas = [state["replicas"]["model"] for state in states]
    if strategy == "bulk + allreduce":
        assert all(torch.equal(replicas[0][name], replicas[1][name]) for name in replicas[0])


def test_workers_that_share_a_process_are_refused(hocket: Hocket, tmp_path: Path) -> None:
    ended = hocket(*TRAIN, "--processes", "1", "--out", str(tmp_path / "run"))
    assert ended.returncode != 0
    assert "a process of its own" in ended.stderr
    assert "Traceback" not in ended.stderr
