"""What Hocket raises. Every message is one sentence: what is wrong, what was got, what to do instead."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard


class HocketError(ValueError):
    """A mistake that the user can mend; the command line prints it without a traceback."""


class SettingError(HocketError):
    """An impossible setting, named as the caller names it: a field in Python, an option on the command line.

    ``text`` has settings as ``<lr>``, or ``<mesh:pipeline=2>`` with a value to use; ``values`` are the values that the caller gave.

    >>> error = SettingError("<slowdown>: virtual workers have a clock only with <cluster:1gbit>, for example.", slowdown="1,4")
    >>> str(error)
    'slowdown=1,4: virtual workers have a clock only with cluster=1gbit, for example.'
    >>> error.written(lambda name, value: f"--{name} {value}")
    '--slowdown 1,4: virtual workers have a clock only with --cluster 1gbit, for example.'
    """

    def __init__(self, text: str, **values: Any) -> None:
        self.text, self.values = text, values
        super().__init__(self.written(lambda name, value: f"{name}={'' if value is None else value}"))

    def written(self, name_of: Callable[[str, Any], str]) -> str:
        """The sentence with every setting written by ``name_of(name, value)``; the value is None where only the name is meant."""

        def one(found: re.Match[str]) -> str:
            return name_of(found[1], self.values.get(found[1]) if found[2] is None else found[2])

        return re.sub(r"<([a-z_]+)(?::([^<>]*))?>", one, self.text)


class WorkerLost(RuntimeError):
    """Another worker died or stopped answering; ``worker`` is its number, -1 if the number is not known."""

    def __init__(self, message: str, worker: int = -1) -> None:
        super().__init__(message)
        self.worker = worker


class Interrupted(Exception):
    """The user interrupted the study; the message says how many runs have finished."""


class NonFiniteGradient(RuntimeError):
    """A gradient held NaN or Inf under ``nonfinite="raise"``; the message names the parameters."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`` — did you mean 'x'?`` for the known word nearest to ``word``, or an empty string.

    >>> nearest("gosip", ["gossip", "allreduce"]), nearest("asink", ["sign", "async"])
    (" — did you mean 'gossip'?", " — did you mean 'async'?")
    """
    found = difflib.get_close_matches(word, list(known), n=5, cutoff=0.5)
    return f" — did you mean '{min(found, key=lambda other: _edits(word, other))}'?" if found else ""


def _edits(word: str, other: str) -> int:
    """The number of letters to insert, delete or replace (Levenshtein's distance)."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(word, 1):
        before, row = row, [i]
        for j, b in enumerate(other, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (a != b)))
    return row[-1]


def is_whole(value: object, least: float = 1, most: float = math.inf) -> bool:
    """Whether ``value`` is a whole number from ``least`` to ``most``; True and False are none.

    >>> is_whole(3), is_whole(3, most=2), is_whole(3.0), is_whole(True)
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def bytes_text(count: float) -> str:
    """A number of bytes in the unit that leaves digits to read.

    >>> bytes_text(1640), bytes_text(25_000_000), bytes_text(3.2e9)
    ('1.6 kB', '25.0 MB', '3.2 GB')
    """
    unit, scale = next((u, s) for u, s in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)) if count < 999.95 * s or u == "GB")
    return f"{count / scale:,.1f} {unit}"
