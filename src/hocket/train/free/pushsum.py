"""``async + gossip(pushsum)``: workers give half of what they have to another one, and wait for nobody (SGP, Assran 2019).

Worker ``i`` holds ``x_i`` and a mass ``ω_i`` (1 at first) and computes at ``z_i = x_i / ω_i``. After each gradient it adds its
update to ``x_i``, keeps half of ``x_i`` and of ``ω_i``, and sends the other half on; whatever arrives is added. The graph is
directed: at its k-th sending a worker reaches the one at distance ``2^k`` (in turn). Nothing is ever lost, so ``Σ x`` and ``Σ ω``,
with what is on its way, stay what they are but for updates, and ``Σ x / Σ ω`` is the mean.

Whether a half goes out, and to whom, is said by the rule of real workers (:func:`hocket.server.exchanges.receiver`): one with less
than half of its first mass keeps it, and passes over those who have not acknowledged its last half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.cluster.message import framed
from hocket.server.exchanges import receiver
from hocket.train.free.scheme import Heard, Payload, Scheme

if TYPE_CHECKING:
    from hocket.train.free.training import FreeTraining


class PushSum(Scheme):
    """Halves on their way round."""

    def __init__(self, training: FreeTraining) -> None:
        super().__init__(training)
        self.x = [w.clone() for w in self.crowd.weights]
        self.mass = torch.ones(self.crowd.rows, dtype=torch.float64)
        self.turns = [0] * self.crowd.rows
        self.open: list[set[int]] = [set() for _ in range(self.crowd.rows)]
        """To whom each worker has a half under way that has not been acknowledged."""
        self.done = 0
        self.heard = Heard(self.crowd.rows)
        self.size = framed(self.crowd.layout.bytes + 8)

    def computed(self, worker: int, now: float) -> None:
        before = [w[worker].clone() for w in self.crowd.weights]
        self.crowd.step_alone(worker, self.training.rates(worker))
        self.heard.applied(worker)
        for x, rows, old in zip(self.x, self.crowd.weights, before, strict=True):
            x[worker] = rows[worker] if self.crowd.rows == 1 else x[worker] + (rows[worker] - old)
        if self.crowd.rows > 1:
            self._give(worker, now)
            self._look(worker)
        self.done += 1
        self.training.begin(worker, now)

    def _give(self, worker: int, now: float) -> None:
        """Send half of what a worker has to the next one, unless it keeps all."""
        mass, open_ = float(self.mass[worker]), self.open[worker]
        other, self.turns[worker] = receiver(worker, self.crowd.rows, self.turns[worker], mass, open_)
        if other is None:
            return
        for x in self.x:
            x[worker] /= 2
        self.mass[worker] /= 2
        half = ([x[worker].clone() for x in self.x], float(self.mass[worker]))
        open_.add(other)
        self.training.send("half", worker, other, other, self.size, half, now)

    def arrived(self, kind: str, worker: int, end: int, payload: Payload, now: float) -> None:
        if kind == "acknowledged":
            self.open[worker].discard(end)
            self.training.stood(worker, 0.0, 0.0, 0.0)
            return
        self.training.settle(end)
        values, mass = payload
        for x, part in zip(self.x, values, strict=True):
            x[end] += part
        self.mass[end] += mass
        self.heard.contribution(end)
        self._look(end)
        self.training.send("acknowledged", worker, end, worker, framed(0), None, now, end)

    def _look(self, worker: int) -> None:
        for rows, x in zip(self.crowd.weights, self.x, strict=True):
            rows[worker] = x[worker] / float(self.mass[worker])

    def again(self, worker: int, now: float) -> None:
        self.heard.read(worker)
        super().again(worker, now)

    def ages(self) -> dict[int, int]:
        return self.heard.ages()

    def counted(self) -> int:
        return self.done

    def truth(self) -> list[Tensor]:
        return [x.sum(0, keepdim=True) / float(self.mass.sum()) for x in self.x]

    def state_dict(self) -> dict[str, Any]:
        return {
            "x": [x.clone() for x in self.x],
            "mass": self.mass.clone(),
            "turns": list(self.turns),
            "open": [sorted(others) for others in self.open],
            "done": self.done,
            "heard": self.heard.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for own, saved in zip(self.x, state["x"], strict=True):
            own.copy_(saved)
        self.mass.copy_(state["mass"])
        self.turns, self.done = list(state["turns"]), state["done"]
        self.open = [set(others) for others in state["open"]]
        self.heard.load_state_dict(state["heard"])
