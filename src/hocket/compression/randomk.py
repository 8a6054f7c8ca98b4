"""Random-k: values at random indices, the same on all workers, so that no indices are sent (Stich 2018, arXiv:1809.07599).

The indices are an arithmetic progression modulo the row's length, with a random start and a random step that shares no factor with
the length: each place is equally likely. With ``unbiased=True`` values are multiplied by ``1/density`` and no feedback is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hocket.cluster.message import Message
from hocket.compression.base import CONSENSUS_STEP, Context, Selected, Selection, State, check_density, check_feedback, flag
from hocket.errors import HocketError
from hocket.noise import fold


@dataclass(frozen=True)
class RandomK(Selection):
    """``randomk(density)``: values at random indices, the same on all workers."""

    density: float = 0.01
    unbiased: bool = False
    feedback: bool | float | str | None = None
    name: ClassVar[str] = "randomk"
    paper: ClassVar[str] = "Stich et al., Sparsified SGD with Memory, NeurIPS 2018"

    def __post_init__(self) -> None:
        check_density(self.density, "randomk")
        flag(self.unbiased, "randomk", "unbiased")
        check_feedback(self.feedback, "randomk")
        if self.unbiased and self.feedback:
            raise HocketError(
                "randomk(unbiased=True, feedback=True): an unbiased method diverges with feedback; leave one of the two out."
            )

    @property
    def global_selection(self) -> bool:
        return False

    @property
    def lossless(self) -> bool:
        return self.density == 1

    @property
    def uses_error_feedback(self) -> bool:
        return self.feedback is not False and not self.unbiased and not self.lossless

    @property
    def contracts(self) -> bool:
        return not self.unbiased

    def consensus_step(self, size: int, context: Context) -> float:
        # An index is sent every 1/density exchanges; until then the old difference is applied, and above density/2 that overshoots.
        return 1.0 if self.lossless else min(CONSENSUS_STEP, self.density / 2)

    @property
    def second_phase(self) -> RandomK:
        return replace(self, unbiased=False)  # the indices are those of the first phase: nothing more is lost, so nothing is scaled

    def sends_per_value(self, exchanges: int) -> float | None:
        return self.density * exchanges if self.uses_error_feedback else None

    def max_selected(self, size: int) -> int:
        return min(size, max(1, math.ceil(self.density * size)))

    def indices(self, size: int, context: Context, device: torch.device) -> Tensor:
        """The indices that all workers send at this exchange, ``[max_selected]``."""
        if size == 0:
            return torch.zeros(0, dtype=torch.int64, device=device)
        key = context.common_key(size)
        start, step = fold(key, 1) % size, fold(key, 2) % size
        while math.gcd(step, size) != 1:
            step += 1
        return (start + step * torch.arange(self.max_selected(size), device=device)) % size

    def select(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Selected, State]:
        indices = self.indices(rows.shape[1], context, rows.device)
        values = rows.index_select(1, indices)
        if self.unbiased:
            values = values * (rows.shape[1] / max(1, indices.numel()))
        return Selected(indices.expand(rows.shape[0], -1), values, None), state

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        chosen, state = self.select(rows, keys, state, context)
        return Message((chosen.values,)), state

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        return self.put_values(message.parts[0], size, context)

    def put_values(self, values: Tensor, size: int, context: Context) -> Tensor:
        """Values at this exchange's indices."""
        indices = self.indices(size, context, values.device)
        return values.new_zeros(values.shape[0], size).index_copy_(1, indices, values)
