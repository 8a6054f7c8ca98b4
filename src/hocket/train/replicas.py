"""The workers hosted here as the training loop sees them: one on hooks, or many as rows.

``LiveReplica`` is a model and an optimiser with a job on their hooks, as in a user's own loop: exchanges overlap with the
backward pass. ``StackedReplicas`` holds any number of workers as rows, a gradient engine and a stacked optimiser, and calls the
same program itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Buckets, Layout
from hocket.errors import HocketError, NonFiniteGradient
from hocket.programs.repartition import take_over
from hocket.programs.two_stage import program_for
from hocket.strategy import Strategy
from hocket.train.adaptive import with_exchange
from hocket.train.checks import Factory, check_equal, check_job, check_memory, layout_for, optimizer_for, refuse_clip
from hocket.train.engines import Engine, engine_of, stack_buffers
from hocket.train.engines.loop import draws_numbers, seeded_loss
from hocket.train.hosted import Hosted
from hocket.train.job import Job
from hocket.train.momentum import give_state, taking_momentum
from hocket.train.other_workers import OneForAll
from hocket.train.runtimes.base import Runtime
from hocket.train.stacked import StackedOptimizer, clip_rows_
from hocket.train.throttle import Throttle
from hocket.train.watch import NonFinite, first_nonfinite

Loss = Callable[[Any, Tensor], Tensor]


class JobReplica(Hosted, ABC):
    """A model, or a part of one, and an optimiser; a job on their hooks makes all exchanges."""

    job: Job

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Factory,
        make: Callable[[torch.optim.Optimizer], Job],
        clip: float | None,
        autocast: torch.dtype | None,
    ) -> None:
        """``make``: makes the job of ``model`` and this optimiser."""
        self.model, self.loss, self.clip, self.autocast = model, loss, clip, autocast
        self.optimizer = optimizer(list(model.parameters()))
        self._random = draws_numbers(model, loss)
        self.job = make(self.optimizer)
        refuse_clip(self.job.strategy, clip)
        self.layout, self.ledger, self.cluster = self.job.layout, self.job.runtime.ledger, self.job.cluster

    def step(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], keys: Tensor, weights: Sequence[float], always: bool = False
    ) -> Tensor:
        self.job.weight, self.job.samples = weights[0], self.samples
        loss = self._step(inputs[0], targets[0], keys[0], weights[0] if always else 1.0)
        skipped = self.split is not None and self.split.skipped  # made without a pass, as in an elastic run: it has no loss
        return torch.empty(0) if loss is None or skipped else loss.detach().view(1)

    @abstractmethod
    def _step(self, x: Tensor, y: Tensor, key: Tensor, factor: float) -> Tensor | None:
        """A step on one mini-batch; its loss. ``factor`` is for gradients that are not weighted in an exchange."""

    def _loss(self, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        return seeded_loss(self.model, self.loss, x, y, key, self._random, self.autocast)

    def _scale(self, factor: float) -> None:
        """Let gradients that no exchange weights count ``factor`` times."""
        if factor != 1.0 and not self.job.runtime.mixes_gradients:
            for p in (p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None):
                p.grad.mul_(factor)

    def _clip(self) -> None:
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)

    def averaged(self) -> AbstractContextManager[nn.Module]:
        return self.job.averaged()

    def audit(self) -> None:
        """Nothing to do: every step was checked."""

    def _optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict() if self.job.sharded is None else self.job.sharded.saved()

    def load_full_state(self, state: dict[str, Any]) -> None:
        self.job.load_full_state(state)


class LiveReplica(JobReplica):
    """One worker with the whole model; under ZeRO-1 worker 0's checkpoint has the whole state of the optimiser."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Factory,
        strategy: Strategy,
        runtime: Runtime,
        *,
        clip: float | None = None,
        autocast: torch.dtype | None = None,
        slowdown: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(model, loss, optimizer, lambda made: Job(model, made, strategy, runtime, **options), clip, autocast)
        self._throttle = Throttle(slowdown)

    def _step(self, x: Tensor, y: Tensor, key: Tensor, factor: float) -> Tensor:
        self._throttle.begin()
        self.optimizer.zero_grad()
        loss = self._loss(x, y, key)
        self._throttle.between()
        loss.backward()
        self._throttle.computed(self.job.gradients_at)
        self._scale(factor)
        self._clip()
        self.optimizer.step()
        return loss

    def each(self) -> Iterator[nn.Module]:
        self.job.runtime.drain()
        with self.cluster.uncounted():
            yield self.model

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self._optimizer_state(), "job": self.job.own_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_full_state(state)
        self.job.load_own_state(state["job"])

    def load_full_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def take_over(self, common: OneForAll) -> None:
        """Take over the states of other workers."""
        self.job.begin_with(common)


class RowReplicas(Hosted):
    """Workers as rows of weights, gradients and buffers, with a gradient engine; all begin with worker 0's model."""

    def __init__(
        self,
        model: nn.Module,
        template: torch.optim.Optimizer,
        strategy: Strategy,
        cluster: Cluster,
        engine: Callable[[Layout], Engine],
        clip: float | None,
        nonfinite: str,
        seed: int,
        buckets: Buckets,
    ) -> None:
        self.model, self.cluster, self.clip = model.to(cluster.device), cluster, clip
        check_job(model, template, strategy, 1, nonfinite, clip)
        self.strategy = strategy = with_exchange(strategy, template, tell=cluster.workers.start == 0 and cluster.size > 1)
        self.layout = layout_for(model, template, strategy, buckets.cap_bytes, buckets.first_cap_bytes)
        check_equal(model, self.layout, cluster, [str(strategy), f"seed={seed}"])
        check_memory(self.layout, cluster)
        self.weights = [b.spaced(cluster.rows) for b in self.layout.buckets]
        self.grads = [b.empty(cluster.rows) for b in self.layout.buckets]
        self._fill()
        self.buffers = stack_buffers(model, cluster.rows)
        self.engine = engine(self.layout)
        self.vectorised = cluster.device.type == "cuda"
        # On CUDA a look at every step would stall the queue: there "raise" looks once per epoch, at the weights.
        self._watch = NonFinite(nonfinite, self.layout, cluster) if not self.vectorised or nonfinite == "skip" else None

    def _fill(self) -> None:
        """Set all rows to worker 0's weights."""
        named = dict(self.model.named_parameters())
        for bucket, rows in zip(self.layout.buckets, self.weights, strict=True):
            for stacked, slot in zip(bucket.stacked(rows), bucket.slots, strict=True):
                stacked.copy_(named[slot.name].data.expand_as(stacked))
            self.cluster.synchronize(rows)
        trained = {s.name for b in self.layout.buckets for s in b.slots}
        for tensor in (*(p for n, p in named.items() if n not in trained), *self.model.buffers()):
            rows = tensor.data.reshape(1, -1).clone()
            self.cluster.synchronize(rows)
            tensor.data.copy_(rows.view(tensor.shape))

    def rows_of(self, row: int) -> list[Tensor]:
        """A worker's weights, ``[1, values]`` per bucket: views."""
        return [w[row : row + 1] for w in self.weights]

    def saved_rows(self) -> dict[str, Any]:
        """Weights and buffers, for checkpoints."""
        return {"weights": [w.clone() for w in self.weights], "buffers": {n: b.clone() for n, b in self.buffers.items()}}

    def load_rows(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`saved_rows`."""
        for own, saved in zip(self.weights, state["weights"], strict=True):
            own.copy_(saved)
        for name, saved in state["buffers"].items():
            self.buffers[name].copy_(saved)


class StackedReplicas(RowReplicas):
    """Several workers that step together: gradient engine, program and stacked optimiser."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Factory,
        strategy: Strategy,
        cluster: Cluster,
        *,
        seed: int = 0,
        clip: float | None = None,
        autocast: torch.dtype | None = None,
        nonfinite: str = "raise",
        engine: str | Callable[[Layout], Engine] = "auto",
        buckets: Buckets = Buckets(),  # noqa: B008 - frozen
    ) -> None:
        """``engine``: a name, or a function from a layout to an engine."""
        template, make = optimizer_for(optimizer, list(model.parameters())), engine_of(engine, model, loss, cluster, autocast)
        super().__init__(model, template, strategy, cluster, make, clip, nonfinite, seed, buckets)
        momentum = self.strategy.exchanged == "momentum" and cluster.size > 1
        optimizer = taking_momentum(optimizer, self.strategy.sync.period) if momentum else optimizer
        names, stable = [n for n, _ in model.named_parameters()], not self.strategy.sync.predicts
        granularity = "buckets" if self.vectorised and stable else "slots"
        self._stacked = StackedOptimizer(optimizer, self.layout, self.weights, self.grads, granularity, names=names)
        self.program = program_for(self.strategy, self.layout, cluster, self.weights, seed)
        give_state(self.program, self._stacked, momentum)
        self._audits = self.vectorised and nonfinite == "raise"

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._stacked.optimizer

    def step(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], keys: Tensor, weights: Sequence[float], always: bool = False
    ) -> Tensor:
        losses, used = self.engine.gradients(self.weights, self.buffers, inputs, targets, self.grads, keys)
        mixing, self.program.samples = self.program.mixes_gradients, self.samples
        for b, rows in enumerate(self.grads):
            if self._watch is not None:
                self._watch.look(b, rows, self.program.step + 1)
            if (mixing or always) and any(w != 1.0 for w in weights):
                rows.mul_(torch.tensor(weights, dtype=rows.dtype, device=rows.device).unsqueeze(1))
            self.program.gradient_ready(b, rows)
        if mixing:
            found = torch.full((len(used), 1), self._watch is not None and self._watch.found)
            self.program.flags_ready(torch.cat([used, found], 1))
            agreed = self.program.gradients_done()[-1]
            used = agreed[:-1].view(1, -1).expand(self.cluster.rows, -1)
            if self.program.keeps_residuals and not bool(used.all()):
                used = used | self._arrived()
            if self._watch is not None:
                self._watch.judge(bool(agreed[-1]))
        elif self._watch is not None:
            self._watch.judge(self._watch.found)
        if self.clip is not None:
            self._clip(used, self.clip)
        self.program.before_update(self.weights)
        self._stacked.step(used)
        self.program.after_update(self.weights)
        return losses

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        self.program.drain()
        with self.cluster.uncounted():
            means = [self._mean(w) for w in self.program.whole(self.weights)]
            with swapped_weights(self.model, self.layout, means, {n: self._mean_buffer(b) for n, b in self.buffers.items()}):
                yield self.model

    def audit(self) -> None:
        """After an epoch whose steps were not checked: NaN or Inf gradients have left NaN or Inf weights."""
        if self._audits and (found := first_nonfinite(self.layout, self.weights)) is not None:
            row, name = found
            raise NonFiniteGradient(
                f"A gradient of {name} held NaN or Inf in this epoch on worker {self.cluster.workers.start + row}; "
                "lower the rate, clip gradients, or use nonfinite='skip' to leave such gradients out."
            )

    def each(self) -> Iterator[nn.Module]:
        self.program.drain()
        with self.cluster.uncounted():
            for row in range(self.cluster.rows):
                own = {name: b[row] for name, b in self.buffers.items()}
                with swapped_weights(self.model, self.layout, self.rows_of(row), own):
                    yield self.model

    def state_dict(self) -> dict[str, Any]:
        return {**self.saved_rows(), "optimizer": self._stacked.state_dict(), "job": self.program.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_rows(state)
        self._stacked.load_state_dict(state["optimizer"])
        self.program.load_state_dict(state["job"])

    def take_over(self, common: OneForAll) -> None:
        """Take over the states of other workers."""
        take_over(self.program, self.weights, common.merged)
        for name, rows in self.buffers.items():
            rows.copy_(common.buffers[name].to(rows.device).expand_as(rows))
        self._stacked.load_on_all(common.moments)

    def load_full_state(self, state: dict[str, Any]) -> None:
        raise HocketError("Several workers in one process cannot go on with a split model; give each worker a process.")

    def _clip(self, used: Tensor, max_norm: float) -> None:
        """Each row's gradient down to ``max_norm``; on a CPU in ``clip_grad_norm_``'s own order of summation, for equal bits."""
        if self.cluster.device.type != "cpu":
            clip_rows_(self.grads, max_norm)
            return
        places = {s.name: (b, i) for b, bucket in enumerate(self.layout.buckets) for i, s in enumerate(bucket.slots)}
        starts = [0, *accumulate(len(b.slots) for b in self.layout.buckets)]
        order = [places[n] for n, _ in self.model.named_parameters() if n in places]
        for row, flags in enumerate(used.tolist()):
            views = [b.views(g, row) for b, g in zip(self.layout.buckets, self.grads, strict=True)]
            grads = [views[b][i] for b, i in order if flags[starts[b] + i]]
            scale = (max_norm / (torch.nn.utils.get_total_norm(grads) + 1e-6)).clamp(max=1.0)
            for grad in grads:
                grad.mul_(scale.to(grad.dtype))

    def _arrived(self) -> Tensor:
        """Which slots have gradients other than zero, ``[rows, slots]``: residuals arrive also where nobody used a parameter."""
        pairs = zip(self.layout.buckets, self.grads, strict=True)
        return torch.stack([(g[:, s.offset : s.offset + s.size] != 0).any(1) for b, g in pairs for s in b.slots], 1).cpu()

    def _mean(self, rows: Tensor) -> Tensor:
        exchange, copied = self.cluster.exchange(), rows.clone()
        exchange.submit(lambda: self.cluster.mean(copied, self.cluster.world))
        exchange.wait()
        return copied[:1]

    def _mean_buffer(self, buffer: Tensor) -> Tensor:
        """Float buffers (BatchNorm statistics) are averaged, others are the first worker's."""
        if not buffer.is_floating_point():
            return buffer[0]
        return self._mean(buffer.reshape(buffer.shape[0], -1)).view(buffer.shape[1:])


@contextmanager
def swapped_weights(model: nn.Module, layout: Layout, rows: list[Tensor], buffers: dict[str, Tensor]) -> Iterator[None]:
    """``model`` with these weights (``[1, values]`` per bucket) and buffers, for a while."""
    named, own = dict(model.named_parameters()), dict(model.named_buffers())
    kept = [(t, t.data) for t in (*named.values(), *own.values())]
    for bucket, storage in zip(layout.buckets, rows, strict=True):
        for view, slot in zip(bucket.views(storage, 0), bucket.slots, strict=True):
            named[slot.name].data = view
    for name, value in buffers.items():
        own[name].data = value
    try:
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data
