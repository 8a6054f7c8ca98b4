"""Learning-rate schedules as multiples of the base rate, with a warm-up; scaling of the rate for large batches (Goyal 2017)."""

from __future__ import annotations

import math
from collections.abc import Callable

from hocket.errors import SettingError, nearest

SCHEDULES = ("constant", "cosine", "linear", "step")
SCALINGS = ("none", "linear", "sqrt")


def scaling(rule: str | bool) -> str:
    """The name of a rule; True and False, which older records have, are ``linear`` and ``none``."""
    rule = {True: "linear", False: "none"}[rule] if isinstance(rule, bool) else rule
    if rule not in SCALINGS:
        hint = nearest(str(rule), SCALINGS)
        raise SettingError(f"<scale_lr>: there is no such rule{hint or '.'} Use one of {', '.join(SCALINGS)}.", scale_lr=rule)
    return rule


def lr_scale(rule: str | bool, times: float) -> float:
    """The factor of the rate where the global batch is ``times`` as large.

    >>> [lr_scale(rule, 16) for rule in SCALINGS]
    [1.0, 16.0, 4.0]
    """
    return {"none": 1.0, "linear": float(times), "sqrt": math.sqrt(times)}[scaling(rule)]


def scaled_lr(lr: float, workers: int, rule: str = "linear") -> float:
    """The rate for ``workers`` workers, given the one that suits a single worker's mini-batch.

    ``linear`` multiplies it by their number (Goyal 2017, for SGD), ``sqrt`` by its square root, which keeps the noise of an update
    (usual for Adam and LAMB). Neither works without a warm-up where there are many.

    >>> scaled_lr(0.1, 64), scaled_lr(0.001, 64, "sqrt")
    (6.4, 0.008)
    """
    return lr * lr_scale(rule, workers)


def warmup_start(rule: str | bool, workers: int) -> float:
    """The share of the scaled rate that is one worker's own: where the warm-up starts; 0 where nothing is scaled."""
    return 0.0 if scaling(rule) == "none" else 1 / lr_scale(rule, workers)


def factor(name: str, steps: int, warmup: int = 0, start: float = 0.0) -> Callable[[int], float]:
    """The rate at step ``t`` (from 0) of ``steps`` as a multiple of the base rate.

    The warm-up rises evenly to 1, from ``start``: a scaled rate starts as the one of a single worker (Goyal 2017).
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
            return start + (1 - start) * (step + 1) / warmup
        done = min(1.0, (step - warmup) / after)
        if name == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        if name == "linear":
            return 1 - done
        if name == "step":
            return 1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01
        return 1.0

    return at
