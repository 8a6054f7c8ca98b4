"""Asynchronous PipeDream: the pipe is never drained between mini-batches, and the backward of every mini-batch updates each stage.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019. Stage ``s`` of ``S`` has up to ``S − s``
mini-batches in flight. *Weight stashing*: the backward of a mini-batch uses the weights that its forward used, although the stage
has been updated since. So the gradient that stage ``s`` applies is ``S − 1 − s`` updates old:

    w_s ← update(w_s, g_s(j)),   g_s(j) at the weights that stage s had at the forward of mini-batch j

A tied parameter has a copy on several stages (:class:`~hocket.split.pipeline.tied.LateTied`). All copies have the same sequence of
values, also when the learning rate changes, and no stage waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hocket.errors import HocketError
from hocket.split.axis import Axis
from hocket.split.inputs import Inputs, first_tensor
from hocket.split.pipeline.cut import Cut
from hocket.split.pipeline.schedules import Action, Kind
from hocket.split.pipeline.stage import LossFunction, Stage, StageComm
from hocket.split.pipeline.tied import LateTied
from hocket.split.pipeline.timeline import Span
from hocket.split.pipeline.trace import Wire

_LOSS = Wire("loss", torch.float32, (), grad=False)
_KEPT_SPANS = 400


class PipeDream:
    """One stage of a pipe that is never drained between mini-batches.

    Feed it one mini-batch after another, and drain it at the end. ``update`` is called after each backward, with the gradients in
    ``p.grad``: it takes the optimiser's step (and that of a schedule of rates).
    """

    def __init__(self, cut: Cut, axis: Axis, loss_fn: LossFunction, draws: Any = None) -> None:
        if len(cut.stages) != axis.size:
            raise HocketError(
                f"pipedream has one stage on each process; got {len(cut.stages)} for {axis.size}: cut into {axis.size}."
            )
        self.axis, self.loss_fn, self.draws = axis, loss_fn, draws
        self.update: Callable[[], Any] | None = None
        self._place, self._last = axis.place, axis.size - 1
        borders = [(), *cut.wires, ()]
        self._stage = Stage(cut.stages[axis.place], borders[axis.place], borders[axis.place + 1], stash=True)
        self.delay = self._last - self._place
        """Updates that this stage makes between a mini-batch's forward and its backward, once the pipe is full."""
        self.spans: deque[Span] = deque(maxlen=_KEPT_SPANS)
        """The latest actions."""
        here = {cut.names[name]: p for name, p in self._stage.module.named_parameters(remove_duplicate=False)}
        self._tied = LateTied(here, cut.tied, axis)
        self._restart()

    def _restart(self) -> None:
        self._stage_comm: StageComm | None = None
        self._waiting: tuple[Inputs, Any, int] | None = None
        self._fed = self._back = 0
        self._own_losses: deque[Tensor] = deque()
        """Of the last stage's mini-batch in flight."""
        self._losses: deque[Tensor] = deque()

    # --- calls of the training ---------------------------------------------------------------------------------------------

    @property
    def versions(self) -> int:
        return self._stage.versions

    def feed(self, x: Inputs, y: Any = None) -> Tensor | None:
        """Accept a mini-batch; the loss of the one that has left the pipe, the same on all processes, or None while it fills.

        A mini-batch is processed when the next one is known, so that its inputs are already being received.
        """
        if self._stage_comm is None:
            self._stage_comm = StageComm(self.axis, first_tensor(x).device)
            self.spans.clear()
        if self._place:
            self._stage_comm.expect(self._place - 1, "ahead", self._fed, self._stage.expected(x, self._stage.enter))
        self._fed += 1
        previous, self._waiting = self._waiting, (x, y, getattr(self.draws, "step", 0))
        if previous is not None:
            self._turn(self._fed - 2, *previous)
        return self._losses.popleft() if self._fed - 2 - self._last >= 0 else None

    def drain(self) -> list[Tensor]:
        """Process the mini-batches left in the pipe; the losses not yet returned, in order. The pipe can then be fed again."""
        if self._stage_comm is None:
            return []
        if self._waiting is not None:
            self._turn(self._fed - 1, *self._waiting)
        while self._back < self._fed:
            self._backward(self._back)
        self._tied.finish(self._fed)
        self._stage_comm.settle()
        self._stage.updated()
        losses = list(self._losses)
        self._restart()
        return losses

    # --- forward and backward ----------------------------------------------------------------------------------------------

    @property
    def _comm(self) -> StageComm:
        assert self._stage_comm is not None
        return self._stage_comm

    def _turn(self, j: int, x: Inputs, y: Any, step: int) -> None:
        now = getattr(self.draws, "step", 0)
        self._draw_for(step)
        self._forward(j, x, y)
        self._draw_for(now)
        if j >= self.delay:
            self._backward(j - self.delay)

    def _draw_for(self, step: int) -> None:
        """A mini-batch draws as in the step in which it was fed."""
        if hasattr(self.draws, "begin"):
            self.draws.begin(step)
        elif self.draws is not None:
            self.draws.first_sample = 0

    def _forward(self, j: int, x: Inputs, y: Any) -> None:
        values = self._comm.take(self._place - 1, "ahead", j) if self._place else []
        start = time.perf_counter()
        finish = (lambda output: self.loss_fn(output, y)) if self._place == self._last else None
        given = self._stage.forward(j, x, values, finish)
        self._done("F", j, start)
        if self._place == self._last:
            self._own_losses.append(given[0].float())
        else:
            self._comm.send(self._place, "ahead", j, given)
            coming = [*(w for w in self._stage.leave if w.grad), _LOSS]
            self._comm.expect(self._place, "back", j, self._stage.expected(x, coming))

    def _backward(self, j: int) -> None:
        *grads, loss = [self._own_losses.popleft()] if self._place == self._last else self._comm.take(self._place, "back", j)
        self._comm.sent(self._place, "ahead", j)
        start = time.perf_counter()
        back = self._stage.backward(j, grads)
        self._back += 1
        if self._place:
            self._comm.send(self._place - 1, "back", j, [*back, loss])
            self._comm.sent(self._place - 1, "back", j - 2 * self.axis.size)
        self._tied.before_update()
        if self.update is not None:
            self.update()
        self._stage.updated()
        self._tied.after_update(j)
        self._done("B", j, start)
        self._losses.append(loss)

    def _done(self, kind: Kind, j: int, start: float) -> None:
        self.spans.append(Span(Action(kind, self._place, j), start, time.perf_counter()))
