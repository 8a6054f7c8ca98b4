"""What an advice is for: a goal in words, such as ``within 1 point``, ``70% soonest`` or ``cheapest, fits 16GB``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hocket.errors import HocketError

_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_FORMS = {
    "within": re.compile(rf"within {_NUMBER} ?(?:points?|percent|%)(?: of bulk)?"),
    "accuracy": re.compile(rf"{_NUMBER} ?% ?(?:accuracy)? ?(?:soonest)?"),
    "loss": re.compile(rf"loss {_NUMBER} ?(?:soonest)?"),
    "cheapest": re.compile("cheapest"),
    "soonest": re.compile("soonest|fastest"),
    "memory": re.compile(rf"fits? (?:in )?{_NUMBER} ?(M|G|T)i?B", re.IGNORECASE),
}


@dataclass(frozen=True)
class Goal:
    """The strategy that ends soonest, or costs least, among those that are good enough and fit.

    >>> Goal.parse("cheapest, within 0.5 points, fits 16GB")
    Goal(within=0.5, accuracy=None, loss=None, cheapest=True, memory_bytes=16000000000.0)
    >>> str(Goal.parse("70% accuracy soonest"))
    'soonest to 70 % accuracy'
    """

    within: float = 1.0
    """Points of accuracy, or percent of the test loss, that a strategy may lose against bulk."""
    accuracy: float | None = None
    """Or the accuracy to reach, a share."""
    loss: float | None = None
    """Or the test loss to reach."""
    cheapest: bool = False
    memory_bytes: float | None = None

    @classmethod
    def parse(cls, text: str) -> Goal:
        """The goal that ``text`` says, parts separated by commas."""
        found: dict[str, float | bool] = {}
        for part in (p.strip() for p in text.split(",")):
            name, match = next(((n, m) for n, form in _FORMS.items() if (m := form.fullmatch(part))), (None, None))
            if name is None or match is None:
                raise HocketError(
                    f"The goal '{part}' is not known; use 'within 1 point' (of bulk), '70% soonest', 'loss 1.5 soonest', "
                    "'cheapest' or 'fits 16GB', with commas between several."
                )
            if name == "memory":
                found["memory_bytes"] = float(match[1]) * {"m": 1e6, "g": 1e9, "t": 1e12}[match[2].lower()]
            elif name in ("cheapest", "soonest"):
                found["cheapest"] = name == "cheapest"
            else:
                found[name] = float(match[1]) / (100 if name == "accuracy" else 1)
        if "accuracy" in found and "loss" in found:
            raise HocketError(f"The goal '{text}' names an accuracy and a loss; give one of them.")
        return cls(**found)  # type: ignore[arg-type]

    @property
    def target(self) -> float | None:
        """The quality to reach (higher is better: an accuracy, or a loss with a minus)."""
        return -self.loss if self.loss is not None else self.accuracy

    def enough(self, bulk: float) -> float:
        """The quality that is enough where bulk has that of ``bulk``."""
        return bulk - (self.within / 100 if bulk >= 0 else -bulk * self.within / 100)

    def __str__(self) -> str:
        what = "cheapest" if self.cheapest else "soonest"
        if self.target is None:
            end = f"{what} within {self.within:g} point{'s' * (self.within != 1)} of bulk"
        else:
            end = f"{what} to " + (
                f"{100 * self.accuracy:g} % accuracy" if self.accuracy is not None else f"a test loss of {self.loss:g}"
            )
        return end if self.memory_bytes is None else f"{end}, in {self.memory_bytes / 1e9:g} GB of memory"
