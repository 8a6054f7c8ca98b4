"""What Hocket raises. Every message is one sentence: what is wrong, what was got, what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HocketError(ValueError):
    """A mistake that the user can mend; the command line prints it without a traceback."""


class WorkerLost(RuntimeError):
    """Another worker died or stopped answering; ``worker`` says which one, -1 when it could not be told."""

    def __init__(self, message: str, worker: int = -1) -> None:
        super().__init__(message)
        self.worker = worker


class NonFiniteGradient(RuntimeError):
    """A gradient held NaN or Inf under ``nonfinite="raise"``; the message names the parameters."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`` — did you mean 'x'?`` for the known word nearest to ``word``, or an empty string.

    >>> nearest("gosip", ["gossip", "allreduce"])
    " — did you mean 'gossip'?"
    """
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" — did you mean '{found[0]}'?" if found else ""
