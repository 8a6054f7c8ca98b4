"""A-EDiT: periods in seconds, not steps (Cheng 2024, arXiv:2412.07210); each worker makes as many steps as it can in that time.

The first worker for which ``seconds`` have passed since the last exchange calls the others, who finish the step in hand and come
too. So a fast worker makes more steps than a slow one, and nobody waits for longer than one step of the slowest. The exchange is
DiLoCo's (:mod:`hocket.sync.diloco`): the mean displacement ``Δ`` from the common weights is the gradient of a Nesterov step.
``guard=z`` weighs workers by ``softmax(−‖Δ_i‖)`` and leaves unusual ones out (:mod:`hocket.sync.guard`); with ``guard=None`` they
weigh by the steps that each made. Norms are those of a shard's part of the weights.

How many steps lie between two exchanges depends on the cluster, so accuracy does, too; on virtual workers the virtual clock
decides, and the same seed and cluster give the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from hocket.errors import HocketError
from hocket.sync.base import Meeting, number, whole
from hocket.sync.diloco import DiLoCo


@dataclass(frozen=True)
class AEDiT(Meeting):
    """``aedit(seconds, lr=0.7, momentum=0.8, guard=3)``; at most ``s`` steps between two exchanges."""

    seconds: float = 60.0
    lr: float = 0.7
    momentum: float = 0.8
    guard: float | None = 3.0
    s: int = 10_000
    name: ClassVar[str] = "aedit"
    paper: ClassVar[str] = "Cheng et al., EDiT: A Local-SGD-Based Efficient Distributed Training Method for LLMs, 2024"

    def __post_init__(self) -> None:
        number(self.seconds, "aedit", "seconds", 0, float("inf"))
        if not self.seconds:
            raise HocketError(
                "aedit(0): with a period of 0 seconds workers exchange after every step; use bulk, or a longer period."
            )
        whole(self.s, "aedit", "s")
        self.outer_step  # noqa: B018 - refuses what diloco refuses

    @property
    def period(self) -> int:
        return self.s

    def expected_period(self, step_s: float) -> int:
        return max(1, min(self.s, math.ceil(self.seconds / step_s)))

    @property
    def outer_settings(self) -> tuple[float, float]:
        return self.lr, self.momentum

    @property
    def outer_step(self) -> DiLoCo:
        return DiLoCo(1, self.lr, self.momentum, guard=self.guard)

    def meets(self, steps: int, seconds: float) -> bool:
        return seconds >= self.seconds or steps == self.s

    def batches_ahead(self, steps: int) -> int:
        return 1 + steps + steps // 4  # it will make about as many again; those left over are for the period after
