"""Gloo groups that can be aborted: torch has no call for it, but a receive that runs into its timeout closes all connections of its
group, so whatever is under way there fails."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_ABORT = timedelta(milliseconds=1)
_ABORT_TAG = 2**30 + 1
"""Above all tags of messages."""
STANDS = timedelta(hours=2)
"""How long an operation of a group that stands may take: the rendezvous finds members that are lost, and ends it. This is for a
connection that is broken without either side's knowledge. (Collectives have the timeout of their group; a send or a receive needs
to be told when it is waited for.)"""


def abort_group(group: Any, rank: int, size: int) -> None:
    """Make everything fail that is under way in a group, of which this is process ``rank`` of ``size``; from any thread."""
    with contextlib.suppress(RuntimeError):  # it says that its time is up, or that connections are closed already
        group.recv([torch.zeros(1)], (rank + 1) % max(size, 2), _ABORT_TAG).wait(_ABORT)


class LiveGroups:
    """Those of the latest :attr:`generation` whose default group was made."""

    def __init__(self) -> None:
        self.generation = 0
        self._lock = threading.Lock()
        self._groups: list[dist.ProcessGroup] = []

    def begin(self, generation: int) -> None:
        """Before there is anything to abort: from here on only a later generation ends what is under way."""
        with self._lock:
            self.generation = generation

    def add(self, group: dist.ProcessGroup | None) -> None:
        """This one stands: what it does may take as long as it takes."""
        if group is not None and group.size() > 1:
            group._get_backend(torch.device("cpu"))._set_default_timeout(STANDS)
            with self._lock:
                self._groups.append(group)

    def abort(self, before: int | None = None) -> None:
        """Make everything fail that is under way, if the generation is one ``before`` the given one; from any thread."""
        with self._lock:
            for group in self._groups if before is None or self.generation < before else ():
                abort_group(group, group.rank(), group.size())

    def clear(self) -> None:
        with self._lock:
            self._groups.clear()
