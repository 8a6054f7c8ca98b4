"""The state of a gossip worker: its weights ``x`` and its push-sum weight ``ω``, changed by itself and by other workers.

A worker computes at ``x / ω``; in pairs ω is always 1. Its model shows ``x / ω`` as it was when the worker last looked, so that a
gradient belongs to one set of weights; the difference that an update (or the user) makes to the model is then added to ``x`` as it
is by now. Tensors here are replaced, never written to, so they can be sent without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Rows = list[Tensor]
Part = tuple[Rows, float, Tensor | None]
"""What one worker holds: rows, push-sum weight, buffers."""
JOINING, TRAINING, ENDED, OVER = PHASES = ("joining", "training", "ended", "over")
"""A worker has no weights yet; trains; has ended and begins no exchange any more; knows the final mean."""


@dataclass(frozen=True)
class Mean:
    """``Σ x / Σ ω`` over the workers ``here``, their mean buffers, the sum of their push-sum weights, and their accounts."""

    rows: Rows
    buffers: Tensor | None
    here: list[int]
    push_sum_weight: float
    ledgers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def described(self) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """The metadata and the tensors of a message; without the accounts."""
        metadata = {"here": self.here, "push_sum_weight": self.push_sum_weight, "buffers": self.buffers is not None}
        return metadata, tuple(self.rows if self.buffers is None else [*self.rows, self.buffers])

    @classmethod
    def read(cls, metadata: Mapping[str, Any], tensors: Sequence[Tensor]) -> Mean:
        """Back from :meth:`described`, with the accounts if they are there."""
        rows = list(tensors)
        buffers = rows.pop() if metadata["buffers"] else None
        here, weight = [int(w) for w in metadata["here"]], float(metadata["push_sum_weight"])
        if not 0 < weight < float("inf") or not all(row.is_floating_point() for row in tensors):
            raise ValueError("the mean of workers is of floating-point numbers, and its weight above 0")
        return cls(rows, buffers, here, weight, dict(metadata.get("ledgers", {})))


class PeerState:
    """Flat rows, one per bucket."""

    def __init__(self, rows: Sequence[Tensor], joined: bool = True) -> None:
        self.x: Rows = flat(rows)
        self.push_sum_weight = 1.0
        self.version = 0
        """How often ``x`` was replaced."""
        self.changes = 0
        """How often it was replaced by anything but this worker's own updates."""
        self.heard = 0
        """How many contributions of other workers have arrived: exchanges of a pair, or halves."""
        self.joined = joined
        """Whether its weights count; those of a dead worker's replacement do not until it has got them from the others."""
        self.ended = False
        """Whether it begins no exchange any more."""
        self.buffers: Tensor | None = None
        self.mean: Mean | None = None
        """The final mean, once all workers have agreed on it."""
        self.lost_weight = 0.0
        """Push-sum weight of halves whose receiver was gone before it could say whether it had taken them."""

    @property
    def phase(self) -> str:
        if not self.joined:
            return JOINING
        return OVER if self.mean is not None else ENDED if self.ended else TRAINING

    @property
    def bytes(self) -> int:
        """The size of all of it in a message."""
        return sum(row.nbytes for row in self.x) + (0 if self.buffers is None else self.buffers.nbytes)

    def look(self) -> Rows:
        """The weights ``x / ω`` at which gradients are computed."""
        return list(self.x) if self.push_sum_weight == 1.0 else [x / self.push_sum_weight for x in self.x]

    def begin_at(self, rows: Rows) -> None:
        """Begin with these weights and a push-sum weight of 1."""
        self._replace(rows, 1.0)
        self.joined = True

    def add(self, before: Rows, after: Rows, changes: int) -> None:
        """Add the local update ``after − before``; the model showed ``before`` when ``self.changes`` was ``changes``."""
        if self.push_sum_weight == 1.0 and self.changes == changes:
            self.x = after
        else:
            self.x = [x + (new - old) for x, new, old in zip(self.x, after, before, strict=True)]
        self.version += 1

    def average(self, theirs: Rows) -> Rows:
        """Average with a caller's weights; returns the weights from before, for the caller."""
        before = self.x
        self._replace([(x + y) / 2 for x, y in zip(before, theirs, strict=True)], self.push_sum_weight)
        self.heard += 1
        return before

    def complete(self, theirs: Rows, sent: Sequence[Tensor], version: int) -> None:
        """The caller's side of :meth:`average`: it sent ``sent`` at ``version``; both sides' changes add up to zero."""
        if self.version == version:
            rows = [(x + y) / 2 for x, y in zip(self.x, theirs, strict=True)]
        else:
            rows = [x + (y - old) / 2 for x, y, old in zip(self.x, theirs, sent, strict=True)]
        self._replace(rows, self.push_sum_weight)
        self.heard += 1

    def halve(self) -> tuple[Rows, float]:
        """Keep half of the weights and of the push-sum weight; returns the other half."""
        self._replace([x / 2 for x in self.x], self.push_sum_weight / 2)
        return self.x, self.push_sum_weight

    def take_in(self, part: Sequence[Tensor], weight: float, own: bool = False) -> None:
        """Add a received half; ``own``: this worker's own half, which the receiver refused."""
        self._replace([x + y for x, y in zip(self.x, part, strict=True)], self.push_sum_weight + weight)
        self.heard += not own

    def packed(self) -> tuple[Tensor, ...]:
        """Everything as tensors: the rows, the push-sum weight, the buffers."""
        buffers = torch.empty(0) if self.buffers is None else self.buffers
        return (*self.x, weight_tensor(self.push_sum_weight), buffers)

    def unpacked(self, tensors: Sequence[Tensor]) -> Part:
        """Another worker's :meth:`packed`; raises ValueError where it is something else."""
        if len(tensors) != len(self.x) + 2:
            raise ValueError(f"{len(tensors)} tensors instead of {len(self.x) + 2}")
        *rows, weight, buffers = tensors
        own = torch.empty(0) if self.buffers is None else self.buffers
        if buffers.numel() not in (0, own.numel()) or buffers.dtype != own.dtype:
            raise ValueError(f"{buffers.numel()} values in buffers instead of {own.numel()}")
        return self.fitting(rows), weight_of(weight), buffers if buffers.numel() else None

    def fitting(self, tensors: Sequence[Tensor]) -> Rows:
        """These tensors as rows like one's own; raises ValueError where they are not."""
        if len(tensors) != len(self.x):
            raise ValueError(f"{len(tensors)} buckets instead of {len(self.x)}")
        for bucket, (theirs, own) in enumerate(zip(tensors, self.x, strict=True)):
            if theirs.shape != own.shape or theirs.dtype != own.dtype:
                raise ValueError(
                    f"bucket {bucket} has {theirs.numel()} values of {theirs.dtype} instead of {own.numel()} of {own.dtype}"
                )
        return list(tensors)

    def _replace(self, rows: Rows, weight: float) -> None:
        self.x, self.push_sum_weight = rows, weight
        self.version += 1
        self.changes += 1


def flat(rows: Sequence[Tensor]) -> Rows:
    """Copies of rows, flat."""
    return [row.detach().flatten().clone() for row in rows]


def weight_tensor(weight: float) -> Tensor:
    """A push-sum weight for a message."""
    return torch.tensor([weight], dtype=torch.float64)


def weight_of(tensor: Tensor) -> float:
    """The push-sum weight in a message; raises ValueError where there is none."""
    if tensor.numel() != 1 or tensor.dtype != torch.float64 or not 0 < float(tensor) < float("inf"):
        raise ValueError("the push-sum weight is not a number above 0")
    return float(tensor)


def mean_of(parts: dict[int, Part]) -> Mean:
    """The mean over workers, summed in their order and in double precision."""
    here = sorted(parts)
    weight = sum(parts[worker][1] for worker in here)
    rows = []
    for bucket in zip(*(parts[worker][0] for worker in here), strict=True):
        total = sum((row.to(torch.float64) for row in bucket[1:]), bucket[0].to(torch.float64))
        rows.append((total / weight).to(bucket[0].dtype))
    kept = [found for worker in here if (found := parts[worker][2]) is not None]
    return Mean(rows, torch.stack(kept).mean(0) if kept else None, here, weight)
