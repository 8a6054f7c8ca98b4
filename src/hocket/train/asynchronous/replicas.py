"""Virtual workers that do not step together: their rows, and their gradients, computed lazily in one batch for all who wait.

A worker that begins a step is *pending*: its weights and its mini-batch are known; its gradient is computed when it is needed,
together with those of all other pending workers. So the order of events decides everything, and how many gradients are computed at
a time decides nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Buckets, Layout
from hocket.data.batches import MiniBatch
from hocket.strategy import Strategy
from hocket.train.checks import optimizer_for
from hocket.train.engines import Engine, VmapEngine, stack_buffers
from hocket.train.other_workers import OneForAll, load_moments
from hocket.train.replicas import Factory, RowReplicas, swapped_weights

Batch = tuple[Tensor, Tensor, Tensor]
"""Inputs, targets and the key of the randomness of one mini-batch."""


class AsyncReplicas(RowReplicas):
    """``cluster.size`` workers as rows, with an optimiser of their own where they step alone."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Factory,
        strategy: Strategy,
        cluster: Cluster,
        *,
        engine: Callable[[Layout], Engine],
        clip: float | None = None,
        nonfinite: str = "raise",
        buckets: Buckets = Buckets(),  # noqa: B008 - frozen
    ) -> None:
        self.factory, self.optimizer = optimizer, optimizer_for(optimizer, list(model.parameters()))
        super().__init__(model, self.optimizer, strategy, cluster, engine, clip, nonfinite, 0, buckets)
        rows = cluster.size
        self.losses = torch.zeros(rows, device=cluster.device)
        self._pending: dict[int, MiniBatch] = {}
        self._used = torch.ones(rows, sum(len(b.slots) for b in self.layout.buckets), dtype=torch.bool)
        self._alone: dict[int, tuple[torch.optim.Optimizer, list[nn.Parameter], list[Tensor]]] = {}
        # One row of its own for engines that go row by row: views are then made once.
        self._one = [b.spaced(1) for b in self.layout.buckets]
        self._one_grad = [b.empty(1) for b in self.layout.buckets]
        self._one_buffers = stack_buffers(model, 1)

    @property
    def rows(self) -> int:
        return self.cluster.size

    # --- gradients -----------------------------------------------------------------------------------------------------------

    def begin(self, worker: int, minibatch: MiniBatch) -> None:
        """A worker begins a step on these samples, at the weights that it has."""
        self._pending[worker] = minibatch

    def compute(self, worker: int, batch_of: Callable[[MiniBatch], Batch]) -> None:
        """Make sure that a worker's gradient is computed, along with those of all who are pending."""
        if worker not in self._pending:
            return
        batches = {w: batch_of(minibatch) for w, minibatch in self._pending.items()}
        if isinstance(self.engine, VmapEngine) and len({b[0].shape for b in batches.values()}) == 1:
            self._all(batches)
        else:
            for w, (x, y, key) in batches.items():
                self._row(w, x, y, key)
        for w in batches:
            if self._watch is not None:
                for b, rows in enumerate(self.grads):
                    self._watch.look(b, rows[w : w + 1], self._pending[w].step + 1)
                self._watch.judge(self._watch.found)
            if self.clip is not None:
                views = [v for b, g in zip(self.layout.buckets, self.grads, strict=True) for v in b.views(g, w)]
                norm = torch.nn.utils.get_total_norm(views)
                torch._foreach_mul_(views, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        self._pending.clear()

    def _row(self, worker: int, x: Tensor, y: Tensor, key: Tensor) -> None:
        for own, all_ in zip(self._one, self.weights, strict=True):
            own.copy_(all_[worker : worker + 1])
        for name, own in self._one_buffers.items():
            own.copy_(self.buffers[name][worker : worker + 1])
        engine = self.engine.loop if isinstance(self.engine, VmapEngine) else self.engine
        losses, used = engine.gradients(self._one, self._one_buffers, [x], [y], self._one_grad, key)
        self._used[worker] = used[0]
        for own, all_ in zip(self._one_grad, self.grads, strict=True):
            all_[worker : worker + 1] = own
        for name, own in self._one_buffers.items():
            self.buffers[name][worker : worker + 1] = own
        self.losses[worker] = losses[0]

    def _all(self, batches: dict[int, Batch]) -> None:
        """All rows at once, always as many, so that one compiled graph serves; those of workers that do not wait are put back."""
        first = next(iter(batches))
        chosen = [batches.get(w, batches[first]) for w in range(self.rows)]
        idle = torch.tensor([w for w in range(self.rows) if w not in batches], dtype=torch.int64, device=self.losses.device)
        kept = (
            {n: b[idle].clone() for n, b in self.buffers.items()},
            [g[idle].clone() for g in self.grads],
            self.losses[idle].clone(),
        )
        x, y, keys = (torch.stack([c[k] for c in chosen]) for k in range(3))
        losses, used = self.engine.gradients(self.weights, self.buffers, x, y, self.grads, keys.flatten())
        for worker in batches:
            self._used[worker] = used[worker]
        self.losses.copy_(losses)
        for name, rows in kept[0].items():
            self.buffers[name][idle] = rows
        for own, rows in zip(self.grads, kept[1], strict=True):
            own[idle] = rows
        self.losses[idle] = kept[2]

    # --- local steps ---------------------------------------------------------------------------------------------------------

    def gradient_of(self, worker: int, weight: float) -> list[Tensor]:
        """A worker's gradient times ``weight``, flat, one per bucket: copies."""
        return [g[worker] * weight if weight != 1.0 else g[worker].clone() for g in self.grads]

    def buffers_of(self, worker: int) -> Tensor | None:
        """A worker's floating-point buffers, flat."""
        own = [b[worker].flatten().float() for b in self.buffers.values() if b.is_floating_point()]
        return torch.cat(own) if own else None

    def local_step(self, worker: int, lrs: list[float]) -> None:
        """One step of a worker's own optimiser on its own weights, with its gradient; unused parameters have none."""
        optimizer, parameters, gradients = self._local(worker)
        for parameter, gradient, used in zip(parameters, gradients, self._used[worker].tolist(), strict=True):
            parameter.grad = gradient if used else None
        for group, lr in zip(optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        optimizer.step()

    def _local(self, worker: int) -> tuple[torch.optim.Optimizer, list[nn.Parameter], list[Tensor]]:
        """A worker's own optimiser, its parameters and its gradients in the layout's order: views of its rows."""
        if worker not in self._alone:
            buckets, row = self.layout.buckets, worker
            parameters = [nn.Parameter(v) for b, w in zip(buckets, self.weights, strict=True) for v in b.views(w, row)]
            gradients = [v for b, g in zip(buckets, self.grads, strict=True) for v in b.views(g, row)]
            named = dict(zip((s.name for b in buckets for s in b.slots), parameters, strict=True))
            optimizer = optimizer_for(self.factory, [named[n] for n, _ in self.model.named_parameters() if n in named])
            self._alone[worker] = optimizer, parameters, gradients
        return self._alone[worker]

    # --- as models -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def with_weights(self, rows: list[Tensor], flat: Tensor | None) -> Iterator[nn.Module]:
        """The model with these weights ``[1, values]`` per bucket and these floating-point buffers (None: the mean)."""
        means = {n: b.mean(0) if b.is_floating_point() else b[0] for n, b in self.buffers.items()}
        if flat is not None:
            names = [n for n, b in self.buffers.items() if b.is_floating_point()]
            parts = flat.split([means[n].numel() for n in names])
            means |= {n: part.view(means[n].shape).to(means[n]) for n, part in zip(names, parts, strict=True)}
        with swapped_weights(self.model, self.layout, rows, means):
            yield self.model

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.saved_rows(),
            "grads": [g.clone() for g in self.grads],
            "losses": self.losses.clone(),
            "used": self._used.clone(),
            "alone": {w: copy.deepcopy(o.state_dict()) for w, (o, _, _) in self._alone.items()},
        }

    def take_over(self, common: OneForAll) -> None:
        """Go on with the weights and buffers that other workers have left."""
        self._pending.clear()
        self._alone.clear()
        for rows, mean in zip(self.weights, common.merged.weights, strict=True):
            rows.copy_(mean.to(rows.device).expand_as(rows))
        for name, rows in self.buffers.items():
            rows.copy_(common.buffers[name].to(rows.device).expand_as(rows))

    def load_moments(self, moments: dict[str, dict[str, Any]], names: Sequence[str]) -> None:
        """Let every worker's own optimiser begin with this state of parameters by name."""
        for worker in range(len(self.losses)):
            load_moments(self.model, self._local(worker)[0], moments, names)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending.clear()
        self.load_rows(state)
        for own, saved in zip(self.grads, state["grads"], strict=True):
            own.copy_(saved)
        self.losses.copy_(state["losses"])
        self._used.copy_(state["used"])
        for worker, saved in state["alone"].items():
            self._local(worker)[0].load_state_dict(copy.deepcopy(saved))
