"""Gradients on their way from autograd into rows.

:class:`BucketedGradients` take them bucket by bucket, while the backward pass goes on:

- A post-accumulate-grad hook per parameter fills the buckets; full ones are launched in bucket order, during the backward pass.
- Exchanges of gradients end in the end-of-backward callback, before ``backward()`` returns, so that gradient clipping sees mixed
  values.

A gradient stays None only if the parameter was unused by all workers. Reentrant checkpointing would fire the callback too early
and is refused. :class:`StepGradients` take them when the optimiser is about to step, clipped or accumulated as the loop did it; an
unused parameter counts as zeros.
"""

from __future__ import annotations

import sys
import time
from types import FrameType
from typing import Any, Protocol

import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Variable

from hocket.errors import HocketError
from hocket.train.runtimes.base import Binding, Runtime
from hocket.train.watch import NonFinite

_REENTRANT = torch.utils.checkpoint.CheckpointFunction.backward.__code__
SPARSE = "A gradient is sparse; exchanges are dense, so build the embedding with sparse=False."


class BucketedGradients:
    """Takes gradients of ``binding``'s parameters and hands them to ``runtime`` in buckets."""

    def __init__(self, binding: Binding, runtime: Runtime, nonfinite: NonFinite) -> None:
        self._binding, self._runtime, self._nonfinite = binding, runtime, nonfinite
        buckets = binding.layout.buckets
        self._grads = [b.empty(1) for b in buckets]
        self._views = [b.views(g, 0) for b, g in zip(buckets, self._grads, strict=True)]
        self._ready: list[set[int]] = [set() for _ in buckets]
        self._launched = 0
        self._called_back = False
        self.overflow = False
        """Whether any worker's gradient of the last pass was not finite, as far as somebody looked."""
        self.done_at = 0.0
        """When the last backward pass had computed all gradients (``time.perf_counter``); exchanges may go on after it."""

    def hook(self) -> list[Any]:
        """Hooks on all parameters; they can be removed."""
        handles: list[Any] = []
        for b, params in enumerate(self._binding.params):
            for s, p in enumerate(params):
                handles.append(p.register_post_accumulate_grad_hook(lambda p, b=b, s=s: self._on_gradient(b, s, p)))
                if self._binding.accumulate > 1:
                    handles.append(p.register_hook(self._weighed))
        return handles

    def rows(self) -> list[Tensor]:
        """They have been handed over already."""
        return []

    def hide(self) -> None:
        """The optimiser needs them."""

    def show(self) -> None:
        """They were not hidden."""

    def exchange(self) -> None:
        """Exchange gradients that came without hooks, where this step exchanges any; they are whole, so ``accumulate`` is 1."""
        if self._runtime.alone or not self._runtime.mixes_gradients:
            self._binding.backwards += 1
            return
        for b, params in enumerate(self._binding.params):
            for s, p in enumerate(params):
                if p.grad is not None:
                    self._take(b, s, p)
        self._end_of_backward()

    def _on_gradient(self, bucket: int, slot: int, p: nn.Parameter) -> None:
        if not self._called_back:
            self._called_back = True
            Variable._execution_engine.queue_callback(self._end_of_backward)
        if self._binding.backwards + 1 < self._binding.accumulate or not self._runtime.mixes_gradients:
            return
        self._take(bucket, slot, p)

    def _take(self, bucket: int, slot: int, p: nn.Parameter) -> None:
        view, params = self._views[bucket][slot], self._binding.params
        assert p.grad is not None
        if p.grad.is_sparse:
            raise HocketError(SPARSE)
        if slot in self._ready[bucket]:
            raise HocketError(
                f"The gradient of {self._binding.layout.buckets[bucket].slots[slot].name} came twice in one backward pass, as "
                "under reentrant checkpointing of a module that is used twice; use checkpoint(…, use_reentrant=False)."
            )
        if p.grad.data_ptr() != view.data_ptr():
            view.copy_(p.grad)
            p.grad = view
        self._ready[bucket].add(slot)
        while self._launched < len(self._ready) and len(self._ready[self._launched]) == len(params[self._launched]):
            self._launch()

    def _weighed(self, gradient: Tensor) -> Tensor:
        """One pass of several: each has its own share of samples, so it is weighed before it is added to the others."""
        weight = self._binding.weight
        return gradient * weight if weight != 1.0 and self._runtime.mixes_gradients else gradient

    def _launch(self) -> None:
        binding, rows = self._binding, self._grads[self._launched]
        if binding.check:
            self._nonfinite.look(self._launched, rows, self._runtime.step + 1)
        if binding.weight != 1.0 and binding.accumulate == 1:
            rows.mul_(binding.weight)
        self._runtime.gradient_ready(self._launched, rows)
        self._launched += 1

    def _end_of_backward(self) -> None:
        self._called_back = False
        self.done_at = time.perf_counter()
        _refuse_reentrant(sys._getframe())
        self._binding.backwards += 1
        if self._binding.backwards < self._binding.accumulate or not self._runtime.mixes_gradients:
            return
        params = self._binding.params
        used = [[p.grad is not None for p in row] for row in params]
        while self._launched < len(self._ready):
            self._fill_unused(self._launched)
            self._launch()
        self._ready = [set() for _ in self._ready]
        self._launched = 0
        used = self._agree(used)
        for views, row, flags in zip(self._views, params, used, strict=True):
            for view, p, flag in zip(views, row, flags, strict=True):
                if p.grad is None and flag:
                    p.grad = view

    def _fill_unused(self, bucket: int) -> None:
        """Zeros for what was unused in this pass; an earlier one of the same step may have left something."""
        for slot, (view, p) in enumerate(zip(self._views[bucket], self._binding.params[bucket], strict=True)):
            if slot in self._ready[bucket]:
                continue
            if p.grad is None:
                view.zero_()
            elif p.grad.data_ptr() != view.data_ptr():
                view.copy_(p.grad)
                p.grad = view

    def _agree(self, used: list[list[bool]]) -> list[list[bool]]:
        """Which parameters anybody used, and whether anybody's gradient was not finite: agreed in one small message."""
        if not self._binding.check:
            self._runtime.gradients_done(None)
            return used
        agreed = self._runtime.gradients_done([*(f for row in used for f in row), self._nonfinite.found])
        assert agreed is not None
        self.overflow = agreed.pop()
        self._nonfinite.judge(self.overflow)
        return [[agreed.pop(0) for _ in row] for row in used]


class StepGradients:
    """Gradients of ``binding``'s parameters when the optimiser is about to step."""

    done_at = 0.0
    overflow = False

    def __init__(self, binding: Binding, runtime: Runtime, nonfinite: NonFinite) -> None:
        self._binding, self._runtime, self._nonfinite = binding, runtime, nonfinite
        self._hidden: list[tuple[nn.Parameter, Tensor | None]] = []

    def hook(self) -> list[Any]:
        """Where several passes make a step, each has its own share of samples: it is weighed before it is added to the others."""
        if self._binding.accumulate == 1 or not self._runtime.weighs_gradients:
            return []
        return [p.register_hook(self._weighed) for params in self._binding.params for p in params]

    def _weighed(self, gradient: Tensor) -> Tensor:
        return gradient * self._binding.weight if self._binding.weight != 1.0 else gradient

    def exchange(self) -> None:
        """They travel with the step."""

    def rows(self) -> list[Tensor]:
        """This step's gradients as rows of their own: those that are sent must not be written to any more."""
        binding, fresh = self._binding, [b.empty(1) for b in self._binding.layout.buckets]
        for b, (bucket, rows, params) in enumerate(zip(binding.layout.buckets, fresh, binding.params, strict=True)):
            for view, p in zip(bucket.views(rows, 0), params, strict=True):
                if p.grad is not None:
                    if p.grad.is_sparse:
                        raise HocketError(SPARSE)
                    view.copy_(p.grad)
            if binding.check:
                self._nonfinite.look(b, rows, self._runtime.step + 1)
            if self._runtime.weighs_gradients and binding.weight != 1.0 and binding.accumulate == 1:
                rows.mul_(binding.weight)
        self._nonfinite.judge(self._nonfinite.found)
        return fresh

    def hide(self) -> None:
        """The worker's own optimiser finds no gradients, so it changes nothing."""
        self._hidden = [(p, p.grad) for params in self._binding.params for p in params]
        for p, _ in self._hidden:
            p.grad = None

    def show(self) -> None:
        """Give them back."""
        for p, gradient in self._hidden:
            p.grad = gradient
        self._hidden = []


def check_passes(binding: Binding, runtime: Runtime) -> None:
    """Refuse a step after another number of backward passes than ``accumulate``, where that matters."""
    passes, accumulate = binding.backwards, binding.accumulate
    if passes and passes < accumulate:
        raise HocketError(f"optimizer.step() after {passes} backward passes, but accumulate={accumulate}; make them agree.")
    if passes > accumulate and runtime.mixes_gradients and not runtime.linear:
        raise HocketError(
            f"optimizer.step() after {passes} backward passes, but accumulate={accumulate}: each was exchanged, "
            f"and {binding.strategy} mixes what it mixed before; say accumulate={passes}."
        )


class StepSkipper(Protocol):
    """What a GradScaler needs of a job."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def attached(self) -> bool: ...

    @property
    def runtime(self) -> Runtime: ...

    @property
    def overflow(self) -> bool: ...

    def skip_step(self) -> None: ...


def share_overflow(job: StepSkipper, scaler: Any) -> None:
    """GradScaler finds overflow per process; all must skip together, or their exchanges no longer meet."""
    unscale = scaler._unscale_grads_

    def agreed(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = unscale(optimizer, *args, **kwargs)
        if optimizer is not job.optimizer or not job.attached:
            return found
        own = job.overflow or any(bool(overflow > 0) for overflow in found.values())
        skips = job.runtime.any_worker(own)
        for overflow in found.values():
            overflow.fill_(float(skips))
        if skips and not getattr(optimizer, "_step_supports_amp_scaling", False):  # those are called, and skip by themselves
            job.skip_step()
        return found

    scaler._unscale_grads_ = agreed


def _refuse_reentrant(frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code is _REENTRANT:
            raise HocketError("Reentrant checkpointing ends the backward pass early; use checkpoint(…, use_reentrant=False).")
        frame = frame.f_back
