"""Parameters that several stages of a pipeline hold, such as an embedding that is also the head.

Each such stage computes a part of the gradient. The first stage sums these in the order of the stages and sends the sum to the
others, so that all take the same step; PipeDream, whose stages never stand still together, sends new values instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.split.axis import Axis

_TAG = 1 << 29


class Tied:
    """The tied parameters held by this process; each has the processes of the axis that hold it."""

    def __init__(self, held: Mapping[str, nn.Parameter], stages: Mapping[str, tuple[int, ...]], axis: Axis) -> None:
        """``stages`` are those that hold each tied parameter; stage ``k`` lies on process ``k`` modulo their number."""
        self.axis = axis
        places = {name: sorted({stage % axis.size for stage in found}) for name, found in stages.items()}
        self._held = {n: (held[n], at) for n, at in sorted(places.items()) if n in held and len(at) > 1 and held[n].requires_grad}

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def first(self, name: str) -> bool:
        """Whether this process is the first that holds ``name`` (or the only one)."""
        return name not in self._held or self._held[name][1][0] == self.axis.place

    def sum_gradients(self) -> None:
        """Every copy's gradient becomes the sum over all."""
        for parameter, (first, *others) in self._held.values():
            grad = parameter.grad = _gradient(parameter)
            if self.axis.place == first:
                for other in others:
                    grad += self._received(grad, other, _TAG)
            else:
                self.axis.wait(self.axis.send(grad.contiguous(), first, _TAG))
            self._copy_first(grad, first, others)

    def copy_weights(self) -> None:
        """Every copy becomes the first one."""
        for parameter, (first, *others) in self._held.values():
            self._copy_first(parameter.data, first, others)

    def _copy_first(self, values: Tensor, first: int, others: Sequence[int]) -> None:
        if self.axis.place != first:
            values.copy_(self._received(values, first, _TAG))
            return
        for work in [self.axis.send(values.contiguous(), other, _TAG) for other in others]:
            self.axis.wait(work)

    def _received(self, like: Tensor, source: int, tag: int) -> Tensor:
        into = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.axis.wait(self.axis.receive(into, source, tag))
        return into


class LateTied(Tied):
    """Under PipeDream the lowest stage ``a`` adds up the gradients of a mini-batch, updates its own copy and sends the new value; a
    copy on stage ``s`` takes it ``s − a + 1`` of its own updates later."""

    def __init__(self, held: Mapping[str, nn.Parameter], stages: Mapping[str, tuple[int, ...]], axis: Axis) -> None:
        super().__init__(held, stages, axis)
        self._works: deque[list[tuple[Tensor, Any]]] = deque()

    def before_update(self) -> None:
        """The lowest stage receives the others' gradients and sums them; only its own copy is updated."""
        for tag, (parameter, (first, *others)) in enumerate(self._held.values(), 2 * _TAG):
            own = _gradient(parameter).contiguous()
            if self.axis.place != first:
                self._send(own, [first], tag)
                parameter.grad = None
                continue
            parameter.grad = total = own.clone()
            for other in others:
                total += self._received(own, other, tag)

    def after_update(self, minibatch: int) -> None:
        """The lowest stage sends its new value; the others take the one that is due."""
        for tag, (parameter, (first, *others)) in enumerate(self._held.values(), 2 * _TAG):
            if self.axis.place == first:
                self._send(parameter.detach().clone(), others, tag)
            elif minibatch > self.axis.place - first:
                parameter.data.copy_(self._received(parameter, first, tag))

    def finish(self, minibatches: int) -> None:
        """Take the values that are still to come."""
        for tag, (parameter, (first, *_)) in enumerate(self._held.values(), 2 * _TAG):
            if self.axis.place != first:
                for _ in range(min(self.axis.place - first + 1, minibatches)):
                    parameter.data.copy_(self._received(parameter, first, tag))
        self._release(0)

    def _send(self, values: Tensor, to: Sequence[int], tag: int) -> None:
        self._works.append([(values, self.axis.send(values, place, tag)) for place in to])
        self._release(2 * self.axis.size * len(self._held))

    def _release(self, most: int) -> None:
        """Wait for the oldest messages, until at most ``most`` are on their way."""
        while len(self._works) > most:
            for _, work in self._works.popleft():
                self.axis.wait(work)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
