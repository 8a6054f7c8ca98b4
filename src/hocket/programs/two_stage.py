"""The program of a strategy that predicts (:mod:`hocket.sync.acco`): gradients travel during the next step.

When the backward pass of a step has ended, the mean of the *last* step's gradients is there. It takes the place of the present
gradients, which begin to travel. What a step does with it depends on what has arrived:

- *nothing* (the first step): the optimiser steps with zeros, and that is undone;
- the *first* half of a mini-batch: weights and optimiser state are kept, and the update predicts;
- the *second* half: what was kept comes back, and both halves make the update.
"""

from __future__ import annotations

import copy
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.errors import HocketError
from hocket.programs.collective import CollectiveProgram
from hocket.strategy import Strategy


class OptimizerState(Protocol):
    """The state of the optimisers of all rows."""

    def save(self, kept: Any) -> Any:
        """A copy of it, into the memory of an earlier one (``kept``, or None)."""

    def restore(self, saved: Any) -> None:
        """Restore the state to a saved copy."""


class Arrived(Enum):
    """The half of a mini-batch whose mean has arrived in this step."""

    NO_EXCHANGE = "no exchange"
    NOTHING = "nothing"
    FIRST = "first half"
    SECOND = "second half"


class TwoStageProgram(CollectiveProgram):
    """A collective program whose gradients travel during the next step."""

    optimizer_state: OptimizerState | None = None
    """Set by the owner of the rows."""

    def __init__(self, strategy: Strategy, layout: Layout, cluster: Cluster, weights: list[Tensor], seed: int = 0) -> None:
        super().__init__(strategy, layout, cluster, weights, seed)
        self._arrived = Arrived.NO_EXCHANGE
        self._given: list[Tensor] = []
        self._flags: Tensor | None = None
        self._first: list[Tensor] | None = None  # the mean of a mini-batch's first half, flags last
        self._counts = [0.0, 0.0]  # samples of the first half, and of the gradients that travel
        self._begun: list[Tensor] = []  # the weights that a prediction began with
        self._state: Any = None
        self._memory: list[list[Tensor]] = []  # of gradients that have been used

    @property
    def linear(self) -> bool:
        """False: the mean of the gradients handed in comes back a step later."""
        return False

    @property
    def keeps_residuals(self) -> bool:
        return True

    # --- gradients -----------------------------------------------------------------------------------------------------------

    def gradient_ready(self, bucket: int, rows: Tensor) -> None:
        if self.mixes_gradients:
            self._given.append(rows)

    def flags_ready(self, flags: Tensor) -> None:
        self._flags = flags

    def gradients_done(self) -> list[Any]:
        """The mean of earlier gradients is written into the rows handed in, and the travel of these begins."""
        if not self._given:
            return []
        rows, self._given = self._given, []
        flags, self._flags = self._flags, None
        landed = self._landed() if self._in_flight or self._mixed is not None else None
        outgoing = self._memory.pop() if self._memory else [torch.empty_like(given) for given in rows]
        torch._foreach_copy_(outgoing, rows)
        count, self._counts[1] = self._counts[1], self.samples
        self._send(outgoing, flags)
        found = self._update_of(landed, count) if landed is not None else self._no_update(rows, flags)
        torch._foreach_copy_(rows, found[: len(rows)])
        if self._arrived is Arrived.SECOND:
            self._memory.append(found[: len(rows)])
        return found

    def discard_gradients(self) -> None:
        raise HocketError(
            f"{self.strategy}: gradients were discarded with zero_grad() after their exchange had begun; make a step after each "
            "backward pass, or use bulk."
        )

    def _send(self, rows: list[Tensor], flags: Tensor | None) -> None:
        self._begin(long=True)
        self._in_flight = True
        when = self.step, self.exchanges
        for bucket, own in enumerate(rows):
            name = f"gradients of bucket {bucket}, {own.shape[1]} values"
            self._offer(bucket, partial(self._mix_gradients, bucket, own, True, when), own, name)
        if flags is not None:
            super().flags_ready(flags)
        self._submit_last()
        assert self._exchange is not None
        self._exchange.seal()

    def _no_update(self, rows: list[Tensor], flags: Tensor | None) -> list[Tensor]:
        self._arrived = Arrived.NOTHING
        found = [torch.zeros_like(own) for own in rows]
        if flags is not None:
            used = torch.ones_like(flags[0])
            used[-1] = False  # whether a gradient is not finite is known a step later
            found.append(used)
        return found

    def _update_of(self, landed: list[Tensor], count: float) -> list[Tensor]:
        """The gradients of the optimiser's update, flags last: those of the first half, or of both."""
        buckets = len(self.layout.buckets)
        if self._first is None:
            self._arrived, self._first, self._counts[0] = Arrived.FIRST, landed, count
            return landed
        first, self._first, self._arrived = self._first, None, Arrived.SECOND
        share = count / (self._counts[0] + count)
        for one, other in zip(first[:buckets], landed[:buckets], strict=True):
            one.lerp_(other, share)
        self._memory.append(landed[:buckets])
        return first[:buckets] + [one | other for one, other in zip(first[buckets:], landed[buckets:], strict=True)]

    # --- weights -------------------------------------------------------------------------------------------------------------

    def before_update(self, weights: list[Tensor]) -> None:
        if self._arrived is Arrived.SECOND:
            self._take_back(weights)
        elif self._arrived is not Arrived.NO_EXCHANGE:
            self._keep(weights)

    def after_update(self, weights: list[Tensor]) -> None:
        if self._arrived is Arrived.NOTHING:
            self._take_back(weights)
        self._arrived = Arrived.NO_EXCHANGE
        super().after_update(weights)

    def _keep(self, weights: list[Tensor]) -> None:
        self._begun = self._begun or [torch.empty_like(rows) for rows in weights]
        torch._foreach_copy_(self._begun, weights)
        if self.optimizer_state is not None:
            self._state = self.optimizer_state.save(self._state)

    def _take_back(self, weights: list[Tensor]) -> None:
        torch._foreach_copy_(weights, self._begun)
        if self.optimizer_state is not None:
            self.optimizer_state.restore(self._state)

    # --- state ---------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        predicted = self._first is not None
        kept = (self._first, list(self._counts), self._begun, self._state) if predicted else (None, list(self._counts), [], None)
        return {**state, "prediction": copy.deepcopy(dict(zip(_KEPT, kept, strict=True)))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        kept = state.pop("prediction", None) or {"first": None, "counts": [0.0, 0.0], "begun": [], "state": None}
        super().load_state_dict(state)
        device = self.cluster.device
        self._first = None if kept["first"] is None else [own.to(device) for own in kept["first"]]
        self._counts, self._begun = list(kept["counts"]), [own.to(device) for own in kept["begun"]]
        self._state, self._given, self._flags, self._arrived = kept["state"], [], None, Arrived.NO_EXCHANGE


_KEPT = ("first", "counts", "begun", "state")


def program_for(
    strategy: Strategy, layout: Layout, cluster: Cluster, weights: list[Tensor], seed: int = 0
) -> CollectiveProgram | TwoStageProgram:
    """The program of a collective strategy."""
    kind = TwoStageProgram if strategy.sync.predicts else CollectiveProgram
    return kind(strategy, layout, cluster, weights, seed)
