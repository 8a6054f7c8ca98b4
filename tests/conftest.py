"""What all tests share: one thread (equal bits, shared cores), one seed, Ctrl-C that is heard, no deadlines, a nursery."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # where Triton is installed; read when kernels are first imported

from process.launch import Nursery

torch.set_num_threads(1)
# A shell that starts the tests in the background has Ctrl-C ignored by them and by all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("hocket", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hocket")


@pytest.fixture(autouse=True)
def seed() -> None:
    """What a test draws is the same in every run, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where worker processes, and commands, are forked from."""
    nursery = Nursery()
    yield nursery
    nursery.close()
