"""Parameters that several stages of a pipeline hold, such as an embedding that is also the head.

Each such stage computes a part of the gradient. The first stage sums these in the order of the stages and sends the sum to the
others, so that all take the same step. (Asynchronous PipeDream does the same inside the pipe.)
"""

from __future__ import annotations

from collections.abc import Mapping

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

    def __bool__(self) -> bool:
        return bool(self._held)

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def first(self, name: str) -> bool:
        """Whether this process is the first that holds ``name`` (or the only one)."""
        return name not in self._held or self._held[name][1][0] == self.axis.place

    def sum_gradients(self) -> None:
        """Every copy's gradient becomes the sum over all."""
        for parameter, places in self._held.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._through_first(parameter.grad, places, summed=True)

    def copy_weights(self) -> None:
        """Every copy becomes the first one."""
        for parameter, places in self._held.values():
            self._through_first(parameter.data, places, summed=False)

    def _through_first(self, values: Tensor, places: list[int], summed: bool) -> None:
        axis, (first, *others) = self.axis, places
        if axis.place != first:
            if summed:
                axis.wait(axis.send(values.contiguous(), first, _TAG))
            buffer = torch.empty_like(values, memory_format=torch.contiguous_format)
            axis.wait(axis.receive(buffer, first, _TAG))
            values.copy_(buffer)
            return
        if summed:
            for other in others:
                buffer = torch.empty_like(values, memory_format=torch.contiguous_format)
                axis.wait(axis.receive(buffer, other, _TAG))
                values += buffer
        for work in [axis.send(values.contiguous(), other, _TAG) for other in others]:
            axis.wait(work)
