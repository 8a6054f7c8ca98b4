"""A shard: its slices of the truth, the optimiser over them, and how far every worker has come.

It knows nothing of sockets or clocks: a process that listens and a virtual cluster both hand it pushes and ask it for weights.

- Where workers may be ahead of each other, every push is one step of the optimiser, with the pushing worker's rate.
- Where they may not (``bulk``, ``ssp(0)``), pushes of a step wait for each other and make one step with their mean, summed in
  worker order; a worker that is gone is not waited for.

``age`` of a push: how many updates the shard has made since it last gave that worker its weights.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from hocket.server.optimizer_spec import OptimizerSpec
from hocket.sync.base import COMPENSATIONS, Sync
from hocket.sync.bulk import Bulk

_MEAN_SQUARE, _EPS = 0.95, 1e-7


class Shard:
    """``weights[b]`` is this shard's slice of bucket ``b`` (taken over, and updated in place), of optimiser group ``groups[b]``."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        groups: Sequence[int],
        recipe: OptimizerSpec,
        sync: Sync,
        workers: Iterable[int],
        rate: float = 1.0,
    ) -> None:
        self.parameters = [nn.Parameter(w) for w in weights]
        self.sync, self.rate = sync, rate
        held: list[list[nn.Parameter]] = [[] for _ in recipe.groups]
        for parameter, group in zip(self.parameters, groups, strict=True):
            held[group].append(parameter)
        self.optimizer = recipe.build(held)
        self.together = isinstance(sync, Bulk) or sync.max_staleness == 0
        self.done: dict[int, int] = dict.fromkeys(workers, 0)
        """How many steps each worker that is here has pushed."""
        self.version = 0
        self.ages: Counter[int] = Counter()
        self._given: dict[int, int] = {}
        self._waiting: dict[int, tuple[int, list[Tensor]]] = {}
        self._rates: Sequence[float] = ()
        self._warm = getattr(sync, "warm", 0)
        self._compensation = getattr(sync, "compensation", "none")
        strength = getattr(sync, "strength", None)
        self._strength = COMPENSATIONS[self._compensation] if strength is None else float(strength)
        self._then: dict[int, list[Tensor]] = {}
        self._squares: list[Tensor] | None = None

    @property
    def weights(self) -> list[Tensor]:
        """The truth, as it is now; copy before keeping it."""
        return [p.data for p in self.parameters]

    # --- what workers do -----------------------------------------------------------------------------------------------------

    def push(self, worker: int, step: int, gradients: Sequence[Tensor], rates: Sequence[float], seen: int | None = None) -> bool:
        """Take a worker's gradients up to its ``step``; False where they were there before (sent again after a broken link).

        ``seen`` is the version of the weights they were computed at, where that is not the last one given.
        """
        if step <= self.done.setdefault(worker, 0):
            return False
        self.done[worker] = step
        if self.together:
            self._waiting[worker] = step, list(gradients)
            self._rates = rates
            self._step_together()
            return True
        # After a restart from a snapshot a worker may have seen more than this shard uses_error_feedback.
        age = max(self.version - (self._given.get(worker, 0) if seen is None else seen), 0)
        self.ages[age] += 1
        if self._compensation in ("taylor", "adaptive"):
            gradients = self._compensated(worker, gradients)
        self._step(gradients, [r / max(age, 1) for r in rates] if self._compensation == "rate" else rates)
        return True

    def ready(self, worker: int, step: int) -> bool:
        """Whether a worker that has done ``step`` steps may have weights and go on."""
        if step == 0 and worker != (first := min(self.done, default=worker)) and self.done.get(first, 0) < self._warm:
            return False  # the first one warms up alone
        if self.together:
            return step <= self.slowest  # then all pushes of that step are in the weights
        return step - self.slowest <= self.sync.max_staleness

    @property
    def slowest(self) -> int:
        """How many steps the slowest worker that is here has pushed."""
        return min(self.done.values(), default=0)

    def give(self, worker: int) -> list[Tensor]:
        """The weights for a worker; from now on its gradients are as old as these."""
        self._given[worker] = self.version
        if self._compensation in ("taylor", "adaptive"):
            self._then[worker] = [w.clone() for w in self.weights]
        return self.weights

    def join(self, worker: int, step: int | None = None) -> int:
        """A worker comes, or comes back; it goes on from the step it has done, or with the slowest."""
        self.done[worker] = self.slowest if step is None else step
        if worker in self._waiting and self._waiting[worker][0] < self.done[worker]:
            del self._waiting[worker]  # from before a restart
        self._step_together()
        return self.done[worker]

    def leave(self, worker: int) -> bool:
        """A worker is gone; what it pushed stays, except where the others had not come so far: that is lost (True)."""
        self.done.pop(worker, None)
        self._given.pop(worker, None)
        self._then.pop(worker, None)
        lost = self._waiting.pop(worker, None) is not None
        self._step_together()
        return lost

    # --- updates -------------------------------------------------------------------------------------------------------------

    def _step_together(self) -> None:
        """One step with the mean of all, once all who are here have come so far (a newcomer may stand there without a push)."""
        order = sorted(worker for worker, (step, _) in self._waiting.items() if step <= self.slowest)
        if not order:
            return
        means = [g.clone() for g in self._waiting[order[0]][1]]
        for worker in order[1:]:
            for mean, gradient in zip(means, self._waiting[worker][1], strict=True):
                mean += gradient
        for mean in means:
            mean /= len(order)
        for worker in order:
            del self._waiting[worker]
        self.ages[0] += len(order)
        self._step(means, self._rates)

    def _step(self, gradients: Sequence[Tensor], rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * self.rate
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.version += 1

    def _compensated(self, worker: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """``g + λ g⊙g⊙(w_now − w_then)``."""
        squares = [g * g for g in gradients]
        then = self._then.get(worker)
        if self._compensation == "adaptive":
            if self._squares is None:
                self._squares = [s.clone() for s in squares]
            for mean, square in zip(self._squares, squares, strict=True):
                mean.mul_(_MEAN_SQUARE).add_(square, alpha=1 - _MEAN_SQUARE)
        if then is None:
            return list(gradients)
        out = []
        for b, (gradient, square, now, old) in enumerate(zip(gradients, squares, self.weights, then, strict=True)):
            strength: Any = self._strength
            if self._squares is not None:
                strength = self._strength / (self._squares[b] + _EPS).sqrt()
            out.append(gradient + strength * square * (now - old))
        return out

    # --- state ---------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from (copies)."""
        return copy.deepcopy(
            {
                "weights": [p.data for p in self.parameters],
                "optimizer": self.optimizer.state_dict(),
                "done": self.done,
                "version": self.version,
                "ages": dict(self.ages),
                "given": self._given,
                "waiting": self._waiting,
                "rates": list(self._rates),
                "then": self._then,
                "squares": self._squares,
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        state = copy.deepcopy(state)
        for parameter, saved in zip(self.parameters, state["weights"], strict=True):
            parameter.data.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.version = dict(state["done"]), state["version"]
        self.ages, self._given = Counter(state["ages"]), dict(state["given"])
        self._waiting, self._rates = dict(state["waiting"]), state["rates"]
        self._then, self._squares = dict(state["then"]), state["squares"]
