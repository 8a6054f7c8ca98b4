"""Gloo's threads end before the interpreter does: one that still holds a tensor would abort the process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from process.launch import Nursery

SCRIPT = """
import atexit, sys, weakref

@atexit.register  # before all others, so it runs after them
def check():
    print("group", "left" if world() is not None else "gone")

import torch
import torch.distributed as dist
import hocket

hocket.init()
world = weakref.ref(dist.group.WORLD)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
job = hocket.parallelize(model, optimizer, sys.argv[1])
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["bulk", "local(2) + gossip + topk(0.5)"])
def test_the_group_is_gone_before_the_interpreter_is(strategy: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, strategy],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for worker in workers:
        said, errors = worker.communicate(timeout=100)
        assert worker.returncode == 0, errors
        assert "group gone" in said, said


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["local(2)", "bulk + server", "bulk + server(role=sum)", "async + server", "async + gossip"])
def test_an_interpreter_that_takes_itself_apart_meets_no_thread_of_ours(nursery: Nursery, tmp_path: Path, strategy: str) -> None:
    """Forks of the nursery leave without that, but for these."""
    command = {"arguments": ["-c", SCRIPT, strategy], "cwd": str(tmp_path)}
    group = nursery.start("process.command:python", 2, tmp_path, {"WHOLE_END": "1"}, **command)
    assert group.wait(100) == [0, 0], group.said()
    assert "Error" not in group.said()
