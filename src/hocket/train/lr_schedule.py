"""Learning-rate schedules as multiples of the base rate, with a linear warm-up; linear scaling for large batches (Goyal 2017)."""

from __future__ import annotations

import math
from collections.abc import Callable

from hocket.errors import SettingError, nearest

SCHEDULES = ("constant", "cosine", "linear", "step")


def factor(name: str, steps: int, warmup: int = 0) -> Callable[[int], float]:
    """The rate at step ``t`` (from 0) of ``steps`` as a multiple of the base rate.

    ``cosine`` and ``linear`` fall to 0 at the end, ``step`` falls to a tenth at half and to a hundredth at three quarters.

    >>> f = factor("cosine", 100, warmup=10)
    >>> round(f(0), 2), f(9), round(f(55), 2)
    (0.1, 1.0, 0.5)
    """
    if name not in SCHEDULES:
        hint = nearest(name, SCHEDULES)
        raise SettingError(
            f"<lr_schedule>: there is no such schedule{hint or '.'} Use one of {', '.join(SCHEDULES)}.", lr_schedule=name
        )
    after = max(1, steps - warmup)

    def at(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / after)
        if name == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        if name == "linear":
            return 1 - done
        if name == "step":
            return 1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01
        return 1.0

    return at
