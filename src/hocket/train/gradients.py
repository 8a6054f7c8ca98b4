"""Gradients on their way from autograd into rows.

:class:`BucketedGradients` take them bucket by bucket, while the backward pass goes on:

- A post-accumulate-grad hook per parameter fills the buckets; full ones are launched in bucket order, during the backward pass.
- Exchanges of gradients end in a callback at the end of the backward pass, before ``backward()`` returns, so that gradient clipping
  sees mixed values. Where several jobs have gradients in one pass, each launches all of its buckets before any of them waits: the
  order of the jobs' callbacks may differ from worker to worker.

A gradient stays None only if the parameter was unused by all workers, and no residual of an earlier gradient arrived. Reentrant
checkpointing would fire the callback too early and is refused. :class:`StepGradients` take them when the optimiser is about to
step, clipped or accumulated as the loop did it; an unused parameter counts as zeros.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Variable

from hocket.cluster.dtensor import local, with_local
from hocket.errors import HocketError
from hocket.train.checks import SPARSE
from hocket.train.runtimes.base import Binding, Runtime
from hocket.train.watch import NonFinite

_REENTRANT = torch.utils.checkpoint.CheckpointFunction.backward.__code__
_NESTED = torch.autograd.function.BackwardCFunction.apply.__code__
"""Of a custom function's backward: a backward pass that begins inside it is a part of the one around it."""


class BucketedGradients:
    """Takes gradients of ``binding``'s parameters and hands them to ``runtime`` in buckets."""

    def __init__(self, binding: Binding, runtime: Runtime, nonfinite: NonFinite, scaler: Any = None) -> None:
        """``scaler``: the GradScaler that scaled the loss; codes and their residuals see gradients without its factor."""
        self._binding, self._runtime, self._nonfinite, self._scaler = binding, runtime, nonfinite, scaler
        self._scale = 1.0
        buckets = binding.layout.buckets
        self._grads = [b.empty(1) for b in buckets]
        self._views = [b.views(g, 0) for b, g in zip(buckets, self._grads, strict=True)]
        both = zip(self._views, binding.params, strict=True)
        self._mixed = [[with_local(view, p) for view, p in zip(views, row, strict=True)] for views, row in both]
        """The same as the parameters have them: where these are distributed, so are their gradients."""
        self._ready: list[set[int]] = [set() for _ in buckets]
        self._used: list[list[bool]] = []
        self._launched = 0
        self._sent = 0
        self._pass: int | None = None
        self._exchanged_at = -1  # the number of steps done when gradients were exchanged last
        self._versions: list[int] = []  # of the rows after the exchange: whoever writes to a gradient changes them
        self._late = self._changed = False  # whether an exchange was ever late; whether the loop changes gradients
        self.overflow = False
        """Whether any worker's gradient of the last pass was not finite, as far as somebody looked."""
        self.done_at = 0.0
        """When the last backward pass had computed all gradients (``time.perf_counter``); exchanges may go on after it."""

    def hook(self) -> list[Any]:
        """Set a hook on every parameter; returns the handles."""
        handles: list[Any] = []
        for b, params in enumerate(self._binding.params):
            for s, p in enumerate(params):
                handles.append(p.register_post_accumulate_grad_hook(lambda p, b=b, s=s: self._on_gradient(b, s, p)))
                if self._binding.accumulate > 1:
                    handles.append(p.register_hook(self._weighed))
        return handles

    def rows(self) -> list[Tensor]:
        """No rows: buckets were handed over during the backward pass."""
        return []

    def hide(self) -> None:
        """Nothing to hide: the optimiser reads the mixed gradients."""

    def show(self) -> None:
        """Nothing was hidden."""

    def exchange(self) -> None:
        """Exchange the gradients that are there, where this step exchanges any: they came without hooks, or from fewer backward
        passes than ``accumulate``. Those that the last backward pass has exchanged are not exchanged again."""
        if self._exchanged_at == self._runtime.step:
            return
        if self._runtime.alone or not self._runtime.mixes_gradients:
            self._binding.backwards += 1
            return
        self._binding.backwards = max(self._binding.backwards, self._binding.accumulate - 1)
        for b, params in enumerate(self._binding.params):
            for s, p in enumerate(params):
                if p.grad is not None:
                    self._take(b, s, p)
        if self._end_of_backward():
            self._finish_exchange()

    def exchange_late(self, closure: bool = False) -> None:
        """A step of fewer backward passes than ``accumulate``, such as an epoch's last: its gradients are exchanged before it.
        After a pass that used no parameter of this job the others wait for zeros; a ``closure`` may still make one."""
        passes, accumulate = self._binding.backwards, self._binding.accumulate
        if not self._runtime.mixes_gradients or self._runtime.alone:
            return
        if 0 < passes < accumulate:
            if self._scaler is not None:
                raise HocketError(
                    f"optimizer.step() after {passes} backward passes, but accumulate={accumulate}, so their gradients were not "
                    "exchanged before the scaler looked at them; call job.exchange() before scaler.step(…) or scaler.unscale_(…)."
                )
            self.exchange()
        elif not closure and self.take_part():
            self._late = True
        elif self._exchanged_at == self._runtime.step and self._scaler is None:
            self._changed |= self._versions != [rows._version for rows in self._grads]
        if self._late and self._changed:
            raise HocketError(
                "optimizer.step() after a backward pass that used no parameter of this job, so its gradients were exchanged too "
                "late for what the loop does to them before the step, such as clipping; call job.exchange() after each backward()."
            )

    def begin_step(self) -> None:
        """Forget the step under way, which was interrupted: nothing of it was exchanged with the workers of the next one."""
        self._binding.backwards, self._exchanged_at, self._launched, self._sent, self._pass = 0, -1, 0, 0, None
        self._ready = [set() for _ in self._ready]

    def take_part(self) -> bool:
        """Exchange zeros if this step has neither exchanged anything nor computed a gradient; returns whether it did."""
        if self._binding.backwards or self._exchanged_at == self._runtime.step or not self._runtime.mixes_gradients:
            return False
        if any(p.grad is not None for p, _ in self._pairs()):
            return False  # of an earlier step: they are refused
        if self._pass is not None:
            self._abandon()
        self.exchange()
        return True

    def _on_gradient(self, bucket: int, slot: int, p: nn.Parameter) -> None:
        current = torch._C._current_graph_task_id()
        if current != self._pass and not (self._pass is not None and _inside(sys._getframe(), _NESTED)):
            if self._pass is not None:
                self._abandon()
            self._pass = current
            self._look_for_discarded()
            Variable._execution_engine.queue_callback(self._on_end_of_backward)
        if self._binding.backwards + 1 < self._binding.accumulate or not self._runtime.mixes_gradients:
            return
        self._take(bucket, slot, p)

    def _look_for_discarded(self) -> None:
        """A pass begins after an exchange that no step used: find out whether the loop discarded it (``zero_grad()``), as for a
        GAN."""
        binding = self._binding
        if binding.backwards < binding.accumulate or self._runtime.linear or not self._runtime.mixes_gradients:
            return
        kept = (p.grad is not None and _is(p.grad, view) for p, view in self._pairs())
        if not any(kept):
            binding.backwards, self._exchanged_at = 0, -1
            self._runtime.discard_gradients()

    def _pairs(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for params, views in zip(self._binding.params, self._views, strict=True):
            yield from zip(params, views, strict=True)

    def _abandon(self) -> None:
        """The pass before ended with an exception, which the loop caught. Buckets that it launched are with the other workers: they
        count, as this step's; the others come from the pass that begins."""
        self._sent = self._launched
        for ready in self._ready[self._sent :]:
            ready.clear()

    def _take(self, bucket: int, slot: int, p: nn.Parameter) -> None:
        view, params = self._views[bucket][slot], self._binding.params
        assert p.grad is not None
        if p.grad.is_sparse:
            raise HocketError(SPARSE)
        if bucket < self._sent:
            if _is(p.grad, view):
                raise HocketError(
                    "The last backward pass ended with an exception while some of its gradients were being exchanged; to skip "
                    "such a "
                    "batch, call optimizer.zero_grad(set_to_none=True) before the next one."
                )
            return
        if slot in self._ready[bucket]:
            raise HocketError(
                f"The gradient of {self._binding.layout.buckets[bucket].slots[slot].name} came twice in one backward pass, as "
                "under reentrant checkpointing of a module that is used twice; use checkpoint(…, use_reentrant=False)."
            )
        self._lay(bucket, slot, p)
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
        if binding.weight != 1.0 and binding.accumulate == 1 and not binding.copied:  # those of FSDP2 are of several processes
            rows.mul_(binding.weight)
        if self._scaler is not None and not self._runtime.linear:
            if self._launched == 0:
                self._scale = self._scaler.get_scale()
            rows.div_(self._scale)
        self._runtime.gradient_ready(self._launched, rows)
        self._launched += 1

    def _on_end_of_backward(self) -> None:
        if self._end_of_backward():
            Variable._execution_engine.queue_callback(self._finish_exchange)

    def _end_of_backward(self) -> bool:
        """Launch what has not been launched; whether there is an exchange to wait for."""
        self._pass = None
        self.done_at = time.perf_counter()
        _refuse_reentrant(sys._getframe())
        self._binding.backwards += 1
        if self._binding.backwards < self._binding.accumulate or not self._runtime.mixes_gradients:
            return False
        used = [[b < self._sent or p.grad is not None for p in row] for b, row in enumerate(self._binding.params)]
        while self._launched < len(self._ready):
            self._fill_unused(self._launched)
            self._launch()
        self._ready = [set() for _ in self._ready]
        self._launched = 0
        self._used = used
        if self._binding.check:
            self._runtime.flags_ready([*(f for row in used for f in row), self._nonfinite.found])
        return True

    def _finish_exchange(self) -> None:
        used, residuals = self._agreed(), self._runtime.keeps_residuals
        self._exchanged_at = self._runtime.step
        if self._scale != 1.0:  # the scaler takes it out of them
            for rows in self._grads:
                rows.mul_(self._scale)
        sent, self._sent = self._sent, 0
        for bucket, (views, row, flags) in enumerate(zip(self._views, self._binding.params, used, strict=True)):
            for slot, (view, p, flag) in enumerate(zip(views, row, flags, strict=True)):
                arrived = flag or (residuals and bool(view.any()))
                if (p.grad is None or bucket < sent) and arrived:
                    p.grad = self._mixed[bucket][slot]
                elif not arrived and self._binding.strategy.sync.predicts:  # what this pass used arrives in the next one
                    p.grad = None
        self._versions = [rows._version for rows in self._grads]

    def _fill_unused(self, bucket: int) -> None:
        """Fill parameters unused in this pass with zeros, or with what an earlier pass of the same step left."""
        for slot, (view, p) in enumerate(zip(self._views[bucket], self._binding.params[bucket], strict=True)):
            if slot in self._ready[bucket]:
                continue
            if p.grad is None:
                view.zero_()
            else:
                self._lay(bucket, slot, p)

    def _lay(self, bucket: int, slot: int, p: nn.Parameter) -> None:
        """Let the gradient lie in its row."""
        view, grad = self._views[bucket][slot], p.grad
        if grad is not None and not _is(grad, view):
            view.copy_(local(grad))
            p.grad = self._mixed[bucket][slot]

    def _agreed(self) -> list[list[bool]]:
        """Which parameters anybody used, and whether anybody's gradient was not finite: agreed in one small message."""
        agreed = self._runtime.gradients_done()
        if not self._binding.check:
            return self._used
        self.overflow = agreed.pop()
        self._nonfinite.judge(self.overflow)
        return [[agreed.pop(0) for _ in row] for row in self._used]


class StepGradients:
    """Takes the gradients of ``binding``'s parameters when the optimiser is about to step."""

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
        """Nothing to do: these gradients are exchanged in the step."""

    def exchange_late(self, closure: bool = False) -> None:
        """Nothing to do: these gradients are exchanged in the step."""

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
        """Hide the gradients from the worker's own optimiser, so that it changes nothing."""
        self._hidden = [(p, p.grad) for params in self._binding.params for p in params]
        for p, _ in self._hidden:
            p.grad = None

    def show(self) -> None:
        """Restore the hidden gradients."""
        for p, gradient in self._hidden:
            p.grad = gradient
        self._hidden = []


Gradients = BucketedGradients | StepGradients


def gradients_for(binding: Binding, runtime: Runtime, nonfinite: NonFinite, scaler: Any) -> Gradients:
    """During the backward pass where all workers step together, otherwise before the step."""
    if runtime.synchronous:
        return BucketedGradients(binding, runtime, nonfinite, scaler)
    return StepGradients(binding, runtime, nonfinite)


def call_closure(runtime: Runtime, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """``optimizer.step(closure)``: whether there is a closure, and arguments in which it was replaced by its result.

    Its gradients must be there before the step's exchange, so it is called here. An optimiser that is not PyTorch's own may call it
    more than once, and calls it itself.
    """
    optimizer, *given = args
    closure = given[0] if given else kwargs.get("closure")
    if closure is None or not (runtime.takes_gradients or type(optimizer).__module__.startswith("torch.optim.")):
        return closure is not None, None
    with torch.enable_grad():
        loss = closure()
    if given:
        return True, ((optimizer, lambda: loss, *given[1:]), kwargs)
    return True, (args, {**kwargs, "closure": lambda: loss})


def check_passes(binding: Binding, runtime: Runtime, closure: bool = False) -> None:
    """Refuse a step after more backward passes than ``accumulate``, where that matters, or after none; a closure may make some."""
    passes, accumulate = binding.backwards, binding.accumulate
    if not passes and not closure and runtime.mixes_gradients and any(p.grad is not None for own in binding.params for p in own):
        raise HocketError(
            "optimizer.step() without a backward pass since the last step, so its gradients were not exchanged; call backward() "
            "before each step, or job.exchange() where gradients come from elsewhere."
        )
    if passes > accumulate and runtime.mixes_gradients and not runtime.linear:
        raise HocketError(
            f"optimizer.step() after {passes} backward passes, but accumulate={accumulate}: each pass was exchanged alone, and "
            f"{binding.strategy} would exchange earlier gradients again; use accumulate={passes}, make a step of an epoch's last "
            "passes, "
            "too, or discard gradients that are not for this optimiser with zero_grad(set_to_none=True)."
        )


def _is(grad: Tensor, view: Tensor) -> bool:
    return local(grad).data_ptr() == view.data_ptr()


def _refuse_reentrant(frame: FrameType) -> None:
    if _inside(frame, _REENTRANT):
        raise HocketError("Reentrant checkpointing ends the backward pass early; use checkpoint(…, use_reentrant=False).")


def _inside(frame: FrameType | None, code: CodeType) -> bool:
    """Whether a function was called, directly or not, by the one with that code."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
