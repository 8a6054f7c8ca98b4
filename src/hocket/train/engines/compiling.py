"""A line of progress while a model is compiled."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 5.0


@contextmanager
def report_compiling(compiles: bool) -> Iterator[None]:
    """Print on standard error that the first step is being compiled, once that has taken some seconds, and how long it took."""
    if not compiles:
        yield
        return
    begun, reported = time.perf_counter(), threading.Event()

    def tell() -> None:
        reported.set()
        print("Compiling the model for all workers; later runs find most of it in torch's cache.", file=sys.stderr, flush=True)

    timer = threading.Timer(PATIENCE_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    if reported.is_set():
        print(f"Compiled in {time.perf_counter() - begun:.0f} s.", file=sys.stderr, flush=True)
