"""Elastic workers that share a GPU: groups are formed on Gloo, so what they exchange travels by way of the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from process.elastic import rendezvous
from process.launch import ENVIRON, eventually, left_behind

DEVICE = "cuda:0"
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a worker in an interpreter of its own: the nursery sees no GPU, and CUDA does not survive a fork."""
    with ExitStack() as stack:

        def begin(function: str, rank: int, environ: dict[str, str], **arguments: Any) -> subprocess.Popen[bytes]:
            program = f"from process.elastic import {function} as train; train({rank}, {str(tmp_path)!r}, **{arguments!r})"
            gpus = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
            output = stack.enter_context((tmp_path / f"{rank}.err").open("wb"))
            told = {"env": {**ENVIRON, **gpus, **environ}, "stdout": output, "stderr": output, "start_new_session": True}
            worker = stack.enter_context(subprocess.Popen([sys.executable, "-c", program], **told))
            stack.callback(worker.kill)
            return worker

        yield begin


@pytest.mark.parametrize(
    ("function", "arguments", "parts"),
    [
        ("train", {"strategy": "bulk"}, 1),
        ("train", {"strategy": "local(2) + gossip + topk(0.3)"}, 1),
        ("train_split", {"strategy": "local(2) + topk(0.3)", "mesh": "pipeline=2"}, 2),
    ],
)
@pytest.mark.timeout(330)
def test_one_is_killed_and_another_joins(
    function: str, arguments: dict[str, Any], parts: int, start: Start, tmp_path: Path
) -> None:
    """Two replicas of one process, or of ``parts``; process 1 is killed, and process ``2 * parts`` takes its place."""
    joined = tmp_path / "joined"
    told = {**arguments, "device": DEVICE, "epochs": 60, "until": str(joined)}

    def said() -> str:
        return "".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(tmp_path.glob("*.err")))

    def begun(rank: int) -> bool:
        return (tmp_path / f"{rank}.steps").exists()

    with rendezvous(2) as (program, environ):
        started = [
            start(function, rank, {**environ, "HOCKET_MEMBER": str(rank)}, fault="SIGKILL", **told) for rank in range(2 * parts)
        ]
        assert eventually(lambda: program.lost == 1, 150), said()
        new = start(function, 2 * parts, {**environ, "HOCKET_MEMBER": str(2 * parts + 1 % parts)}, **told)
        assert eventually(lambda: begun(2 * parts), 60), said()
        joined.touch()
        codes = [worker.wait(90) for worker in [*started, new]]
        assert codes == [0, -signal.SIGKILL, *[0] * (2 * parts - 1)], said()
    assert not left_behind([worker.pid for worker in [*started, new]])
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2 * parts + 1) if rank != 1]
    for one in found:
        weights = one["weights"].values() if parts > 1 else one["weights"]
        assert all(bool(t.isfinite().all()) for t in weights)
    assert len({one["steps"] for one in found}) == 1
    assert found[-1]["first"] > 0, "it does not begin at the first step"
    assert [one["workers"] for one in found] == [2] * len(found)
