"""What users say of an elastic run: how many workers it may have, and what follows their number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hocket.errors import HocketError


class Stateful(Protocol):
    """Whatever has a state, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


@dataclass(frozen=True)
class Elastic:
    """A run of ``least`` to ``most`` workers, which may be lost and may join while it goes on.

    With fewer than ``least`` the others wait at the end of a step until enough have joined; above ``most`` workers wait, ready to
    take the place of one that is lost. ``scale_lr`` keeps the learning rate proportional to the number of workers. A worker that
    joins gets the state of whatever is in ``share``, such as a scheduler, besides that of model, optimiser, strategy and data.

    >>> Elastic.parse("2:8")
    Elastic(least=2, most=8, scale_lr=False)
    """

    least: int
    most: int
    scale_lr: bool = False
    share: tuple[Stateful, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise HocketError(f"elastic={self.least}:{self.most}: give the least and the most workers, such as 2:8.")

    @classmethod
    def parse(cls, given: Elastic | str) -> Elastic:
        if isinstance(given, Elastic):
            return given
        least, colon, most = str(given).partition(":")
        if not colon or not least.isdigit() or not most.isdigit():
            raise HocketError(f"elastic={given}: give the least and the most workers, such as 2:8.")
        return cls(int(least), int(most))

    def rescale(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Multiply the learning rate, where it follows the number of workers, also that of schedulers."""
        if not self.scale_lr or factor == 1.0:
            return
        for group in optimizer.param_groups:
            for name in ("lr", "initial_lr"):
                if name in group:
                    group[name] = group[name] * factor
        for scheduler in self.share:
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]
