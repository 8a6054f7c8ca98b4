"""Gloo groups that can be aborted: torch has no call for it, but a receive that runs into its timeout closes all connections of its
group, so whatever is under way there fails.

Except for a message of which Gloo has handed a part to the system, or tried to: when it closes a connection, it does not tell
whoever waits for the rest (``Pair::signalException`` in gloo/transport/tcp/pair.cc). So waits for a group that was aborted are
given up after a while.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.cluster.exchange_thread import Pending

_ABORT = timedelta(milliseconds=1)
_ABORT_TAG = 2**30 + 1
"""Above all tags of messages."""
STANDS = timedelta(hours=2)
"""How long an operation of a group that stands may take: the rendezvous finds members that are lost, and ends it. This is for a
connection that is broken without either side's knowledge. (Collectives have the timeout of their group; a send or a receive needs
to be told when it is waited for.)"""

_LOOK_S, _LOOKS = 0.5, 10
"""So many looks at what was aborted; looks rather than seconds, since this process may have been stopped meanwhile."""


def abort_group(group: Any, rank: int, size: int) -> None:
    """Make everything fail that is under way in a group, of which this is process ``rank`` of ``size``; from any thread."""
    with contextlib.suppress(RuntimeError):  # it says that its time is up, or that connections are closed already
        group.recv([torch.zeros(1)], (rank + 1) % max(size, 2), _ABORT_TAG).wait(_ABORT)


class LiveGroups:
    """Those of the latest :attr:`generation` whose default group was made."""

    def __init__(self) -> None:
        self.generation = 0
        self.aborted = False
        self.given_up = False
        """Something that was aborted has not ended."""
        self._lock = threading.Lock()
        self._groups: list[dist.ProcessGroup] = []
        self._left = list[dist.Work]()

    def begin(self, generation: int) -> None:
        """Before there is anything to abort: from here on only a later generation ends what is under way."""
        with self._lock:
            self.generation, self.aborted, self.given_up = generation, False, False

    def add(self, group: dist.ProcessGroup | None) -> None:
        """This one stands: what it does may take as long as it takes."""
        if group is not None and group.size() > 1:
            group._get_backend(torch.device("cpu"))._set_default_timeout(STANDS)
            with self._lock:
                self._groups.append(group)

    def abort(self, before: int | None = None) -> None:
        """Make everything fail that is under way, if the generation is one ``before`` the given one; from any thread."""
        with self._lock:
            if before is None or self.generation < before:
                self.aborted = True
                for group in self._groups:
                    abort_group(group, group.rank(), group.size())

    def clear(self) -> None:
        """Let go of the groups. One in which something has not ended is kept until it has: its end would wait for that."""
        with self._lock:
            if self._left:
                kept = list(self._groups), self._left
                threading.Thread(target=_keep, args=kept, name="hocket-left-group", daemon=True).start()
            self._groups.clear()
            self._left = []

    # --- waits ---------------------------------------------------------------------------------------------------------------

    def pending(self, work: dist.Work, finish: Callable[[], Tensor]) -> Pending:
        """A collective of one of these groups."""
        return Pending(_WaitedFor(work, self), finish)

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective; RuntimeError where it failed, or was aborted and does not end."""
        try:
            self._wait(lambda: _ended(work, _LOOK_S))
        except _GivenUp:
            self._left.append(work)
            raise

    def result(self, future: Future[Any]) -> Any:
        """The result of what another thread does with these groups; RuntimeError where they were aborted and it does not end."""
        self._wait(lambda: _done(future, _LOOK_S))
        return future.result()

    def _wait(self, ended: Callable[[], bool]) -> None:
        looks = 0
        while not ended():
            looks = looks + 1 if self.aborted else 0
            if looks == _LOOKS:
                self.given_up = True
                raise _GivenUp("An operation of a generation that is over does not end.")


class _WaitedFor(NamedTuple):
    """A collective that is waited for by way of its groups."""

    work: dist.Work
    groups: LiveGroups

    def wait(self) -> None:
        self.groups.wait(self.work)


class _GivenUp(RuntimeError):
    pass


def _ended(work: dist.Work, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:  # also where the time is up
        if not work.is_completed():
            return False
        work.wait()
    return True


def _done(future: Future[Any], seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        future.exception(seconds)
    return future.done()


def _keep(groups: list[dist.ProcessGroup], left: list[dist.Work]) -> None:
    for work in left:
        with contextlib.suppress(RuntimeError):
            work.wait()
