"""What processes tell each other outside of all exchanges: short texts by name, through the job's store, from any thread.

No collective is disturbed, and a process that is late or gone holds nobody up for longer than the time given.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_PAUSE_S = 0.005
_STORE_S = 60.0
_made = 0


class Agreement:
    """Texts of ``processes`` processes, of which this is number ``rank``; all of them must make it together.

    >>> Agreement().gather("answer", "42", 1.0)
    ['42']
    """

    shared = False
    """Whether all processes have one folder, so that the first of them looks after it."""
    silent = "has not told"
    """What is said of a process that has said nothing in time."""

    def __init__(self, rank: int = 0, processes: int = 1) -> None:
        global _made
        self.rank, self.processes = rank, processes
        self._told: list[str] = []
        self._store: Any = None
        if processes > 1:
            _made += 1
            store: Any = dist.distributed_c10d._get_default_store()
            store = store.clone()  # a connection of its own: a thread that waits here does not keep others from the store
            store.set_timeout(timedelta(seconds=_STORE_S))
            self._store = dist.PrefixStore(f"hocket/agreement/{_made}", store)

    def announce(self, name: str) -> None:
        """Say ``name``; whoever says it first says it for all."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(name, "")

    def announced(self, name: str) -> bool:
        """Whether a process has said ``name``."""
        try:
            return self._store is not None and bool(self._store.check([name]))
        except RuntimeError:  # whoever hosts the store is gone
            return False

    def gather(self, name: str, text: str, timeout_s: float) -> list[str | None]:
        """What each process says of ``name``, which is asked once; None for one that has said nothing in time."""
        if self._store is None:
            return [text]
        found: list[str | None] = [None] * self.processes
        found[self.rank] = text
        try:
            self._tell(f"{name}/{self.rank}", text)
            deadline, pause = time.monotonic() + timeout_s, _PAUSE_S
            while missing := [rank for rank, said in enumerate(found) if said is None]:
                for rank in missing:
                    if self._store.check([f"{name}/{rank}"]):
                        found[rank] = self._store.get(f"{name}/{rank}").decode()
                if None in found and time.monotonic() > deadline:
                    break
                time.sleep(pause if None in found else 0.0)
                pause = min(2 * pause, 0.25)
        except RuntimeError:  # whoever hosts the store is gone
            pass
        return found

    def _tell(self, key: str, text: str) -> None:
        """Say it, and take back what was said two questions ago: whoever answers one has read the answers to the one before."""
        self._store.set(key, text)
        self._told.append(key)
        if len(self._told) > 2:
            self._store.delete_key(self._told.pop(0))
