"""Where a member of an elastic run stands (:mod:`hocket.cluster.progress`): its exchanges, numbered anew in each generation."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

from hocket.cluster.progress import ELASTIC, RENDEZVOUS, Progress, Wait

_GENERATION = 1 << 32
"""More than the exchanges of a generation."""


class MemberProgress(Progress):
    """Of the process of one member."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges = self.track(ELASTIC, [])
        self._rendezvous = self.track(RENDEZVOUS, [])
        self._rendezvous.longest_s = math.inf  # nobody is late there
        self.reports: Callable[[], list[dict[str, Any]]] = list
        """What the rendezvous has said of late members."""
        self._aside: int | None = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, waits of this thread, which is not the one that trains, are left out."""
        self._aside = threading.get_ident()
        try:
            yield
        finally:
            self._aside = None

    def enter(self, wait: Wait) -> None:
        if threading.get_ident() != self._aside:
            super().enter(wait)

    def leave(self, now: float) -> None:
        if threading.get_ident() != self._aside:
            super().leave(now)

    @contextlib.contextmanager
    def forming(self, generation: int, alike: bool) -> Iterator[None]:
        """Inside, members do not all launch the same; after it they do, where they are ``alike``."""
        self.exchanges.counted = False
        yield
        self.exchanges.counted, self.exchanges.launched = alike, generation * _GENERATION

    def wait_for_rendezvous(self, work: Callable[[], Any]) -> None:
        """Call ``work``, which waits for the rendezvous, or as a newcomer for the end of the others' step."""
        self._rendezvous.wait(work, 0, "the rendezvous")
