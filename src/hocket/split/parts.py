"""The part of a parameter that a process holds: its position in the whole parameter, for cutting and gathering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """Ranges along one axis of the whole; no axis: all of it.

    >>> fused = Part((6, 1), 0, ((0, 1), (2, 3), (4, 5)))  # query, key and value of the first of two heads
    >>> fused.take(torch.arange(6.0).view(6, 1)).flatten().tolist()
    [0.0, 2.0, 4.0]
    """

    shape: tuple[int, ...]
    """Of the whole."""
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def even(cls, whole: Tensor, dim: int, place: int, size: int, blocks: int = 1) -> Part:
        """The ``place``-th of ``size`` equal parts along ``dim``, of each of ``blocks`` equal blocks.

        >>> Part.even(torch.zeros(6, 1), 0, place=1, size=2, blocks=3).ranges
        ((1, 2), (3, 4), (5, 6))
        """
        dim %= whole.dim()
        block, own = whole.shape[dim] // blocks, whole.shape[dim] // blocks // size
        starts = [b * block + place * own for b in range(blocks)]
        return cls(tuple(whole.shape), dim, tuple((s, s + own) for s in starts))

    @property
    def whole(self) -> bool:
        """Whether it is all of it."""
        return self.dim is None

    def take(self, whole: Tensor) -> Tensor:
        """This part of ``whole``, as a tensor of its own."""
        if self.dim is None:
            return whole.clone()
        return torch.cat([whole.narrow(self.dim, a, b - a) for a, b in self.ranges], self.dim)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write this part into ``whole``."""
        if self.dim is None:
            whole.copy_(part)
            return
        start = 0
        for a, b in self.ranges:
            whole.narrow(self.dim, a, b - a).copy_(part.narrow(self.dim, start, b - a))
            start += b - a


def all_names(model: nn.Module) -> dict[str, str]:
    """The first name of each parameter, for all names that it has."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


Parts = Mapping[str, Part]
"""Parameters by their names in the whole model."""
