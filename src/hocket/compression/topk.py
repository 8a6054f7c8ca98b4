"""Top-k: the share of values with the largest magnitude, with their indices (Aji 2017; Stich 2018, arXiv:1809.07599).

At least one value of each row is sent. With feedback (on by default) what was not sent is added next time. ``topk(64/4096)`` does
not compare the whole row: it sends the 64 largest of each chunk of 4,096 consecutive values, in proportion of a shorter last chunk,
at least one (SparseLoCo, Sarfi 2025, arXiv:2508.15706); its indices are sent in Rice's code unless ``indices=plain``.
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
from hocket.compression.kernels import select_kernels
from hocket.notation import Ratio


@dataclass(frozen=True)
class TopK(Selection):
    """``topk(density)`` or ``topk(64/4096)``; ``indices=rice`` or ``plain`` sets how indices are sent."""

    density: float | Ratio = 0.01
    feedback: bool | float | str | None = None
    indices: str | None = None
    name: ClassVar[str] = "topk"
    paper: ClassVar[str] = "Stich et al., Sparsified SGD with Memory, NeurIPS 2018"

    def __post_init__(self) -> None:
        if not isinstance(self.density, Ratio):
            check_density(self.density, "topk")
        check_feedback(self.feedback, "topk")
        check_indices(self.indices, "topk")

    @property
    def lossless(self) -> bool:
        return float(self.density) == 1

    @property
    def uses_error_feedback(self) -> bool:
        return self.feedback is not False and not self.lossless

    @property
    def global_selection(self) -> bool:
        return not isinstance(self.density, Ratio)

    @property
    def rice(self) -> bool:
        return self.indices == "rice" or (self.indices is None and isinstance(self.density, Ratio))

    def sends_per_value(self, exchanges: int) -> float | None:
        return float(self.density) * exchanges if self.uses_error_feedback else None

    def max_selected(self, size: int) -> int:
        if isinstance(self.density, Ratio):
            return max(1, -(-size * self.density.count // self.density.of))
        return max(1, math.ceil(self.density * size))

    def select(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Selected, State]:
        size = rows.shape[1]
        if not isinstance(self.density, Ratio) and (kernels := select_kernels(rows, size)):
            indices, values = kernels.largest(rows, self.max_selected(size))
            return Selected(indices, values, None), state
        chunk = self.density.of if isinstance(self.density, Ratio) else max(1, size)
        whole = size // chunk * chunk
        if whole and (kernels := select_kernels(rows, size, chunk)):
            indices = kernels.largest_of_chunks(rows, chunk, self.max_selected(chunk))
        else:
            chunks = rows[:, :whole].unflatten(1, (-1, chunk)) if whole else rows.new_zeros(len(rows), 0, chunk)
            indices = (self._largest(chunks) + torch.arange(0, whole, chunk, device=rows.device).unsqueeze(1)).flatten(1)
        if whole < size:
            indices = torch.cat([indices, self._largest(rows[:, whole:]) + whole], 1)
        return Selected(indices, rows.gather(1, indices), None), state

    def _largest(self, chunks: Tensor) -> Tensor:
        """The indices of the values to send within each chunk, sorted."""
        return chunks.abs().topk(self.max_selected(chunks.shape[-1]), dim=-1, sorted=False).indices.sort(-1).values

    def consensus_step(self, size: int, context: Context) -> float:
        # Until an index is sent again, its old difference is applied at every exchange; large differences are sent more often.
        return 1.0 if self.lossless else min(CONSENSUS_STEP, 2 * float(self.density))
