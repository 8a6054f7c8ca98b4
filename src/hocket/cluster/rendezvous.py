"""What all workers must enter together, beside the steps: nobody begins its exchange before all have come.

A worker that came alone would wait for ever, or its exchange would meet another one of the others.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

from hocket.errors import HocketError

_PAUSE_S = 0.002


def wait_for_all(
    what: str, store: Any, key: str, rank: int, ranks: list[int], left: Callable[[int], bool], warn_s: float, timeout_s: float
) -> None:
    """Wait until all of ``ranks`` have called this with ``key``, which is never used again.

    Warns after ``warn_s``; a refusal where one has ``left`` without it or has come to something else, or after ``timeout_s``.
    """
    store.set(f"{key}/{rank}", what)
    begun, warned = time.monotonic(), False
    missing = [other for other in ranks if other != rank]
    while missing := [other for other in missing if not store.check([f"{key}/{other}"])]:
        waited = time.monotonic() - begun
        gone = next((other for other in missing if left(other) and not store.check([f"{key}/{other}"])), None)
        rule = f"all workers must enter {what} together, so call it outside of `if rank == 0:`."
        if gone is not None:
            raise HocketError(f"Process {gone} has ended without {what}, in which process {rank} waits: {rule}")
        if waited > timeout_s:
            raise HocketError(f"Process {missing[0]} has not come to {what} for {waited:.0f} s: {rule}")
        if waited > warn_s and not warned:
            warned = True
            warnings.warn(f"Process {missing[0]} has not come to {what} for {waited:.0f} s: {rule}", stacklevel=2)
        time.sleep(_PAUSE_S if waited < 1 else 0.1)
    for other in ranks:
        if (theirs := store.get(f"{key}/{other}").decode()) != what:
            raise HocketError(f"Process {other} is in {theirs}, but process {rank} in {what}: all workers must enter the same.")
