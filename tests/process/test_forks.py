"""What tests start as forks is what interpreters of their own would be."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from process import forks
from process.launch import Nursery

pytestmark = [pytest.mark.process, pytest.mark.timeout(100)]

PROGRAM = """
import atexit, json, os, signal, sys
found = {"parent": os.getppid(), "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0), "cwd": os.getcwd()}
found |= {"arguments": sys.argv, "environ": dict(os.environ), "input": sys.stdin.read()}
found["passed"] = os.read(int(sys.argv[1]), 9).decode()
found["signals"] = [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
print(json.dumps(found))
print("seen", file=sys.stderr)
atexit.register(print, "left")
sys.exit(7)
"""


@contextlib.contextmanager
def forking(nursery: Nursery | None) -> Any:
    undo = None if nursery is None else forks.start_by(nursery.socket)
    try:
        yield
    finally:
        if undo is not None:
            undo()


def run(tmp_path: Path) -> tuple[int, dict[str, Any], str]:
    read, write = os.pipe()
    os.write(write, b"told")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(read)],
            cwd=tmp_path,
            env={"LC_ALL": "C.UTF-8", "OWN": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
            pass_fds=(read,),
        )
        output, _ = process.communicate("given", timeout=60)
    finally:
        signal.signal(signal.SIGHUP, before)
        os.close(read)
        os.close(write)
    lines = output.splitlines()
    return process.returncode, json.loads(next(line for line in lines if line.startswith("{"))), " ".join(sorted(lines)[:2])


def test_a_fork_is_what_an_interpreter_would_be(nursery: Nursery, tmp_path: Path) -> None:
    found = []
    for server in (None, nursery):
        with forking(server):
            found.append(run(tmp_path))
    assert found[0] == found[1]
    code, told, said = found[1]
    assert (code, said) == (7, "left seen")
    assert told["parent"] == os.getpid()
    assert told["group"]
    assert (told["environ"]["OWN"], told["input"], told["passed"]) == ("1", "given", "told")


def test_a_fork_that_is_killed_tells_by_which_signal(nursery: Nursery) -> None:
    with forking(nursery), subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process.poll() is None
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
