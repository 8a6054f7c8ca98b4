"""How the command and its workers leave."""

from __future__ import annotations

import os
import signal
import sys
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
def leaving() -> Iterator[None]:
    """Being ended politely, or losing the terminal, counts as Ctrl-C: no worker may be left behind."""
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
