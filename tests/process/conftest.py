"""The command, and whatever else a test starts, as forks of the nursery."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from process import forks
from process.launch import Hocket, Nursery


@pytest.fixture
def forked(nursery: Nursery) -> Iterator[None]:
    """What the test itself starts as ``python …`` is a fork of the nursery, too."""
    undo = forks.start_by(nursery.socket)
    yield
    undo()


@pytest.fixture
def hocket(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Hocket:
    """Runs ``hocket`` with arguments to its end."""

    def run(*arguments: str, cwd: Path | None = None, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp("hocket")
        return nursery.command(list(arguments), folder, cwd or Path.cwd(), environ).ended()

    return run
