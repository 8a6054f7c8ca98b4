"""What the processes of a new generation tell each other when they meet, and what follows from it for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hocket.data.elastic_stream import Position as DataPosition
from hocket.programs.elastic.generation import Position, agreed


class MemberState(NamedTuple):
    """What a process tells; its place in the data follows."""

    done: float
    """Exchanges that it has completed; −1: a newcomer."""
    held: float
    """Whether it has the result of the next one."""
    keeps: float
    """Whether it can give the result of the last one to others."""
    weight: float
    """Its share of the exchange under way."""
    members: float
    """Processes of the last generation that it was in."""
    figures: float
    """Whether the exchange under way is one of figures, which includes no mini-batch."""
    connected: float = 0.0
    """Where a model is split: the generation in which its replica was connected, whether it is in a step, and its steps."""
    mid_step: float = 0.0
    step: float = 0.0


_PLACE = len(MemberState._fields)


@dataclass
class MemberTable:
    """The rows of all processes, as process ``rank`` reads them; where a model is split, a replica has ``parts`` processes."""

    rows: Tensor
    rank: int
    parts: int = 1

    def __post_init__(self) -> None:
        rows, parts = self.rows, self.parts
        self.begins = bool((rows[:, 0] < 0).all())
        """Whether the training begins."""
        for k in range(parts if rows[:, 0].max() <= 0 else 0):
            if (rows[k::parts, 0] < 0).all():
                rows[k, 0] = 0.0  # with the first one's weights
        self.count = agreed([Position(int(done), bool(held), bool(kept)) for done, held, kept in rows[:, :3].tolist()])
        """Exchanges that count."""
        self.known = rows[:, 0] >= 0
        """Who has weights."""
        self.lacks = self.known & (rows[:, 0] < self.count) & (rows[:, 1] == 0)
        """Who lacks the result of the last exchange that counts."""
        self.donor = self._donor()
        """The process that gives its state to those that lack one; of the same part. −1: nobody lacks any."""
        self.behind = self.known & (rows[:, 0] < self.count)
        """Who has not completed it."""
        trained = self.behind & (rows[:, 5] == 0)
        rows[trained, -1] = rows[trained, -2]  # an exchange counts that includes all they have computed

    def _donor(self) -> int:
        part, rows = self.rank % self.parts, self.rows
        able = (rows[:, 0] == self.count) & ((rows[:, 2] > 0) | ~self.lacks.any())
        able &= torch.arange(len(rows)) % self.parts == part
        if able.any():
            return int(able.nonzero()[0])
        if not self.known[part :: self.parts].all():
            raise RuntimeError(f"Nobody has completed the last exchange of part {part}.")
        return -1

    @property
    def newcomers(self) -> list[int]:
        """Processes of the same part that have no weights."""
        return [r for r in range(self.rank % self.parts, len(self.rows), self.parts) if not self.known[r]]

    @property
    def without_result(self) -> list[int]:
        """Processes that must be given the result of the last exchange."""
        return (self.lacks | ~self.known).nonzero().flatten().tolist() if self.lacks.any() else []

    @property
    def somebody_behind(self) -> bool:
        return bool(self.behind.any())

    @property
    def mates(self) -> Tensor:
        """The rows of this process's replica."""
        first = self.rank // self.parts * self.parts
        return self.rows[first : first + self.parts]

    @property
    def positions(self) -> list[DataPosition]:
        """Places in the data of all that were there before."""
        return [DataPosition(*map(int, row)) for row in self.rows[self.known, _PLACE:].tolist()]

    @property
    def joined(self) -> int:
        """Replicas that have joined a training that has begun."""
        return 0 if self.begins else int((~self.known).view(-1, self.parts).any(1).sum())

    @property
    def hold_from(self) -> int:
        """The step from which on a split model's processes can all wait for others."""
        return 0 if self.parts == 1 else int((self.rows[:, 7] + self.rows[:, 8])[self.known].max())

    def scale(self, joins: bool) -> float:
        """How much more gradients under way count among so many processes."""
        size = len(self.rows)
        weights = self.rows[self.known, 3]
        scale = 1.0 if joins or not weights.any() else float(size / weights.sum()) * (len(weights) / size)
        return scale if abs(scale - 1.0) > 1e-9 else 1.0

    def before(self, joins: bool) -> int:
        """Replicas of the generation before, as this process knows, or the one whose state it has taken."""
        return int(self.rows[self.donor if joins else self.rank, 4]) // self.parts
