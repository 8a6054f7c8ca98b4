"""The thread that runs the exchanges of a process in the order in which they were submitted."""

import atexit
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
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
        if self._work is None:
            raise HocketError("The cluster was closed before this exchange was waited for.")
        self._work.wait()
        return self._finish()

    def block(self) -> None:
        """Block until it has ended; the result is left to :meth:`wait`."""
        if self._work is not None:
            self._work.wait()

    def drop(self) -> None:
        """Let go of it: a collective that nobody waits for would keep connections open."""
        self._work = self._finish = None  # type: ignore[assignment]


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
        explanation = explain(error)
        if explanation is error:  # its own cause would be a cycle, which keeps all that the traceback reaches
            raise
        raise explanation from error


class ExchangeThread:
    """Runs work strictly in the order of submission; the thread starts with the first work."""

    def __init__(self, result: Callable[[Future[Any]], Any] = Future.result) -> None:
        """``result`` waits for what the thread does."""
        self.working = False
        self._result = result
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: weakref.WeakSet[Pending] = weakref.WeakSet()
        _THREADS.add(self)

    @property
    def current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Callable[[], Any], explain: Explain) -> Callable[[], Any]:
        """Run ``work`` after everything submitted before it; returns what waits for its result, and raises the work's error."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hocket-exchange", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._queue.put((work, future))
        return lambda: explained(lambda: finished(self._result(future)), explain)

    def close(self, timeout_s: float) -> None:
        """End the thread, or leave it after ``timeout_s``: work in progress may wait for processes that are lost."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=timeout_s)
            self._thread = None
        self._drop()

    def _drop(self) -> None:
        for pending in list(self._pending):
            pending.drop()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, future = item
            self.working = True
            try:
                result = work()
            except BaseException as error:
                self.working = False
                future.set_exception(error)
                continue
            if isinstance(result, Pending):
                self._pending.add(result)
            self.working = False
            future.set_result(result)


_THREADS: weakref.WeakSet[ExchangeThread] = weakref.WeakSet()


@atexit.register
def _exit_at_once() -> None:
    """After an exception, skip the interpreter's shutdown if a thread is inside Gloo: the shutdown would abort the process."""
    if hasattr(sys, "last_value") and any(thread.working for thread in _THREADS):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
