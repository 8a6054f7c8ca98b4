"""What strangers and slow readers can cost a shard that serves a training: nothing but a bounded memory."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq

from hocket.cluster.layout import Layout
from hocket.programs.server.members import EpochSnapshots, SnapshotRequest
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.programs.server.wire import OBSERVER, WORKER_MARK, job_config
from hocket.strategy import Strategy
from hocket.train.checks import layout_for
from hocket.transport import Caller, Envelope, Kind, pack
from hocket.transport.frame import REASONS
from process.launch import Nursery, eventually, run_script

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "flood.py"
MB = 1 << 20


def test_a_hundred_thousand_mutated_messages_change_no_bit_and_cost_no_memory(tmp_path: Path) -> None:
    code, said = run_script([sys.executable, str(PROGRAM), "--frames", "100000", "--json"], tmp_path, 110)
    assert code == 0, said
    found = json.loads(said.splitlines()[-1])
    assert found["same_bits"]
    assert found["lost"] == 0
    assert found["growth_bytes"] < 16 * MB
    refused = Counter(found["refused"])
    assert refused.total() > 95_000
    assert set(refused) >= {*REASONS, "shape", "model", "taken", "replaced"}, refused


def test_observers_under_ever_new_names_are_forgotten() -> None:
    kept = EpochSnapshots()
    for number in range(1000):
        kept.request(SnapshotRequest(b"o%d" % number, number, 10**9, float("inf")))
    assert len(kept.requests) <= 64
    assert kept.requests[-1].number == 999


# --- who asks and does not read ----------------------------------------------------------------------------------------------


JOB = bytes(range(48, 64))
VALUES, ROUNDS = 50_000, 2000
"""An answer with weights has 200 kB, and every push makes others: 400 MB, if all were kept for one who does not read."""


class Served:
    """A worker's link, one request at a time."""

    def __init__(self, address: str, worker: int, layout: Layout, strategy: Strategy, high_water: int) -> None:
        self.caller, self.worker = Caller(address, JOB, identity=WORKER_MARK + b"%d" % worker, high_water=high_water), worker
        self.job_config = job_config(strategy, layout, 0, 2)

    def hello(self, weights: torch.Tensor, optimizer: OptimizerSpec) -> None:
        metadata: dict[str, Any] = {"job_config": self.job_config, "pushed": 0, "optimizer": optimizer.describe(), "groups": [0]}
        metadata |= {"total": None, "per_epoch": None}
        assert self.ask(Envelope(Kind.HELLO, self.worker, metadata=metadata, tensors=(weights,))).kind == Kind.WELCOME

    def ask(self, request: Envelope) -> Envelope:
        assert self.caller.send(request, 30.0)
        answer = self.caller.receive(30.0)
        assert answer is not None
        return answer

    def push(self, step: int) -> Envelope:
        metadata = {"parts": [[1, 0]], "lrs": [0.1], "fetch": True, "seen": step - 1}
        return self.ask(Envelope(Kind.PUSH, self.worker, 0, step, step, metadata, (torch.full((VALUES,), 1e-3),)))


@pytest.mark.parametrize("who", ["a worker", "an observer"])
def test_one_who_asks_and_never_reads_costs_a_bounded_memory_and_nobody_else(nursery: Nursery, tmp_path: Path, who: str) -> None:
    arguments = ["--liveness-timeout", "60", "--stay"]
    group = nursery.start("process.served:shard", 1, tmp_path, {"HOCKET_JOB": JOB.hex()}, arguments=arguments)
    path = tmp_path / "0.out"
    assert eventually(lambda: path.exists() and path.read_text().endswith("\n"))
    address, shard = json.loads(path.read_text())["address"], psutil.Process(group.pids[0])
    model = torch.nn.Linear(VALUES, 1, bias=False)
    optimizer, strategy = torch.optim.SGD(model.parameters(), 0.1), Strategy.parse("async + server")
    layout = layout_for(model, optimizer, strategy, None, None)
    quick, slow = Served(address, 0, layout, strategy, 16), Served(address, 1, layout, strategy, 1)
    spec = OptimizerSpec.of(optimizer)
    for one in (quick, slow):
        one.hello(torch.zeros(VALUES), spec)
    for step in range(1, 21):
        assert quick.push(step).step == step
    before = shard.memory_info().rss
    if who == "a worker":
        asks = pack(Envelope(Kind.FETCH, 1, 0, 0, 1, {"fetch": True}), JOB)
    else:
        asks = pack(Envelope(Kind.FETCH, OBSERVER, number=1, metadata={"epoch": 0}), JOB)
    peak, sent = 0, 0
    for step in range(21, 21 + ROUNDS):
        for _ in range(2):  # past its link, which would read
            try:
                slow.caller.socket.send_multipart(asks, zmq.NOBLOCK)
                sent += 1
            except zmq.Again:
                break
        assert quick.push(step).step == step, "the other is served as before"
        peak = max(peak, shard.memory_info().rss - before)
    assert sent > 50, "more than its queue at the shard holds"
    assert peak < 120 * MB
    for one in (quick, slow):
        one.caller.close(0)
    os.kill(group.pids[0], 9)
    group.wait(30)
