"""A listener that is killed and started again on its port is found again by its callers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hocket.transport import Caller, Envelope, Kind
from process.launch import ENVIRON

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

JOB = b"a job of 16 byte"
ECHO = """
import sys
from hocket.transport import Envelope, Kind, Listener
listener = Listener(sys.argv[1], sys.argv[2].encode())
print(listener.address, flush=True)
while True:
    if (found := listener.receive(60)) is None:
        raise SystemExit("nobody calls")
    listener.send(found[0], Envelope(Kind.REPLY, number=found[1].number, tensors=found[1].tensors))
"""


@contextmanager
def echo(address: str) -> Iterator[str]:
    """A process that sends back what it receives; the address it listens on. It ends by SIGKILL."""
    command = [sys.executable, "-c", ECHO, address, JOB.decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRON, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def test_a_killed_listener_that_comes_back_is_found_again() -> None:
    with echo("tcp://127.0.0.1:0") as address:
        caller = Caller(address, JOB)
        for number in range(5):
            assert caller.send(Envelope(Kind.PUSH, number=number, tensors=(torch.full((100_000,), number),)), 60)
            answer = caller.receive(60)
            assert answer is not None
            assert answer.number == number
    with caller, echo(address):
        deadline, number, answer = time.monotonic() + 60, 5, None
        while answer is None:  # what was under way when the listener died may be lost: ask again
            assert time.monotonic() < deadline, "the caller did not come back"
            assert caller.send(Envelope(Kind.PUSH, number=number, tensors=(torch.full((100_000,), number),)), 60)
            answer, number = caller.receive(0.5), number + 1
        assert answer.number >= 5
        assert torch.equal(answer.tensors[0], torch.full((100_000,), answer.number))
