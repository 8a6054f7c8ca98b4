"""How supervising processes and workers end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


def quit_at_once(code: int) -> None:
    """Leave without exit handlers: threads of links and peers that are gone must not hold a process up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP (a closed terminal) count as Ctrl-C, in the main thread: no process may be left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What is ignored stays so: nohup asks for it.
    polite = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]

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
