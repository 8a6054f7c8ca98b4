"""Bulk-synchronous (BSP): every step, ``g = mean_i g_i`` (weighted by samples when batches differ), one update, replicas equal.

The baseline: exact, and as slow as the slowest worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hocket.sync.base import Moment, Sync


@dataclass(frozen=True)
class Bulk(Sync):
    """``bulk``: all workers exchange in every step and wait for each other."""

    name: ClassVar[str] = "bulk"
    default_weights: ClassVar[bool] = False
    keeps_replicas_equal: ClassVar[bool] = True
    accumulates_momentum: ClassVar[bool] = True
    pushes_gradients: ClassVar[bool] = True
    paper: ClassVar[str] = "Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017"

    def moment(self, step: int, weights: bool, uniform: bool = True) -> Moment:
        return Moment.BEFORE if weights else Moment.GRADIENTS
