"""Top-k: the share of values with the largest magnitude, with their indices (Aji 2017; Stich 2018, arXiv:1809.07599).

At least one value of each row is sent. With feedback (on by default) what was not sent is added next time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hocket.compression.base import CONSENSUS_STEP, Context, Selected, Selection, State, check_density, flag


@dataclass(frozen=True)
class TopK(Selection):
    """``topk(density)``."""

    density: float = 0.01
    feedback: bool | None = None
    name: ClassVar[str] = "topk"
    paper: ClassVar[str] = "Stich et al., Sparsified SGD with Memory, NeurIPS 2018"

    def __post_init__(self) -> None:
        check_density(self.density, "topk")
        flag(self.feedback, "topk", "feedback")

    @property
    def lossless(self) -> bool:
        return self.density == 1

    @property
    def uses_error_feedback(self) -> bool:
        return self.feedback is not False and not self.lossless

    def sends_per_value(self, exchanges: int) -> float | None:
        return self.density * exchanges if self.uses_error_feedback else None

    def max_selected(self, size: int) -> int:
        return max(1, math.ceil(self.density * size))

    def select(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Selected, State]:
        indices = rows.abs().topk(self.max_selected(rows.shape[1]), dim=1, sorted=False).indices.sort(1).values
        return Selected(indices, rows.gather(1, indices), None), state

    def consensus_step(self, size: int, context: Context) -> float:
        # Until an index is sent again, its old difference is applied at every exchange; large differences are sent more often.
        return 1.0 if self.lossless else min(CONSENSUS_STEP, 2 * self.density)
