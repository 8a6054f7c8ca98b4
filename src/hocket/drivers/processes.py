"""The supervisor of all processes that talk by messages: starts processes by role, reports which have ended, ends all.

Unlike torch's launcher it does not end all processes when one dies; the run that it serves decides. Whatever happens, also when
this process is interrupted (Ctrl-C, SIGTERM, SIGHUP), no process and no folder is left behind.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from hocket.errors import HocketError

MAX_RESTARTS = 10
"""In a row, of processes of a role that were younger than ``YOUNG_S``."""
YOUNG_S = 60.0
ENDED = 128 + signal.SIGTERM
"""The exit code of a process that was told to leave and could not save what it had to."""
SHARD = "shard"
"""The role of a parameter server's shards."""
_GRACE_S = 5.0


@dataclass(frozen=True)
class Role:
    """Processes of one kind, numbered from 0."""

    name: str
    count: int
    start: Callable[[int, int], Any]
    """Starts the process of a number, which has the methods of ``subprocess.Popen``; the second argument is how many processes had
    that number before."""
    grace_s: float = _GRACE_S
    """How long a process has between SIGTERM and SIGKILL; 0: it is killed at once."""
    ends_with_input: bool = False
    """Instead of SIGTERM its input is closed; it sends what it still has to send, and ends."""


class Supervisor:
    """The processes of ``roles``; use it in a ``with`` statement."""

    def __init__(self, roles: Sequence[Role], max_restarts: int = MAX_RESTARTS) -> None:
        self.roles = {role.name: role for role in roles}
        self.max_restarts = max_restarts
        self.restarts: Counter[str] = Counter()
        """How often processes of each role were started again."""
        self.incarnations: Counter[tuple[str, int]] = Counter()
        self._young: Counter[str] = Counter()
        self._begun: dict[tuple[str, int], float] = {}
        self._processes: dict[str, dict[int, Any]] = {role.name: {} for role in roles}
        self._folder: Path | None = None
        self._signals = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._signals.enter_context(interruptible())
        return self

    def __exit__(self, *_: object) -> None:
        with self._signals:
            self.shutdown()

    @property
    def folder(self) -> Path:
        """A folder of this run; it is removed at the end."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="hocket-"))
        return self._folder

    def start(self, role: str) -> None:
        for number in range(self.roles[role].count):
            self._start(role, number)

    def restart(self, role: str, number: int) -> None:
        """Start another process in the place of one that has ended."""
        self.restarts[role] += 1
        young = time.monotonic() - self._begun[role, number] < YOUNG_S
        self._young[role] = self._young[role] + 1 if young else 0  # a long run may lose many, one that cannot go on loses all
        if self._young[role] > self.max_restarts:
            raise HocketError(
                f"{role.capitalize()} {number} died, after {self.max_restarts} restarts of {role}s; see their own output above."
            )
        close(self.process(role, number))
        self.incarnations[role, number] += 1
        self._start(role, number)

    def process(self, role: str, number: int) -> Any:
        return self._processes[role][number]

    def codes(self, role: str) -> dict[int, int | None]:
        """The exit codes of a role's processes; None: it runs."""
        return {number: process.poll() for number, process in self._processes[role].items()}

    def running(self, role: str) -> dict[int, Any]:
        """The processes that have not ended."""
        return {number: process for number, process in self._processes[role].items() if process.poll() is None}

    def ended(self, role: str) -> dict[int, int]:
        """The exit codes of those that have ended."""
        return {number: code for number, code in self.codes(role).items() if code is not None}

    def shutdown(self, leave_s: float = 0.0) -> None:
        """End all processes; those that end by themselves have ``leave_s`` for it."""
        processes = [(self.roles[name], process) for name, some in self._processes.items() for process in some.values()]
        deadline = time.monotonic() + leave_s
        for role, process in processes:
            if not _ends(process, deadline - time.monotonic()):
                if role.ends_with_input:
                    close(process)
                elif role.grace_s > 0:
                    process.terminate()
                else:
                    process.kill()
        for role, process in processes:
            if not _ends(process, role.grace_s):
                process.kill()
            process.wait()
            close(process)
        self._processes = {name: {} for name in self.roles}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, role: str, number: int) -> None:
        self._begun[role, number] = time.monotonic()
        self._processes[role][number] = self.roles[role].start(number, self.incarnations[role, number])


def _ends(process: Any, timeout_s: float) -> bool:
    if process.poll() is None and timeout_s > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    return process.poll() is not None


def close(process: Any) -> None:
    """Close the pipes to and from a process."""
    for pipe in (getattr(process, "stdin", None), getattr(process, "stdout", None)):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def how_ended(code: int) -> str:
    """An exit code in words.

    >>> how_ended(-9), how_ended(3)
    ('was ended by SIGKILL', 'ended with exit code 3')
    """
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def reported_error(process: Any) -> dict[str, str] | None:
    """The error that a process printed as a line of JSON before it ended: ``error``, and the ``kind`` of exception."""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "error" in record:
            return {"kind": "HocketError", **record}
    return None


def say(text: str) -> None:
    """Print one line for the user."""
    print(f"hocket: {text}.", file=sys.stderr, flush=True)


def release_memory() -> None:
    """Give back what is not needed any more: errors keep all that their tracebacks reach, in cycles, and the C library keeps what
    threads that have ended had allocated (tens of megabytes each)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)


def quit_at_once(code: int) -> None:
    """Leave without exit handlers: threads of links and peers that are gone must not hold a process up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def quit_in_order(code: int) -> None:
    """Leave as a program does that has come to its end, but without taking the interpreter down: a thread of Gloo that lets go of a
    tensor meanwhile would abort the process ("terminate called without an active exception")."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    quit_at_once(code)


@contextlib.contextmanager
def interruptible(*more: signal.Signals) -> Iterator[None]:
    """SIGTERM, SIGHUP (a closed terminal) and ``more`` count as Ctrl-C, in the main thread: no process may be left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What is ignored stays so: nohup asks for it.
    polite = [n for n in (signal.SIGTERM, signal.SIGHUP, *more) if signal.getsignal(n) is not signal.SIG_IGN]

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        for each in polite:
            signal.signal(each, signal.SIG_IGN)  # once is enough: a second one (timeout sends two) must not break the cleaning up
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in polite}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
