"""DiLoCo: many local steps, then one step of an outer optimiser (Douillard 2023, arXiv:2311.08105).

After ``p`` local steps from the outer weights ``o``, the mean displacement ``Δ = o − mean_i w_i`` is the gradient of an outer
Nesterov optimiser: ``v ← m·v + Δ``, ``o ← o − lr·(Δ + m·v)``, and all workers continue from ``o``. Where workers receive different
means (gossip), each has outer weights of its own and ``mean_i w_i`` is its mix. Outer weights and velocity are float32 also where
the model is not: in bfloat16 most of ``lr·Δ`` would be rounded away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hocket.sync.base import Moment, Sync, number, whole


@dataclass(frozen=True)
class DiLoCo(Sync):
    """``diloco(p, lr=0.7, momentum=0.9)``."""

    p: int = 500
    lr: float = 0.7
    momentum: float = 0.9
    name: ClassVar[str] = "diloco"
    only_weights: ClassVar[bool] = True
    paper: ClassVar[str] = "Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023"

    def __post_init__(self) -> None:
        whole(self.p, "diloco", "p")
        number(self.lr, "diloco", "lr", 0, float("inf"))
        number(self.momentum, "diloco", "momentum", 0, 1)

    @property
    def period(self) -> int:
        return self.p

    def moment(self, step: int, weights: bool, uniform: bool = True) -> Moment:
        return Moment.NEVER if step % self.p else Moment.AFTER

    def rebases(self, step: int) -> bool:
        return step % self.p == 0

    def init_state(self, rows: Tensor) -> dict[str, Tensor]:
        outer = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
        return {"outer": outer, "velocity": torch.zeros_like(outer)}

    def apply(self, mixed: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        outer = state["outer"]
        delta = outer.to(mixed.dtype).to(outer.dtype) - mixed  # from the weights that the workers began with, rounded as theirs
        velocity = state["velocity"] * self.momentum + delta
        outer = outer - self.lr * (delta + self.momentum * velocity)
        return outer, {"outer": outer, "velocity": velocity}
