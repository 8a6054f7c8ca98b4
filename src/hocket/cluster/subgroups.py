"""A partition of all workers into groups that exchange among themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Subgroups:
    """A partition of all workers into groups of equal size that exchange among themselves.

    ``members`` is ``[groups, size]`` worker ids; ``Subgroups.world`` is one group of all.

    >>> Subgroups.world(3).members.tolist(), Subgroups.blocks(4, 2).members.tolist(), Subgroups.across(4, 2).members.tolist()
    ([[0, 1, 2]], [[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """

    def __init__(self, members: Tensor) -> None:
        self.members = members
        self.groups, self.size = members.shape
        self.group_of = torch.empty(members.numel(), dtype=torch.int64)
        self.place_of = torch.empty_like(self.group_of)
        self.group_of[members.flatten()] = torch.arange(self.groups).repeat_interleave(self.size)
        self.place_of[members.flatten()] = torch.arange(self.size).repeat(self.groups)
        self._tables: dict[Any, Any] = {}

    def groups_of(self, workers: range) -> tuple[Tensor, Tensor]:
        """The groups of ``workers`` and, for each worker, the position of its group among these."""
        return self.table(("groups", workers), lambda: self.group_of[workers.start : workers.stop].unique(return_inverse=True))

    def others(self, workers: range) -> Tensor:
        """For rows ``(worker, place)``: 1 where the message leaves its worker, 0 where it stays."""
        own = self.place_of[workers.start : workers.stop].unsqueeze(1)
        return self.table(("others", workers), lambda: (own != torch.arange(self.size)).to(torch.int64).flatten())

    def table(self, key: Any, make: Callable[[], T]) -> T:
        """What ``make`` computes of the members, once."""
        found: T = self._tables[key] if key in self._tables else self._tables.setdefault(key, make())
        return found

    @classmethod
    def world(cls, workers: int) -> Subgroups:
        return cls(torch.arange(workers).unsqueeze(0))

    @classmethod
    def blocks(cls, workers: int, size: int) -> Subgroups:
        """Neighbours of one host: ``size`` consecutive workers each."""
        return cls(torch.arange(workers).view(-1, size))

    @classmethod
    def across(cls, workers: int, size: int) -> Subgroups:
        """Workers with the same place on different hosts of ``size`` workers."""
        return cls(torch.arange(workers).view(-1, size).t().contiguous())

    @property
    def whole(self) -> bool:
        return self.groups == 1

    def shifted(self, places: int) -> Tensor:
        """For each worker the one that is so many places further on in its group.

        >>> Subgroups.blocks(6, 3).shifted(1).tolist()
        [1, 2, 0, 4, 5, 3]
        """
        return self.members[self.group_of, (self.place_of + places) % self.size]
