"""Asynchronous PipeDream: the pipe is never drained between mini-batches, and the backward of every mini-batch updates each stage.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019. Stage ``s`` of ``S`` has up to ``S − s``
mini-batches in flight. *Weight stashing*: the backward of a mini-batch uses the weights that its forward used, although the stage
has been updated since. So the gradient that stage ``s`` applies is ``S − 1 − s`` updates old:

    w_s ← update(w_s, g_s(j)),   g_s(j) at the weights that stage s had at the forward of mini-batch j

A tied parameter has a copy on several stages. The lowest of them, ``a``, adds up the copies' gradients of a mini-batch, updates its
own and sends the new value to the others; a copy on stage ``s`` takes it ``s − a + 1`` of its own updates later. So all copies have
the same sequence of values, also when the learning rate changes, and no stage waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hocket.errors import HocketError
from hocket.split.axis import Axis
from hocket.split.pipeline.cut import Cut
from hocket.split.pipeline.hold import held
from hocket.split.pipeline.schedules import Action
from hocket.split.pipeline.stage import LossFunction
from hocket.split.pipeline.stage_comm import StageComm
from hocket.split.pipeline.timeline import Span, Timeline, gather
from hocket.split.pipeline.trace import Wire

_LOSS = Wire("loss", torch.float32, (), grad=False)
_TIED_TAG = 1 << 30
_KEPT_SPANS = 400


@dataclass
class _Flight:
    """A mini-batch between its forward and its backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    weights: dict[str, Tensor]
    loss: Tensor | None


class PipeDream:
    """One stage of a pipe that is never drained between mini-batches.

    Feed it one mini-batch after another, and drain it at the end. ``update`` is called after each backward, with the gradients in
    ``p.grad``: it takes the optimiser's step (and that of a schedule of rates).
    """

    def __init__(
        self, cut: Cut, axis: Axis, loss_fn: LossFunction, update: Callable[[], Any] | None = None, draws: Any = None
    ) -> None:
        if len(cut.stages) != axis.size:
            raise HocketError(
                f"pipedream has one stage on each process; got {len(cut.stages)} for {axis.size}: cut into {axis.size}."
            )
        self.axis, self.loss_fn, self.update, self.draws = axis, loss_fn, update, draws
        self._names = cut.names
        self._place, self._last = axis.place, axis.size - 1
        self._stage = cut.stages[axis.place]
        self.module: nn.Module = held([self._stage])
        self._enter = cut.wires[axis.place - 1] if axis.place else ()
        self._leave = cut.wires[axis.place] if axis.place < self._last else ()
        self.delay = self._last - self._place
        """Updates that this stage makes between a mini-batch's forward and its backward, once the pipe is full."""
        self.spans: deque[Span] = deque(maxlen=_KEPT_SPANS)
        """The latest actions."""
        self._tied = _tied_here(cut, self.module, axis)
        self._restart()

    def _restart(self) -> None:
        self._stage_comm: StageComm | None = None
        self._waiting: tuple[Tensor, Tensor, int] | None = None
        self._flights: dict[int, _Flight] = {}
        self._weights: dict[str, Tensor] | None = None
        self._fed = self._back = 0
        self._losses: deque[Tensor] = deque()
        self._tied_works: deque[list[tuple[Tensor, Any]]] = deque()

    # --- calls of the training ---------------------------------------------------------------------------------------------

    @property
    def versions(self) -> int:
        """How many versions of its weights the stage keeps at the moment, its newest included."""
        return len({id(flight.weights) for flight in self._flights.values()} | ({id(self._weights)} if self._weights else set()))

    def feed(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Accept a mini-batch; the loss of the one that has left the pipe, the same on all processes, or None while it fills.

        A mini-batch is processed when the next one is known, so that its inputs are already being received.
        """
        if self._stage_comm is None:
            self._stage_comm = StageComm(self.axis, x.device)
            self.spans.clear()
        self._expect_inputs(self._fed, len(x))
        self._fed += 1
        previous, self._waiting = self._waiting, (x, y, getattr(self.draws, "step", 0))
        if previous is not None:
            self._turn(self._fed - 2, *previous)
        return self._left()

    def drain(self) -> list[Tensor]:
        """Process the mini-batches left in the pipe; the losses not yet returned, in order. The pipe can then be fed again."""
        if self._stage_comm is None:
            return []
        if self._waiting is not None:
            self._turn(self._fed - 1, *self._waiting)
        while self._back < self._fed:
            self._backward(self._back)
        self._finish_tied()
        self._stage_comm.settle()
        losses = list(self._losses)
        self._restart()
        return losses

    def timeline(self) -> Timeline:
        """The timeline of all processes since the pipe was first fed; all processes must call it."""
        return gather(self.axis, self.spans)

    # --- forward and backward ----------------------------------------------------------------------------------------------

    @property
    def _comm(self) -> StageComm:
        assert self._stage_comm is not None
        return self._stage_comm

    def _turn(self, j: int, x: Tensor, y: Tensor, step: int) -> None:
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

    def _left(self) -> Tensor | None:
        """The loss of the mini-batch that has left the first stage by now, if one has."""
        gone = self._fed - 2 - self._last >= 0
        return self._losses.popleft() if gone else None

    def _expect_inputs(self, j: int, size: int) -> None:
        if self._place:
            self._comm.expect(self._place - 1, "ahead", j, self._enter, size)

    def _forward(self, j: int, x: Tensor, y: Tensor) -> None:
        values = self._comm.take(self._place - 1, "ahead", j) if self._place else [x]
        inputs = [v.detach().requires_grad_(w.grad) for v, w in zip(values, self._enter, strict=True)] if self._enter else values
        start = time.perf_counter()
        weights = self._newest()
        given = functional_call(self._stage, weights, tuple(inputs))
        loss = None
        if self._place == self._last:
            loss = self.loss_fn(given, y)
            given = [loss]
        else:
            given = [t.to(w.dtype) for t, w in zip(given, self._leave, strict=True)]
        self._flights[j] = _Flight(list(inputs), list(given), weights, None if loss is None else loss.detach())
        self._done("F", j, start)
        if self._place < self._last:
            self._comm.send(self._place, "ahead", j, [t.detach() for t in given])
            self._comm.expect(self._place, "back", j, [*(w for w in self._leave if w.grad), _LOSS], len(x))

    def _backward(self, j: int) -> None:
        coming = self._comm.take(self._place, "back", j) if self._place < self._last else []
        self._comm.sent(self._place, "ahead", j)
        flight = self._flights.pop(j)
        start = time.perf_counter()
        loss = flight.loss.float() if flight.loss is not None else coming.pop()
        back, grads = self._gradients(flight, coming)
        self._back += 1
        if self._place:
            self._comm.send(self._place - 1, "back", j, [*back, loss])
            self._comm.sent(self._place - 1, "back", j - 2 * self.axis.size)
        self._set(grads)
        self._set_tied(j, grads)
        self._step()
        self._hand_tied(j)
        self._done("B", j, start)
        self._losses.append(loss)

    def _gradients(self, flight: _Flight, coming: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor | None]]:
        """Gradients of the inputs, and of the weights that the forward used."""
        outputs = [t for t, w in zip(flight.outputs, self._leave, strict=True) if w.grad] if self._leave else flight.outputs
        inputs = [t for t, w in zip(flight.inputs, self._enter, strict=False) if w.grad]
        weights = {name: w for name, w in flight.weights.items() if w.requires_grad}
        wanted = [*inputs, *weights.values()]
        if not wanted or not outputs:
            return [torch.zeros_like(t) for t in inputs], {}
        found = torch.autograd.grad(outputs, wanted, coming if self._leave else None, allow_unused=True)
        back = [torch.zeros_like(t) if g is None else g for g, t in zip(found, inputs, strict=False)]
        return back, dict(zip(weights, found[len(inputs) :], strict=True))

    # --- weights -----------------------------------------------------------------------------------------------------------

    def _newest(self) -> dict[str, Tensor]:
        """The newest weights, in a copy that later updates do not change; the last stage needs none."""
        if self._weights is None:
            own = dict(self._stage.named_parameters())
            copies = {name: p.detach() if self.delay == 0 else p.detach().clone() for name, p in own.items()}
            self._weights = {name: t.requires_grad_(own[name].requires_grad) for name, t in copies.items()}
        return self._weights

    def _set(self, grads: dict[str, Tensor | None]) -> None:
        parameters = dict(self._stage.named_parameters())
        for name, grad in grads.items():
            parameters[name].grad = grad

    def _step(self) -> None:
        if self.update is not None:
            self.update()
        self._weights = None  # mini-batches in flight keep their reference

    # --- tied parameters ---------------------------------------------------------------------------------------------------

    def _set_tied(self, j: int, grads: dict[str, Tensor | None]) -> None:
        """The lowest stage receives the others' gradients and sums them; only its own copy is updated."""
        first = {self._names[name]: grad for name, grad in grads.items()}
        for i, (name, (parameter, places)) in enumerate(self._tied.items()):
            own = first.get(name)
            own = torch.zeros_like(parameter) if own is None else own.contiguous()
            if self._place == places[0]:
                parameter.grad = self._collect(own, places, i)
            else:
                self._send_tied(own, [places[0]], i)
                parameter.grad = None

    def _collect(self, own: Tensor, places: list[int], i: int) -> Tensor:
        total = own.clone()
        for p in places[1:]:
            into = torch.empty_like(own)
            self.axis.wait(self.axis.receive(into, p, _TIED_TAG + i))
            total += into
        return total

    def _hand_tied(self, j: int) -> None:
        """After the update of mini-batch ``j``: the lowest stage sends its new value; the others take the one that is due."""
        for i, (parameter, places) in enumerate(self._tied.values()):
            if self._place == places[0]:
                self._send_tied(parameter.detach().clone(), places[1:], i)
            elif j >= self._late(places):
                self._take_tied(parameter, places[0], i)

    def _send_tied(self, values: Tensor, to: list[int], i: int) -> None:
        """Start sending, and release tensors that have arrived."""
        self._tied_works.append([(values, self.axis.send(values, p, _TIED_TAG + i)) for p in to])
        while len(self._tied_works) > 2 * self.axis.size * len(self._tied):
            for _, work in self._tied_works.popleft():
                self.axis.wait(work)

    def _late(self, places: list[int]) -> int:
        return self._place - places[0] + 1

    def _take_tied(self, parameter: nn.Parameter, source: int, i: int) -> None:
        into = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        self.axis.wait(self.axis.receive(into, source, _TIED_TAG + i))
        parameter.data.copy_(into)

    def _finish_tied(self) -> None:
        """The values that are still to come."""
        for i, (parameter, places) in enumerate(self._tied.values()):
            if self._place != places[0]:
                for _ in range(min(self._late(places), self._fed)):
                    self._take_tied(parameter, places[0], i)
        for works in self._tied_works:
            for _, work in works:
                self.axis.wait(work)

    def _done(self, kind: Any, j: int, start: float) -> None:
        self.spans.append(Span(Action(kind, self._place, j), start, time.perf_counter()))


def _tied_here(cut: Cut, module: nn.Module, axis: Axis) -> dict[str, tuple[nn.Parameter, list[int]]]:
    """The parameters in ``module`` that other processes hold too: with all processes that do, in order."""
    here = {cut.names[name]: p for name, p in module.named_parameters(remove_duplicate=False)}
    places = {name: sorted({k % axis.size for k in stages}) for name, stages in cut.tied.items()}
    return {name: (here[name], at) for name, at in places.items() if name in here and len(at) > 1 and here[name].requires_grad}
