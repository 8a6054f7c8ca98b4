"""A model that does not fit the room for data of one process trains when it is split over four with as much room each.

The room is what a process may take beside PyTorch's own libraries, so the test says the same for CPU and CUDA builds of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from process.launch import ENVIRON, free_port

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(280)]

MIB, WIDTH, LAYERS, STEPS = 420, 2048, 11, 2
"""160 MiB of weights; with gradients and momentum 480 MiB."""


def run(processes: int, mesh: str) -> list[tuple[int, dict[str, Any]]]:
    """The exit code and the report of each process."""
    command = [sys.executable, str(Path(__file__).with_name("limited_worker.py")), *map(str, (MIB, mesh, WIDTH, LAYERS, STEPS))]
    environ = {**ENVIRON, "MALLOC_ARENA_MAX": "1"}
    if processes > 1:
        environ |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    try:
        for rank in range(processes):
            own = environ | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {})
            started.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        found = []
        for process in started:
            output, errors = process.communicate(timeout=240)
            assert output, errors
            found.append((process.returncode, json.loads(output.splitlines()[-1])))
        return found
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_what_dies_on_one_process_trains_on_four() -> None:
    [(code, alone)] = run(1, "data=1")
    assert code == 3
    assert "memory" in alone["error"]
    assert len(alone["losses"]) < STEPS
    everyone = run(4, "pipeline=2,tensor=2")
    assert [code for code, _ in everyone] == [0] * 4, everyone
    for _, report in everyone:
        assert report["peak"] <= MIB
        assert report["losses"] == everyone[0][1]["losses"]
        assert report["losses"][-1] < report["losses"][0]
