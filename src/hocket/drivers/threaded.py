"""A driver that serves its program from a thread of its own, so that others are answered while the main thread computes.

The thread owns all links and timers. The main thread calls methods of the program; what these want done goes through a queue to the
thread. Both hold the lock while the program handles an event, so events are recorded in the order in which they were handled.

An error that a message or a timer leads to ends the thread, and is raised by the main thread's next call.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import zmq

from hocket.drivers.sockets import SocketDriver
from hocket.errors import HocketError
from hocket.programs.base import Effect, Effects

_WAIT_S = 0.1
"""The seconds between two checks, while waiting, whether the thread has failed; an interruption takes no longer."""
_TURN_S = 0.5


class ThreadedDriver(SocketDriver):
    """Serves after :meth:`start`; ``call`` and ``begin`` are for one other thread."""

    waits_for_more = True  # for the main thread

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._changed = threading.Condition(threading.RLock())
        self.error: BaseException | None = None
        """What ended the thread."""
        self._wanted: deque[Effect] = deque()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._wake_from, self._wake_to = os.pipe()
        os.set_blocking(self._wake_from, False)
        os.set_blocking(self._wake_to, False)
        self._poller.register(self._wake_from, zmq.POLLIN)

    # --- for the main thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve from now on."""
        with self.lock:
            if not self._ended.is_set():
                self._thread = threading.Thread(target=self._serve, name="hocket-service", daemon=True)
                self._thread.start()

    def call(self, method: Callable[..., Effects], *arguments: Any, **named: Any) -> None:
        """Call a method of the program with these arguments and the time, and wait until the program is not busy any more."""
        self.run_until(self._idle)  # a call that was interrupted
        self.begin(method, *arguments, **named)
        self.run_until(self._idle)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition``, which the thread brings about, holds."""
        with self._changed:
            while self.error is not None or not condition():
                if self.error is not None:
                    raise self.error
                if self._ended.is_set():
                    raise HocketError("The links of this worker are closed.")
                self._changed.wait(_WAIT_S)

    def close(self, linger_s: float = 1.0, gone: Collection[int] = ()) -> None:
        """End the thread once it has sent what was wanted, and close the links."""
        with self.lock:
            if self._ended.is_set():
                return
            self._ended.set()
            self._wake()
        if self._thread is not None:
            self._thread.join()
        if self.error is None:
            self._do_wanted()
        super().close(linger_s, gone)
        os.close(self._wake_from)
        os.close(self._wake_to)

    @property
    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """The program's lock; an error of the service thread is stored before its release: the main thread may wait for it."""
        with self._changed:
            try:
                yield
            except BaseException as error:
                if self.serving:
                    self.fail(error)
                raise

    def fail(self, error: BaseException) -> None:
        """Keep an error that was raised in the thread; the main thread raises it."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    # --- for the thread ------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._ended.is_set():
                self._do_wanted()
                self.poll(_TURN_S)
                with self._changed:
                    self._changed.notify_all()
        except BaseException as error:
            self.fail(error)

    def _receive(self, timeout_s: float) -> None:
        super()._receive(timeout_s)
        with contextlib.suppress(BlockingIOError):  # all is read
            while os.read(self._wake_from, 4096):
                pass

    # --- effects -------------------------------------------------------------------------------------------------------------

    def carry_out(self, effects: Effects) -> None:
        """Do what the program wants, in its order; the main thread leaves it to the service thread."""
        with self.lock:
            self._wanted += effects
            if self.serving:
                self._do_wanted()
            elif effects:
                self._wake()

    @property
    def serving(self) -> bool:
        """Whether the caller is the service thread."""
        return threading.current_thread() is self._thread

    def _do_wanted(self) -> None:
        with self.lock:
            effects = list(self._wanted)
            self._wanted.clear()
            super().carry_out(effects)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is woken already
            os.write(self._wake_to, b".")
