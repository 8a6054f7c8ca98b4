"""Loops as forks of the nursery."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loops.harness import Loop, Start, start_loop
from process.launch import Group, Nursery


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Start:
    def run(function: Callable[..., Any], processes: int = 2, **arguments: Any) -> Group:
        return start_loop(nursery, tmp_path, function, processes, **arguments)

    return run


@pytest.fixture
def loop(start: Start) -> Loop:
    def run(function: Callable[..., Any], processes: int = 2, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
        group = start(function, processes, **arguments)
        assert group.wait(timeout_s, together=True) == [0] * processes, group.said()
        return group.results()

    return run
