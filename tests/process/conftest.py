"""One nursery of worker processes for all tests here, and the command as one of its forks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from process.launch import Hocket, Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def hocket(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Hocket:
    """Runs ``hocket`` with arguments to its end."""

    def run(*arguments: str, cwd: Path | None = None, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp("hocket")
        return nursery.command(list(arguments), folder, cwd or Path.cwd(), environ).ended()

    return run
