"""When workers talk: a schedule that can be printed and tested.

A synchronisation says, for each step ``t`` = 1, 2, …, at which moment of the step an exchange happens, if any:

- ``GRADIENTS``: after the backward pass the optimiser receives ``Σ_j K_ij g_j`` instead of ``g_i``;
- ``BEFORE``: ``w_t = Σ_j K_ij w_{t−1,j} + u_i``; the mix uses the weights from before this step's gradient, so it travels
  meanwhile;
- ``AFTER``: the update first, then the mix of the updated weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from torch import Tensor

from hocket.errors import HocketError, nearest


class Moment(Enum):
    """At which moment of a step workers exchange."""

    NEVER = "never"
    GRADIENTS = "gradients"
    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True)
class ServerAction:
    """What a worker that talks to servers does after a gradient; the gradient is always added to what it will push."""

    push: bool = True
    fetch: bool = True
    local: bool = False
    """Step on its own with this gradient."""


@dataclass(frozen=True)
class Sync(ABC):
    """Base of all synchronisations."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    only_weights: ClassVar[bool] = False
    """Whether exchanging gradients makes no sense under it."""
    default_weights: ClassVar[bool] = True
    """Whether weights are exchanged unless told otherwise (gossip always defaults to weights)."""
    asynchronous: ClassVar[bool] = False
    """Whether workers go on without waiting for everybody: then they are programs of their own that send messages."""
    static_partition: ClassVar[bool] = True
    """Whether every worker has its own share of an epoch; otherwise who is free takes the next mini-batch."""

    keeps_replicas_equal: ClassVar[bool] = False
    """Whether replicas are equal after every step if all workers receive the same mean of gradients."""
    averages_weights: ClassVar[bool] = False
    """On a server: whether workers keep their optimisers and meet to average weights, instead of pushing gradients."""

    @property
    def max_staleness(self) -> float:
        """On a server: how many steps a worker may be ahead of the slowest."""
        return 0.0

    @property
    def overlaps(self) -> bool:
        """On a server: whether fetched weights travel while the next gradient is computed."""
        return False

    @property
    def warm_steps(self) -> int:
        """On a server: how many first steps are made by worker 0 alone."""
        return 0

    @property
    def delay_compensation(self) -> tuple[str, float]:
        """On a server: how the staleness of a gradient is made up for, and how strongly."""
        return "none", 0.0

    def server_action(self, step: int) -> ServerAction:
        """On a server: what a worker does after its ``step``-th gradient (from 1)."""
        return ServerAction()

    @property
    def period(self) -> int:
        """Steps between exchanges."""
        return 1

    def proven_period(self, steps: int, workers: int) -> float | None:
        """The period up to which convergence is proven for so many steps and workers; None where there is no such bound."""
        return None

    @property
    def residual_stays(self) -> bool:
        """Whether what a code with feedback holds back of exchanged weights stays in them, not in the compressor's state."""
        return False

    @abstractmethod
    def moment(self, step: int, weights: bool) -> Moment:
        """When in step ``step`` (from 1) workers exchange ``weights`` (or gradients)."""

    def rebases(self, step: int) -> bool:
        """Whether all replicas stand at the same weights after ``step``, from which displacements count anew."""
        return False

    def apply(self, mixed: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """What the weights become, given the mixed weights (an outer optimiser may have a say)."""
        return mixed, state

    def init_state(self, rows: Tensor) -> dict[str, Tensor]:
        """What :meth:`apply` uses_error_feedback, before the first step."""
        return {}


@dataclass(frozen=True)
class Asynchronous(Sync):
    """Base of those that never wait for everybody."""

    default_weights: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = True
    static_partition: ClassVar[bool] = False

    @property
    def max_staleness(self) -> float:
        return math.inf

    def moment(self, step: int, weights: bool) -> Moment:
        return Moment.GRADIENTS if self.server_action(step).push else Moment.NEVER


COMPENSATIONS = {"none": 0.0, "rate": 0.0, "taylor": 0.04, "adaptive": 2.0}
"""Ways to make up for the age of a gradient, with the strength λ that each has unless told otherwise."""


def compensation(kind: object, strength: object, name: str) -> None:
    """Refuse an unknown compensation, and a strength where there is none."""
    if kind not in COMPENSATIONS:
        hint = nearest(str(kind), COMPENSATIONS) or "."
        raise HocketError(f"{name}(compensation={kind!r}): unknown{hint} Use one of {', '.join(COMPENSATIONS)}.")
    if strength is None:
        return
    if kind in ("none", "rate"):
        raise HocketError(f"{name}(strength={strength!r}): only the compensations taylor and adaptive have a strength.")
    number(strength, name, "strength", 0, math.inf)


def whole(value: object, name: str, argument: str, least: int = 1) -> None:
    """Refuse anything but a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise HocketError(f"{name}({argument}={value!r}): {argument} must be a whole number of at least {least}.")


def number(value: object, name: str, argument: str, low: float, high: float) -> None:
    """Refuse anything but a number in [low, high)."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value < high:
        raise HocketError(f"{name}({argument}={value!r}): {argument} must be a number in [{low:g}, {high:g}).")
