"""Laws of ``hocket probe``: what it writes reads as a cluster on which predictions can be made, from one process or several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket import ClusterSpec, HocketError
from hocket.cluster.virtual import VirtualCluster
from hocket.prediction.probe import CODES, probe
from process.launch import Nursery

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

BATCH = torch.randn(8, 16), torch.zeros(8, dtype=torch.int64)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def write(rank: int, folder: str) -> None:
    cluster = hocket.init(device="cpu")
    found = probe(net(), F.cross_entropy, BATCH, cluster, codes=["topk(0.1)", "sign"], limit_s=2.0)
    Path(folder, f"{rank}.toml").write_text(found.text())
    hocket.shutdown()


def test_several_workers_find_one_cluster_with_links(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.test_probe:write", 3, tmp_path)
    assert group.wait(100.0) == [0, 0, 0], group.said()
    texts = [(tmp_path / f"{rank}.toml").read_text() for rank in range(3)]
    specs = [ClusterSpec.parse(tmp_path / f"{rank}.toml") for rank in range(3)]
    assert "3 workers, gloo, cpu" in texts[0]
    assert len({(s.step_s, s.slowdown, s.bandwidth, s.latency_s) for s in specs}) == 1
    spec = specs[0]
    assert 0 < spec.bandwidth < 1e12
    assert 0 < spec.latency_s + spec.message_s < 1
    assert len(spec.slowdown) in (1, 3)
    assert min(spec.slowdown) == 1
    assert spec.ready[-1][0] == 1.0, "the last part of the gradients"
    assert all(0 < at <= 1 for _, at in spec.ready)
    assert spec.server_message_s + spec.server_byte_s > 0
    assert sum(spec.coding["server"]) > 0
    assert "gradients" in spec.coding
    (row,) = hocket.predict(net(), tmp_path / "0.toml", ["bulk + topk(0.1)"], 3, optimizer="sgd").rows
    assert row.step_s > spec.coding["topk(0.1)"][0] + spec.step_s


def test_one_process_is_measured_without_links() -> None:
    found = probe(net(), F.cross_entropy, BATCH, VirtualCluster(1), limit_s=1.0, name="here")
    assert set(found.spec.coding) == {code.partition("(")[0] for code in CODES}
    assert sum(each for _, each in found.spec.coding.values()) > 0
    assert found.spec.step_s is not None
    assert "[link]" not in found.text()


def test_what_cannot_be_measured_is_refused_in_a_sentence() -> None:
    with pytest.raises(HocketError, match="cannot be measured on this batch"):
        probe(nn.Linear(3, 3), F.cross_entropy, BATCH, VirtualCluster(1), codes=["sign"], limit_s=1.0)
    with pytest.raises(HocketError, match="not 4 virtual workers"):
        probe(net(), F.cross_entropy, BATCH, VirtualCluster(4))
