"""Checks that several settings share; each names the setting that it refuses."""

from __future__ import annotations

import math
from typing import Any, get_args

from hocket.data.partition import Last
from hocket.errors import SettingError, nearest


def check_count(name: str, value: Any) -> None:
    """Refuse what is not a whole number of at least 1.

    >>> check_count("epochs", 0)
    Traceback (most recent call last):
    hocket.errors.SettingError: epochs=0: it must be a whole number of at least 1.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingError(f"<{name}>: it must be a whole number of at least 1.", **{name: value})


def check_max_steps(value: Any) -> None:
    """Refuse a training of no step."""
    if value is not None and value < 1:
        raise SettingError("<max_steps>: it must be a whole number of at least 1, or left out.", max_steps=value)


def check_warmup(epochs: float) -> None:
    """Refuse a warm-up that is no number of epochs."""
    if not 0 <= epochs < math.inf:
        raise SettingError("<warmup>: the warm-up is a number of epochs, 0 for none.", warmup=epochs)


def check_last(last: str) -> None:
    """Refuse a rule for an epoch's incomplete round that there is not."""
    if last not in get_args(Last):
        hint = nearest(str(last), get_args(Last))
        raise SettingError(f"<last>: the last round of an epoch is dealt out as even or dropped (drop){hint}.", last=last)
