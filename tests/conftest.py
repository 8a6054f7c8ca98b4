"""What all tests share: one thread (equal bits, shared cores), one seed, Ctrl-C that is heard, and hypothesis without deadlines."""

from __future__ import annotations

import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# A shell that starts the tests in the background has Ctrl-C ignored by them and by all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("hocket", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hocket")


@pytest.fixture(autouse=True)
def seed() -> None:
    """What a test draws is the same in every run, whichever tests ran before it."""
    torch.manual_seed(0)
