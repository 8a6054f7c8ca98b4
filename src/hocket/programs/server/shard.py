"""One shard of the parameters: its slices of the weights, the optimiser over them, and how many steps each worker has pushed.

- Where workers may be ahead of each other, every push is one step of the optimiser, with the pushing worker's learning rates.
- Where they may not (``bulk``, ``ssp(0)``), pushes of a step wait for each other and make one step with their mean, summed in
  worker order; a worker that is gone is not waited for.

*Staleness* of a push: how many updates the shard has made since the version of the weights that the gradient was computed at.
"""

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.programs.account import MAX_STALENESS
from hocket.programs.server.optimizer_spec import OptimizerSpec, load_rows
from hocket.programs.server.quorum import quorum_mean
from hocket.sync.base import Sync

_MEAN_SQUARE, _EPS = 0.95, 1e-7


class Shard(ABC):
    """What a shard server needs of a shard: ``push``, ``ready``, ``give``, ``join``, ``leave`` and state."""

    def __init__(self, weights: Sequence[Tensor], workers: Iterable[int]) -> None:
        self.weights = list(weights)
        """This shard's slice of every bucket; copy before keeping it."""
        self.done: dict[int, int] = dict.fromkeys(workers, 0)
        """How many steps each worker that is here has pushed."""
        self.version = 0
        self.staleness: Counter[int] = Counter()

    together: bool
    """Whether all workers that are here go in step."""

    @abstractmethod
    def push(self, worker: int, step: int, tensors: Sequence[Tensor], lrs: Sequence[float], seen: int | None = None) -> bool:
        """Take a worker's tensors up to its ``step``; False where they have no effect: sent again, or too late.

        ``seen`` is the version of the weights they were computed at, where that is not the last one given.
        """

    def set_options(self, changes: Any) -> None:  # noqa: B027 - a mean of weights has none
        """The optimiser's options of the push that comes next, as far as they have changed (:meth:`OptimizerSpec.changes`)."""

    @abstractmethod
    def ready(self, worker: int, step: int) -> bool:
        """Whether a worker that has done ``step`` steps may have weights and go on."""

    def give(self, worker: int) -> list[Tensor]:
        """The weights for a worker; its next gradients are computed at these."""
        return self.weights

    def join(self, worker: int, step: int | None = None) -> int:
        """A worker comes, or comes back; it goes on from ``step``, or with the slowest."""
        self.done[worker] = self.slowest if step is None else step
        return self.done[worker]

    @abstractmethod
    def leave(self, worker: int) -> bool:
        """A worker is gone; its pushes stay, except those of steps that the others had not reached: these are lost (True)."""

    def skip(self, worker: int) -> None:  # noqa: B027 - only meetings wait for pushes of all
        """A worker has long been waiting for another shard: this shard does not wait for it."""

    has_quorum = False
    """Whether pushes of enough workers wait, and more are waited for."""

    def end_grace(self) -> None:  # noqa: B027 - most shards wait for no more pushes
        """No more pushes are waited for."""

    @property
    def slowest(self) -> int:
        """How many steps the slowest worker that is here has pushed."""
        return min(self.done.values(), default=0)

    def called(self) -> list[int]:
        """Workers for which the others wait at a meeting."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from (copies)."""
        state = {"weights": self.weights, "done": self.done, "version": self.version, "staleness": dict(self.staleness)}
        return copy.deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for own, saved in zip(self.weights, state["weights"], strict=True):
            own.copy_(saved)
        self.done, self.version = dict(state["done"]), state["version"]
        self.staleness = Counter(state["staleness"])


class ParameterShard(Shard):
    """``weights[b]`` is this shard's slice of bucket ``b`` (updated in place), of optimiser group ``groups[b]``."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        groups: Sequence[int],
        optimizer: OptimizerSpec,
        sync: Sync,
        workers: Iterable[int],
        lr_factor: float = 1.0,
    ) -> None:
        super().__init__(weights, workers)
        optimizer = optimizer.with_delay(-(-len(self.done) // sync.push_quorum))
        self._parameters = [nn.Parameter(w) for w in weights]
        self.weights = [p.data for p in self._parameters]
        self.sync, self.lr_factor = sync, lr_factor
        held: list[list[nn.Parameter]] = [[] for _ in optimizer.groups]
        for parameter, group in zip(self._parameters, groups, strict=True):
            held[group].append(parameter)
        self.spec, self.optimizer = optimizer, optimizer.build(held)
        if optimizer.state:
            load_rows(self.optimizer, self._parameters, optimizer.state)
        self.together = sync.max_staleness == 0
        self._given: dict[int, int] = {}
        self._waiting: dict[int, tuple[int, list[Tensor]]] = {}
        self._collected: Counter[int] = Counter()
        """How many steps the pushes of each worker hold that waits for a quorum."""
        self._by_steps, self._direction, self._grace_s = sync.push_average
        self._lrs: Sequence[float] = ()
        self._options = optimizer.changed([])
        self._compensation, self._strength = sync.delay_compensation
        self._then: dict[int, list[Tensor]] = {}
        self._squares: list[Tensor] | None = None

    # --- what workers do -----------------------------------------------------------------------------------------------------

    def push(self, worker: int, step: int, tensors: Sequence[Tensor], lrs: Sequence[float], seen: int | None = None) -> bool:
        if step <= self.done.setdefault(worker, 0):
            return False
        steps, self.done[worker] = step - self.done[worker], step
        if self.together:
            self._complete(worker, step)
            self._waiting[worker] = step, list(tensors)
            self._lrs = lrs
            self._step_together()
            return True
        # After a restart from a snapshot a worker may have seen more than this shard remembers.
        staleness = max(self.version - (self._given.get(worker, 0) if seen is None else seen), 0)
        self.staleness[min(staleness, MAX_STALENESS)] += 1
        if self.sync.push_quorum > 1 or self._grace_s:
            self._collected[worker] += steps
            _, earlier = self._waiting.get(worker, (0, tensors))
            self._waiting[worker] = (
                step,
                list(tensors) if earlier is tensors else [a + b for a, b in zip(earlier, tensors, strict=True)],
            )
            self._lrs = lrs
            self._step_with_quorum()
            return True
        gradients = self._compensated(worker, tensors) if self._compensation in ("taylor", "adaptive") else tensors
        self._step(gradients, [lr / max(staleness, 1) for lr in lrs] if self._compensation == "rate" else lrs)
        return True

    def ready(self, worker: int, step: int) -> bool:
        if step == 0 and worker != (first := min(self.done, default=worker)) and self.done.get(first, 0) < self.sync.warm_steps:
            return False  # the first worker warms up alone
        if self.together:
            return step <= self.slowest  # then all pushes of that step are in the weights
        return step - self.slowest <= self.sync.max_staleness

    def give(self, worker: int) -> list[Tensor]:
        self._given[worker] = self.version
        if self._compensation in ("taylor", "adaptive"):
            self._then[worker] = [w.clone() for w in self.weights]
        return self.weights

    def join(self, worker: int, step: int | None = None) -> int:
        super().join(worker, step)
        self._complete(worker, self.done[worker])
        self._step_together()
        return self.done[worker]

    def leave(self, worker: int) -> bool:
        self.done.pop(worker, None)
        self._given.pop(worker, None)
        self._then.pop(worker, None)
        lost = self.together and self._waiting.pop(worker, None) is not None
        self._step_together()
        self._step_with_quorum()
        return lost

    def set_options(self, changes: Any) -> None:
        self._options = self.spec.changed(changes)

    # --- updates -------------------------------------------------------------------------------------------------------------

    def _step_together(self) -> None:
        """One step with the mean of all, once all who are here have come so far (a worker that joined may have no push there)."""
        if self.together:
            self._step_up_to(self.slowest)

    def _step_with_quorum(self, grace_ended: bool = False) -> None:
        """One step with the mean of the pushes that wait, once so many workers have pushed, or all that are here have."""
        waits = self.has_quorum and not grace_ended and len(self._waiting) < len(self.done)
        if not self.together and not waits and len(self._waiting) >= min(self.sync.push_quorum, len(self.done)):
            self._step_up_to(max((step for step, _ in self._waiting.values()), default=0))

    @property
    def has_quorum(self) -> bool:  # type: ignore[override]
        return self._grace_s > 0 and len(self._waiting) >= self.sync.push_quorum

    def end_grace(self) -> None:
        self._step_with_quorum(grace_ended=True)

    def _complete(self, worker: int, step: int) -> None:
        """A worker is at ``step``, so all pushes of earlier steps were made; those that are missing here were lost in a restart."""
        if self.together and worker in self._waiting and self._waiting[worker][0] < step:
            self._step_up_to(self._waiting[worker][0])

    def _step_up_to(self, last: int) -> None:
        """One step with the mean of all pushes that wait, up to step ``last``."""
        order = sorted(worker for worker, (step, _) in self._waiting.items() if step <= last)
        if not order:
            return
        means = self._mean(order)
        for worker in order:
            del self._waiting[worker]
            self._collected.pop(worker, None)
        if self.together:
            self.staleness[0] += len(order)
        self._step(means, self._lrs)

    def _mean(self, order: Sequence[int]) -> list[Tensor]:
        """The mean of what waits of these workers."""
        if self._by_steps or self._direction:
            weights = [self._collected[worker] if self._by_steps else 1 for worker in order]
            return quorum_mean([self._waiting[worker][1] for worker in order], weights, self._direction)
        means = [g.clone() for g in self._waiting[order[0]][1]]
        for worker in order[1:]:
            for mean, gradient in zip(means, self._waiting[worker][1], strict=True):
                mean += gradient
        for mean in means:
            mean /= len(order)
        return means

    def _step(self, gradients: Sequence[Tensor], lrs: Sequence[float]) -> None:
        for group, lr, options in zip(self.optimizer.param_groups, lrs, self._options, strict=True):
            group |= {**options, "lr": lr * self.lr_factor}
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        for parameter in self._parameters:
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
        own = {"optimizer": self.optimizer.state_dict(), "given": self._given, "waiting": self._waiting, "lrs": list(self._lrs)}
        own |= {"collected": dict(self._collected)} if self._by_steps else {}
        own |= {"options": self._options, "then": self._then, "squares": self._squares}
        return {**super().state_dict(), **copy.deepcopy(own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        state = copy.deepcopy(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self._given, self._waiting, self._lrs = dict(state["given"]), dict(state["waiting"]), state["lrs"]
        self._then, self._squares = dict(state["then"]), state["squares"]
        self._options, self._collected = state.get("options", self._options), Counter(state.get("collected", {}))


class AveragingShard(Shard):
    """A shard for ``stale(s)``: workers bring weights, and it takes their mean, weighted by the steps since the last meeting.

    The first to come calls the others, who finish the step in hand and come too. When all who are here have come, every worker gets
    the mean ``Σ k_i w_i / Σ k_i``, summed in worker order. A worker that is gone is not waited for; what it has brought counts.
    One that missed a meeting comes with weights from before it: these have no effect (``k = 0``), and it goes on from the mean of
    the meeting that it has come to. Where faults have made the meetings of two shards differ, one may wait for a worker that waits
    for the other: such a worker says so after a while (:meth:`skip`), and the next meeting is held without it.

    ``outer`` is the outer optimiser of the means (:class:`hocket.sync.DiLoCo`), if there is one. It may weigh workers by their
    displacements from the weights of the last meeting.
    """

    together = True

    def __init__(self, weights: Sequence[Tensor], workers: Iterable[int], outer: Sync | None = None) -> None:
        super().__init__(weights, workers)
        self._outer = outer
        self._outer_states = [] if outer is None else [outer.init_state(w.unsqueeze(0)) for w in self.weights]
        self._norms: dict[int, dict[str, Tensor]] = {}
        """What the outer optimiser knows of each worker's norms."""
        self._arrived: dict[int, tuple[int, list[Tensor]]] = {}
        """Who has come to the next meeting, with its steps since the last one (0: its weights do not count) and its weights."""
        self._skipped: set[int] = set()

    def push(self, worker: int, step: int, tensors: Sequence[Tensor], lrs: Sequence[float], seen: int | None = None) -> bool:
        steps = step - self.done.setdefault(worker, 0)
        if steps <= 0:
            return False
        self.done[worker] = step
        counts = seen is None or seen >= self.version  # or the others have met without it: these weights are older than the mean
        self._arrived[worker] = steps if counts else 0, [w.clone() for w in tensors]
        self._skipped.discard(worker)
        self._meet()
        return counts

    def ready(self, worker: int, step: int) -> bool:
        return worker not in self._arrived

    def leave(self, worker: int) -> bool:
        self.done.pop(worker, None)
        self._skipped.discard(worker)
        self._meet()
        return False

    def skip(self, worker: int) -> None:
        self._skipped.add(worker)
        self._meet()

    def called(self) -> list[int]:
        return [worker for worker in self.done if worker not in self._arrived] if self._arrived else []

    def _meet(self) -> None:
        """Take the mean, once all who are here have come."""
        if not self._arrived or self.done.keys() - self._arrived.keys() - self._skipped:
            return
        order = sorted(worker for worker, (steps, _) in self._arrived.items() if steps)
        shares = self._shares(order)
        for b, own in enumerate(self.weights if order else ()):
            mean = torch.zeros_like(own)
            for worker, share in zip(order, shares, strict=True):
                if share:  # weights that are left out may be infinite
                    mean += self._arrived[worker][1][b] * share
            if self._outer is None:
                own.copy_(mean)
            else:
                mean += own * (1 - sum(shares))  # unusual workers have no share, and where all are unusual none moves
                new, self._outer_states[b] = self._outer.apply(mean.unsqueeze(0), self._outer_states[b])
                own.copy_(new[0])
        self._arrived, self._skipped = {}, set()
        self.version += bool(order)

    def _shares(self, order: Sequence[int]) -> list[float]:
        """The share of each of these workers in the mean."""
        if self._outer is None or not self._outer.weighs_displacements:
            total = sum(self._arrived[worker][0] for worker in order)
            return [self._arrived[worker][0] / total for worker in order]
        moved = [[w - own for w, own in zip(self._arrived[worker][1], self.weights, strict=True)] for worker in order]
        norms = torch.tensor([[float(torch.cat([d.flatten() for d in parts]).float().norm()) for parts in moved]])
        known = [self._norms.get(worker) or {name: torch.zeros(1, 1) for name in ("seen", "mean", "square")} for worker in order]
        factors, state = self._outer.factors(norms, {name: torch.cat([k[name] for k in known], 1) for name in known[0]})
        for place, worker in enumerate(order):
            self._norms[worker] = {name: values[:, place : place + 1].clone() for name, values in state.items()}
        return (factors[0] / len(order)).tolist()

    def state_dict(self) -> dict[str, Any]:
        own = {"arrived": self._arrived, "outer_states": self._outer_states, "norms": self._norms}
        return {**super().state_dict(), **copy.deepcopy(own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        state = copy.deepcopy(state)
        self._outer_states, self._norms = state.get("outer_states", []), dict(state.get("norms", {}))
        self._arrived = {int(w): (int(k), list(weights)) for w, (k, weights) in state["arrived"].items()}
