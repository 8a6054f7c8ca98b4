"""One nursery of worker processes for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from process.launch import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()
