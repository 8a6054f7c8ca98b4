"""DiLoCo: many local steps, then one step of an outer optimiser (Douillard 2023, arXiv:2311.08105), and what has become of it.

After ``p`` local steps from the outer weights ``o``, the mean displacement ``Δ = o − mean_i w_i`` is the gradient of an outer
optimiser, and all workers continue from ``o``:

- ``outer=nesterov``: ``v ← m·v + Δ``, ``o ← o − lr·(Δ + m·v)``;
- ``outer=heavyball``: ``v ← m·v + Δ``, ``o ← o − lr·v``. With random partners (``+ gossip(random)``) this is NoLoCo
  (arXiv:2506.10911): where workers receive different means, each has outer weights of its own, and ``mean_i w_i`` is its mix.

Streaming DiLoCo (arXiv:2501.18512): with ``fragments=n`` the buckets are dealt out to ``n`` fragments; every ``p/n`` steps one of
them is exchanged, each in its turn. With ``overlap=τ`` an exchange travels while workers make ``τ`` more steps. The progress
``w_now − w_sent`` that a worker made meanwhile is not lost: it keeps the share ``keep`` of it and sends the rest with its next
exchange. ``keep=1`` (all of it) is the default, ``keep=0`` is the delayed and ``keep=eager`` (one ``N``-th) the eager update of
arXiv:2502.12996. The paper's own rule is ``mix=α``: ``w ← α·w_now + (1 − α)·o``.

``guard=z`` (EDiT, arXiv:2412.07210) weighs workers by ``softmax(−‖Δ_i‖)`` and leaves those out whose norm exceeds their running
mean by ``z`` standard deviations (:mod:`hocket.sync.guard`).

Outer weights and velocity are float32 also where the model is not: in bfloat16 most of ``lr·Δ`` would be rounded away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hocket.compression.base import Compressor
from hocket.errors import HocketError, nearest
from hocket.sync.base import Moment, Sync, number, whole
from hocket.sync.guard import guarded, init_guard, limited
from hocket.topology.base import Topology

OUTER = ("nesterov", "heavyball")


@dataclass(frozen=True)
class DiLoCo(Sync):
    """``diloco(p, lr=0.7, momentum=0.9)``, ``diloco(30, fragments=3, overlap=1)``, ``diloco(p, outer=heavyball, guard=3)``."""

    p: int = 500
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    overlap: int = 0
    keep: float | str = 1
    """The share of the progress made while an exchange travels that a worker keeps at once; ``eager``: one part of N."""
    mix: float | None = None
    outer: str = "nesterov"
    guard: float | None = None
    name: ClassVar[str] = "diloco"
    only_weights: ClassVar[bool] = True
    paper: ClassVar[str] = "Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023"

    def __post_init__(self) -> None:
        whole(self.p, "diloco", "p")
        number(self.lr, "diloco", "lr", 0, float("inf"))
        number(self.momentum, "diloco", "momentum", 0, 1)
        whole(self.fragments, "diloco", "fragments")
        whole(self.overlap, "diloco", "overlap", 0)
        if self.outer not in OUTER:
            raise HocketError(f"diloco(outer={self.outer!r}): use nesterov or heavyball{nearest(str(self.outer), OUTER)}.")
        if self.fragments > self.p:
            raise HocketError(f"diloco({self.p}, fragments={self.fragments}): at most one fragment per step; use at most {self.p}.")
        if self.overlap > self.p // self.fragments:
            raise HocketError(
                f"diloco({self.p}, fragments={self.fragments}, overlap={self.overlap}): the next exchange would begin before this "
                f"one ends; use an overlap of at most {self.p // self.fragments} steps."
            )
        if self.keep != "eager":
            number(self.keep, "diloco", "keep", 0, 1.0000001)
        if self.mix is not None:
            number(self.mix, "diloco", "mix", 0, 1)
        if (self.mix is not None or self.keep != 1) and not self.overlap:
            raise HocketError("diloco(keep=…, mix=…): these say how steps made during an exchange are used; give overlap=, too.")
        if self.mix is not None and self.keep != 1:
            raise HocketError("diloco(keep=…, mix=…): these are two ways to go on after an exchange; give one.")
        if self.guard is not None:
            number(self.guard, "diloco", "guard", 0, float("inf"))

    @property
    def period(self) -> int:
        return self.p

    @property
    def outer_settings(self) -> tuple[float, float]:
        return self.lr, self.momentum

    @property
    def parts(self) -> int:
        return self.fragments

    @property
    def delay(self) -> int:
        return self.overlap

    def moment(self, step: int, weights: bool, uniform: bool = True) -> Moment:
        return Moment.AFTER if self._turn(step) > self._turn(step - 1) else Moment.NEVER

    def part(self, step: int) -> int:
        return (self._turn(step) - 1) % self.fragments

    def _turn(self, step: int) -> int:
        """How many exchanges have begun after ``step``."""
        return step * self.fragments // self.p

    def refusal(self, topology: Topology, compressor: Compressor, exchange: str | None, weights: bool) -> str | None:
        if self.guard is not None and not topology.uniform:
            return "guard= compares the displacements of all workers; use allreduce, or leave it out"
        return super().refusal(topology, compressor, exchange, weights)

    def init_state(self, rows: Tensor) -> dict[str, Tensor]:
        outer = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
        state = {"outer": outer, "velocity": torch.zeros_like(outer)}
        return state if self.keep == 1 else {**state, "held": torch.zeros_like(outer)}

    def regrouped(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the guard has seen is of each worker at its place."""
        return {name: value for name, value in state.items() if name not in ("seen", "mean", "square")}

    def outgoing(self, rows: Tensor, state: dict[str, Tensor]) -> Tensor:
        return rows.clone() if self.keep == 1 else (rows + state["held"]).to(rows.dtype)

    @property
    def sends_weights(self) -> bool:
        return self.keep == 1 and self.guard is None

    @property
    def weighs_displacements(self) -> bool:
        return self.guard is not None

    def factors(self, norms: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.guard is not None
        seen = {name: state[name] for name in ("seen", "mean", "square")} if "seen" in state else init_guard(norms)
        factors, seen = guarded(norms, seen, self.guard)
        return factors, {**state, **seen}

    def apply(self, mixed: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        outer = state["outer"]
        delta = outer.to(mixed.dtype).to(outer.dtype) - mixed  # from the weights that the workers began with, rounded as theirs
        if self.guard is not None:
            delta = limited(delta)
        # In place where a tensor is new: memory for a whole model costs more time than arithmetic on it.
        velocity = (state["velocity"] * self.momentum).add_(delta)
        step = (velocity * self.momentum).add_(delta) if self.outer == "nesterov" else velocity.clone()
        outer = step.mul_(-self.lr).add_(outer)
        return outer, {**state, "outer": outer, "velocity": velocity}

    def merge(
        self, common: Tensor, rows: Tensor, sent: Tensor, state: dict[str, Tensor], workers: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.mix is not None:
            return torch.lerp(common, rows.to(common.dtype), self.mix), state
        progress = rows.to(common.dtype) - sent
        if self.keep == 1:
            return progress.add_(common), state
        share = 1 / workers if self.keep == "eager" else float(self.keep)
        return common + share * progress, {**state, "held": (1 - share) * progress}
