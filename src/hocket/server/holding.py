"""What a worker without servers has: its weights and their mass, changed by itself and by those who call on it.

A worker holds ``x`` and a mass ``ω`` and computes at ``x / ω``; in pairs the mass is always 1. Its model shows what it held when it
last looked, so that a gradient belongs to one set of weights; what the model was changed by since (an update, or the user) is then
added to ``x`` as it is by now. Tensors here are never written to, only replaced, so they can be sent as they lie.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hocket.server.account import Account

Rows = list[Tensor]
Part = tuple[Rows, float, Tensor | None]
"""What one worker holds: rows, mass, buffers."""
JOINING, TRAINING, ENDED, OVER = "joining", "training", "ended", "over"


@dataclass(frozen=True)
class Mean:
    """What all who live have agreed on: ``Σ x / Σ ω``, mean buffers, who took part, what mass they had, and their ledgers."""

    rows: Rows
    buffers: Tensor | None
    here: list[int]
    mass: float
    ledgers: dict[str, dict[str, Any]] = field(default_factory=dict)


class Holding:
    """Flat rows on the CPU, one per bucket; ``lock`` is held for as long as adding takes, never while anybody waits."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self.lock = threading.Lock()
        self.x: Rows = [row.detach().flatten().to("cpu", copy=True) for row in rows]
        self.mass = 1.0
        self.changes = 0
        """How often others have changed it."""
        self.heard = 0
        """How many contributions of others have come in: means taken with a partner, or halves."""
        self.joined = True
        """Whether its weights take part; those of a dead worker's replacement do not until it has got them from the others."""
        self.buffers: Tensor | None = None
        self.ended = False
        """Whether it calls nobody any more, and nothing of it is under way."""
        self.mean: Mean | None = None
        self.account = Account()

    @property
    def state(self) -> str:
        """Where this worker stands: it has no weights yet, trains, has ended, or knows the mean of all."""
        if not self.joined:
            return JOINING
        return OVER if self.mean is not None else ENDED if self.ended else TRAINING

    @property
    def bytes(self) -> int:
        """What all of it weighs in a message."""
        return sum(row.nbytes for row in self.x) + (0 if self.buffers is None else self.buffers.nbytes)

    def look(self) -> tuple[Rows, int, int]:
        """The weights to compute at, how often others have changed them, and how many contributions of others have come in."""
        with self.lock:
            return (list(self.x) if self.mass == 1.0 else [x / self.mass for x in self.x]), self.changes, self.heard

    def begin_at(self, rows: Rows) -> None:
        """Take part from now on, with these weights and a mass of 1."""
        with self.lock:
            self.x, self.mass, self.joined = rows, 1.0, True
            self.changes += 1

    def add(self, before: Rows, after: Rows, changes: int) -> None:
        """The model was shown ``before`` when others had changed this ``changes`` times, and has ``after`` now."""
        with self.lock:
            if self.mass == 1.0 and self.changes == changes:
                self.x = after
            else:
                self.x = [x + (new - old) for x, new, old in zip(self.x, after, before, strict=True)]

    def average(self, theirs: Rows) -> Rows:
        """Take the mean with a partner's weights; one's own from before."""
        with self.lock:
            before, self.x = self.x, [(x + y) / 2 for x, y in zip(self.x, theirs, strict=True)]
            self.changes += 1
            self.heard += 1
            return before

    def halve(self) -> tuple[Rows, float]:
        """Keep half; the other half."""
        with self.lock:
            self.x, self.mass = [x / 2 for x in self.x], self.mass / 2
            self.changes += 1
            return self.x, self.mass

    def take_in(self, part: Rows, mass: float, own: bool = False) -> None:
        """Add a half; ``own``: one that comes back."""
        with self.lock:
            self.x, self.mass = [x + y for x, y in zip(self.x, part, strict=True)], self.mass + mass
            self.changes += 1
            self.heard += not own

    def sent(self, size: int) -> None:
        """Count bytes; both threads of a worker send."""
        with self.lock:
            self.account.bytes_sent += size

    def packed(self) -> tuple[Tensor, ...]:
        """Everything as tensors: the rows, the mass, the buffers."""
        with self.lock:
            return (
                *self.x,
                torch.tensor([self.mass], dtype=torch.float64),
                torch.empty(0) if self.buffers is None else self.buffers,
            )

    def unpacked(self, tensors: Sequence[Tensor]) -> Part:
        """Another's :meth:`packed`; raises ValueError where it is something else."""
        if len(tensors) != len(self.x) + 2:
            raise ValueError(f"{len(tensors)} tensors instead of {len(self.x) + 2}")
        *rows, mass, buffers = tensors
        own = torch.empty(0) if self.buffers is None else self.buffers
        if buffers.numel() not in (0, own.numel()) or buffers.dtype != own.dtype:
            raise ValueError(f"{buffers.numel()} values in buffers instead of {own.numel()}")
        return self.fitting(rows), mass_of(mass), buffers if buffers.numel() else None

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


def mass_of(tensor: Tensor) -> float:
    """The mass in a message; raises ValueError where there is none."""
    if tensor.numel() != 1 or tensor.dtype != torch.float64 or not 0 < float(tensor) < float("inf"):
        raise ValueError("it has no mass above 0")
    return float(tensor)


def mean_of(parts: dict[int, Part]) -> Mean:
    """The mean over workers, summed in their order and in double precision."""
    here = sorted(parts)
    mass = sum(parts[worker][1] for worker in here)
    rows = []
    for bucket in zip(*(parts[worker][0] for worker in here), strict=True):
        total = sum((row.to(torch.float64) for row in bucket[1:]), bucket[0].to(torch.float64))
        rows.append((total / mass).to(bucket[0].dtype))
    kept = [found for worker in here if (found := parts[worker][2]) is not None]
    return Mean(rows, torch.stack(kept).mean(0) if kept else None, here, mass)
