"""Messages between stages: activations forward, gradients backward.

All messages are sent and received in the background, from and to host memory (Gloo supports nothing else).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hocket.split.axis import Axis
from hocket.split.pipeline.trace import Wire

Way = Literal["ahead", "back"]
Key = tuple[int, Way, int]
"""A border (border ``k`` lies between stages ``k`` and ``k + 1``), a direction, and a micro-batch."""
_MICROBATCHES, _WIRES = 1 << 10, 1 << 5
"""Tags repeat beyond these; messages of one tag arrive in order."""


@dataclass
class StageComm:
    """A process's messages to and from neighbouring stages."""

    axis: Axis
    device: torch.device
    _coming: dict[Key, list[tuple[Tensor, Any]]] = field(default_factory=dict)
    _leaving: dict[Key, list[tuple[Tensor, Any]]] = field(default_factory=dict)
    _here: dict[Key, list[Tensor]] = field(default_factory=dict)

    def send(self, border: int, way: Way, microbatch: int, values: Sequence[Tensor]) -> None:
        """Start sending. The tensors must not be changed afterwards."""
        key, to = (border, way, microbatch), self._far_end(border, way == "ahead")
        if to == self.axis.place:
            self._here[key] = list(values)
            return
        whole = [value.contiguous().cpu() for value in values]
        self._leaving.setdefault(key, []).extend((v, self.axis.send(v, to, _tag(key, i))) for i, v in enumerate(whole))

    def expect(self, border: int, way: Way, microbatch: int, wires: Sequence[Wire], batch: int) -> None:
        """Start receiving; does nothing when that was done before."""
        key, source = (border, way, microbatch), self._far_end(border, way == "back")
        if key in self._coming or source == self.axis.place:
            return
        into = [torch.empty(wire.shape(batch), dtype=wire.dtype, device="cpu") for wire in wires]
        self._coming[key] = [(t, self.axis.receive(t, source, _tag(key, i))) for i, t in enumerate(into)]

    def take(self, border: int, way: Way, microbatch: int) -> list[Tensor]:
        """Wait for an expected message; its tensors."""
        key = (border, way, microbatch)
        if key in self._here:
            return self._here.pop(key)
        coming = self._coming.pop(key)
        for _, work in coming:
            self.axis.wait(work)
        return [value.to(self.device) for value, _ in coming]

    def sent(self, border: int, way: Way, microbatch: int) -> None:
        """Release a message that has arrived."""
        for _, work in self._leaving.pop((border, way, microbatch), []):
            self.axis.wait(work)

    def settle(self) -> None:
        """Wait until all messages have been sent."""
        for key in list(self._leaving):
            self.sent(*key)

    def _far_end(self, border: int, behind: bool) -> int:
        return (border + behind) % self.axis.size


def _tag(key: Key, wire: int) -> int:
    border, way, microbatch = key
    return ((border * 2 + (way == "back")) * _MICROBATCHES + microbatch % _MICROBATCHES) * _WIRES + wire
