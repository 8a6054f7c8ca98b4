"""Packed shards under ``hocket train``: real and virtual workers read the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from process.launch import Hocket
from process.test_cli import metrics_of, timeless

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def test_real_and_virtual_workers_train_on_the_same_samples(hocket: Hocket, tmp_path: Path) -> None:
    packed = hocket("data", "pack", "digits", str(tmp_path / "digits"), "--shard-mb", "0.3")
    assert packed.returncode == 0, packed.stderr
    common = ["--data", f"shards:{tmp_path / 'digits'}", "--workers", "2", "--batch-size", "50", "--epochs", "2"]
    for name, where in (("real", "--exact"), ("virtual", "--virtual")):
        ended = hocket("train", *common, where, "--out", str(tmp_path / name))
        assert ended.returncode == 0, ended.stderr
    real, virtual = (timeless(metrics_of(tmp_path / name)) for name in ("real", "virtual"))
    assert real == virtual
    assert real[0]["data_bytes"] > 100_000
    assert real[1]["accuracy"] > 0.5
