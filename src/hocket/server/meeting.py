"""A shard for ``stale(s)``: workers bring weights instead of gradients, and it takes their mean, weighted by steps.

The first to come calls the others (whoever serves it tells them); they finish the step in hand and come too. When all who are here
have come, everybody gets the mean ``Σ k_i w_i / Σ k_i``, summed in worker order. One that is gone is not waited for; what it brings
from before a meeting is lost, and it goes on from the mean.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hocket.server.shard import Shard


class MeetingShard(Shard):
    """Its optimiser never steps: the workers' own do."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.together = True
        self._came: dict[int, tuple[int, list[Tensor]]] = {}
        """Who waits for the others, with its steps since the last meeting and its weights."""

    @property
    def called(self) -> bool:
        """Whether somebody has come and waits for the others."""
        return bool(self._came)

    def push(self, worker: int, step: int, gradients: Sequence[Tensor], rates: Sequence[float], seen: int | None = None) -> bool:
        """``gradients`` are a worker's weights after its ``step``-th step; False where they came before, or missed a meeting."""
        steps = step - self.done.setdefault(worker, 0)
        if steps <= 0:
            return False
        self.done[worker] = step
        if seen is not None and seen < self.version:
            return False  # they have met without it: these weights are older than the mean
        self._came[worker] = steps, [w.clone() for w in gradients]
        self._meet()
        return True

    def ready(self, worker: int, step: int) -> bool:
        return worker not in self._came

    def join(self, worker: int, step: int | None = None) -> int:
        self.done[worker] = self.slowest if step is None else step
        return self.done[worker]

    def leave(self, worker: int) -> bool:
        self.done.pop(worker, None)
        lost = self._came.pop(worker, None) is not None
        self._meet()
        return lost

    def _meet(self) -> None:
        """The mean, once all who are here have come."""
        if not self._came or len(self._came) < len(self.done):
            return
        total = sum(steps for steps, _ in self._came.values())
        order = sorted(self._came)
        for b, parameter in enumerate(self.parameters):
            shares = ((self._came[worker][0] / total, self._came[worker][1][b]) for worker in order)
            first, weights = next(shares)
            mean = weights * first
            for share, weights in shares:
                mean = mean + weights * share
            parameter.data.copy_(mean)
        self._came = {}
        self.version += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "came": copy.deepcopy(self._came)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._came = {int(w): (int(k), list(weights)) for w, (k, weights) in state["came"].items()}
