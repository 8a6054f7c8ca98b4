"""Real workers made slower on purpose, for experiments: one that takes ``factor`` times as long sleeps the rest of the time.

It sleeps before its gradients are exchanged, as if computing them had taken so long.
"""

from __future__ import annotations

import time


class Throttle:
    """Call :meth:`begin` when a step's computing begins and :meth:`end` when it has ended, or :meth:`between` in its midst."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self._begun = 0.0
        self._spent = 0.0
        self._rest = 0.0

    def begin(self) -> None:
        """Computing begins."""
        self._begun = time.perf_counter()

    def end(self) -> None:
        """Computing has ended: sleep for the rest of ``factor`` times its seconds."""
        if self.factor > 1:
            time.sleep((self.factor - 1) * (time.perf_counter() - self._begun))

    def between(self) -> None:
        """The forward pass has ended and exchanges begin in the backward pass: sleep now, for as long as the last backward took."""
        if self.factor > 1:
            self._spent = time.perf_counter() - self._begun
            time.sleep((self.factor - 1) * (self._spent + (self._rest or 2 * self._spent)))
            self._begun = time.perf_counter()

    def computed(self, at: float) -> None:
        """The backward pass had ended at that moment of ``time.perf_counter``."""
        self._rest = max(at - self._begun, 0.0)
