"""The thread that runs the exchanges of a process in the order in which they were submitted."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hocket.errors import HocketError, WorkerLost

Explain = Callable[[BaseException], BaseException]
"""Turns the error of a broken connection into one that names the lost worker."""


class Pending:
    """A collective that the backend's threads or streams are still computing."""

    def __init__(self, work: Any, finish: Callable[[], Tensor]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> Tensor:
        """Block until it has ended; the result."""
        self._work.wait()
        return self._finish()


def finished(result: Any) -> Any:
    """``result``, once it is there."""
    return result.wait() if isinstance(result, Pending) else result


def explained(work: Callable[[], Any], explain: Explain) -> Any:
    """The result of ``work``; an error of the backend becomes what ``explain`` makes of it."""
    try:
        return work()
    except (HocketError, WorkerLost):
        raise
    except RuntimeError as error:
        raise explain(error) from error


class Ticket:
    """Waits for work that the exchange thread runs, and raises the error that the work raised there."""

    def __init__(self, explain: Explain) -> None:
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self._explain = explain

    def __call__(self) -> Any:
        self.done.wait()
        return explained(self._finish, self._explain)

    def _finish(self) -> Any:
        if self.error is not None:
            raise self.error
        return finished(self.result)


class ExchangeThread:
    """Runs work strictly in the order of submission; the thread starts with the first work."""

    def __init__(self) -> None:
        self.working = False
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Ticket] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()
        _THREADS.add(self)

    @property
    def current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Callable[[], Any], explain: Explain) -> Ticket:
        """Run ``work`` after everything submitted before it; returns what waits for its result."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hocket-exchange", daemon=True)
            self._thread.start()
        ticket = Ticket(explain)
        self._tickets.add(ticket)
        self._queue.put((work, ticket))
        return ticket

    def close(self, timeout_s: float) -> None:
        """End the thread, or leave it after ``timeout_s``: work in progress may wait for processes that are lost."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=timeout_s)
            self._thread = None
        for ticket in self._tickets:  # a collective that nobody waits for would keep connections open
            if ticket.done.is_set() and isinstance(ticket.result, Pending):
                ticket.result, ticket.error = None, HocketError("The cluster was closed before this exchange was waited for.")

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, ticket = item
            self.working = True
            try:
                ticket.result = work()
            except BaseException as error:
                ticket.error = error
            self.working = False
            ticket.done.set()


_THREADS: weakref.WeakSet[ExchangeThread] = weakref.WeakSet()


@atexit.register
def _exit_at_once() -> None:
    """After an exception, skip the interpreter's shutdown if a thread is inside Gloo: the shutdown would abort the process."""
    if hasattr(sys, "last_value") and any(thread.working for thread in _THREADS):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
