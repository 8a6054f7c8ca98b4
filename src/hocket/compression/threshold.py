"""Threshold: values with |x| ≤ t are not sent.

``threshold(t)`` is static. ``threshold(keep=0.05)`` is adaptive: each row's t starts at the magnitude that keeps this share and
then follows, multiplied after each exchange by ``(kept/wanted)^(1/(1 − ln keep))``, bounded to [½, 2]. Only values above t
are sent, possibly none. (Magnitudes, not values, are compared: a library that compares ``max(x)`` sends an all-negative gradient
whole.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hocket.compression.base import (
    CONSENSUS_STEP,
    Context,
    Selected,
    Selection,
    State,
    check_density,
    check_feedback,
    check_indices,
)
from hocket.compression.indices import ones
from hocket.compression.kernels import select_kernels
from hocket.errors import HocketError, is_number

STATIC_KEEPS = 0.05
"""The share of values that a static threshold is assumed to send where the values are not known, as in the source study."""


@dataclass(frozen=True)
class Threshold(Selection):
    """``threshold(t)`` or ``threshold(keep=share)``; ``indices=rice`` sends the indices in Rice's code."""

    t: float | None = None
    keep: float | None = None
    feedback: bool | float | str | None = None
    indices: str | None = None
    name: ClassVar[str] = "threshold"
    paper: ClassVar[str] = "Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017"

    def __post_init__(self) -> None:
        if (self.t is None) == (self.keep is None):
            raise HocketError("threshold needs exactly one of t and keep: threshold(0.01) or threshold(keep=0.05).")
        if self.keep is not None:
            check_density(self.keep, "threshold")
        elif not is_number(self.t) or not 0 <= self.t < float("inf"):
            raise HocketError(f"threshold({self.t!r}): t must be a finite number of at least 0, such as 0.01.")
        check_feedback(self.feedback, "threshold")
        check_indices(self.indices, "threshold")

    @property
    def lossless(self) -> bool:
        return self.t == 0 or self.keep == 1

    @property
    def uses_error_feedback(self) -> bool:
        return self.feedback is not False and not self.lossless

    @property
    def global_selection(self) -> bool:
        return self.keep is not None  # a static threshold looks at each value alone

    @property
    def rice(self) -> bool:
        return self.indices == "rice"

    def consensus_step(self, size: int, context: Context) -> float:
        return 1.0 if self.lossless else min(CONSENSUS_STEP, 2 * (self.keep or 1.0))

    def sends_per_value(self, exchanges: int) -> float | None:
        return self.keep * exchanges if self.keep is not None and self.uses_error_feedback else None

    def max_selected(self, size: int) -> int:
        return size

    def select(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Selected, State]:
        kernels = select_kernels(rows, rows.shape[1])
        if self.lossless or not rows.shape[1]:
            level = rows.new_full((rows.shape[0], 1), 0.0)
        elif self.t is not None:
            level = rows.new_full((rows.shape[0], 1), float(self.t))
        else:
            level = state["level"] if "level" in state else _level_keeping(rows, self.keep or 1.0)
        if rows.is_meta:
            return _expected(rows, 1.0 if self.lossless else self.keep or STATIC_KEEPS), state
        chosen = Selected(*kernels.above(rows, level.flatten())) if kernels else compact(rows, rows.abs() > level)
        if self.keep is None or chosen.counts is None or self.lossless or not rows.shape[1]:
            return chosen, state
        kept = chosen.counts.to(torch.float32).unsqueeze(1) / rows.shape[1]
        # Where most values were zero t is zero; when more values are nonzero, it restarts from the mean magnitude.
        empty = (level == 0) & (kept > self.keep)
        start = torch.where(empty, rows.abs().mean(1, keepdim=True), level) if bool(empty.any()) else level
        # The exponent compensates for how steeply the kept share falls with t (exactly ln(1/keep) for exponential tails); a larger
        # one, such as ½, overshoots from exchange to exchange. Half a value on both sides helps rows that often send none.
        size = rows.shape[1]
        ratio = (kept * size + 0.5) / (self.keep * size + 0.5)
        return chosen, {"level": start * ratio.pow(1 / (1 - math.log(self.keep))).clamp(0.5, 2.0)}


def compact(rows: Tensor, mask: Tensor) -> Selected:
    """The masked values of each row moved to its front, in order, padded to the longest row (one value at least)."""
    indices, counts = ones(mask, narrowest=min(1, rows.shape[1]))
    real = torch.arange(indices.shape[1], device=rows.device) < counts.unsqueeze(1)
    return Selected(indices, torch.where(real, rows.gather(1, indices), 0.0), counts)


def _expected(rows: Tensor, keep: float) -> Selected:
    """What to expect where there are sizes and no values."""
    width = max(min(1, rows.shape[1]), round(keep * rows.shape[1]))
    indices = rows.new_empty(len(rows), width, dtype=torch.int64)
    return Selected(indices, rows.new_empty(len(rows), width), indices.new_empty(len(rows)))


def _level_keeping(rows: Tensor, keep: float) -> Tensor:
    """Each row's threshold that keeps about this share of it."""
    size = rows.shape[1]
    smaller = max(1, min(size, round((1 - keep) * size)))
    if kernels := select_kernels(rows, size):
        return kernels.kth_largest(rows, size + 1 - smaller)[0].unsqueeze(1)
    return rows.abs().kthvalue(smaller, dim=1, keepdim=True).values
