"""How the loss goes on: a law fitted to short trainings, for longer ones, more workers, longer periods and sparser messages.

    L(t, N, p, d) = E + A · t^−a · N^b · p^c · (1 + (1/d − 1)·p/t)^e

``t`` are steps, ``N`` workers, ``p`` steps between two exchanges, ``d`` the share of values that are sent; ``E ≥ 0`` is what no
training gets below. (A power of the steps with a floor: Hestness 2017, arXiv:1712.00409. A power of the workers under local steps:
the scaling law of DiLoCo, arXiv:2503.09799, ``loss · N^β``. With error feedback a value waits for ``1/d`` exchanges or so, which
counts the less the longer the training is: Stich 2020, arXiv:1909.05350.) What does not vary among the trainings gets no exponent.

*Fit*: for each of many ``E`` the logarithms make it linear; the ``E`` whose fit has the smallest squared error of ``log L`` is
taken. *Error*: the law is fitted again without each training in turn (the jackknife, Quenouille 1956). An interval is twice the
root of the squared residual plus the squared spread of these, so it grows with the distance from what was trained.

*Limits*: losses of whole trainings whose rates have fallen to the end, not points on the way; the same data, model, optimiser and
batch per worker. Beyond about eight times the longest training or the most workers it is a guess, whatever the interval says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.errors import HocketError

NAMES = ("steps", "workers", "period", "density")
_FLOORS = 60
_SIGMAS = 2.0


@dataclass(frozen=True)
class Training:
    """One whole training and the loss at its end."""

    steps: int
    loss: float
    workers: int = 1
    period: int = 1
    density: float = 1.0

    def logs(self) -> list[float]:
        """What the exponents belong to, in the order of :data:`NAMES`."""
        waiting = (1 / self.density - 1) * self.period / self.steps
        return [math.log(self.steps), math.log(self.workers), math.log(self.period), math.log1p(waiting)]


@dataclass(frozen=True)
class Extrapolation:
    """A loss and its interval."""

    loss: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.loss:.3f} ({self.low:.3f}–{self.high:.3f})"


@dataclass(frozen=True)
class Law:
    """The fitted law; ``exponents[name]`` belongs to :meth:`Training.logs`."""

    floor: float
    scale: float
    exponents: dict[str, float]
    residual: float
    """The root mean square of ``log L − log of the fit``, for the degrees of freedom that are left."""
    trainings: tuple[Training, ...]
    others: tuple[Law, ...] = ()
    """Fitted without one training each."""

    def at(self, training: Training) -> float:
        """The law's loss for such a training (its own loss is not read)."""
        logs = dict(zip(NAMES, training.logs(), strict=True))
        return self.floor + self.scale * math.exp(sum(power * logs[name] for name, power in self.exponents.items()))

    def loss(self, steps: int, workers: int = 1, period: int = 1, density: float = 1.0) -> Extrapolation:
        """The loss to expect of a training, with its interval."""
        asked = Training(steps, math.nan, workers, period, density)
        for name in NAMES:
            value, seen = getattr(asked, name), {getattr(t, name) for t in self.trainings}
            if name not in self.exponents and value not in seen:
                raise HocketError(
                    f"The law cannot predict {name} = {value}: all trainings had {seen.pop()}; add trainings with other {name}."
                )
        found = self.at(asked)
        without = [math.log(other.at(asked)) for other in self.others]
        count, mean = len(without), sum(without) / max(1, len(without))
        spread = math.sqrt((count - 1) / count * sum((value - mean) ** 2 for value in without)) if count else 0.0
        width = _SIGMAS * math.hypot(self.residual, spread)
        return Extrapolation(found, found * math.exp(-width), found * math.exp(width))

    def __str__(self) -> str:
        bases = {"density": "(1 + (1/density − 1)·period/steps)"}
        powers = " · ".join(f"{bases.get(name, name)}^{power:+.3g}" for name, power in self.exponents.items())
        return f"{self.floor:.3g} + {self.scale:.3g} · {powers} (± {2 * self.residual:.1%} on {len(self.trainings)} trainings)"


def fit(trainings: Sequence[Training]) -> Law:
    """The law of some trainings; at least two more than there are exponents.

    >>> law = fit([Training(t, 1 + 8 * t**-0.5 * n**0.1, n) for t in (10, 40, 160) for n in (1, 4)])
    >>> round(law.floor, 2), {name: round(power, 2) for name, power in law.exponents.items()}
    (1.0, {'steps': -0.5, 'workers': 0.1})
    """
    for training in trainings:
        if not (math.isfinite(training.loss) and training.loss > 0):
            raise HocketError(f"A law is fitted to losses above 0, not to {training.loss}; leave out trainings that diverged.")
    varied = [name for name in NAMES if len({getattr(t, name) for t in trainings}) > 1]
    if len(trainings) < len(varied) + 3:
        raise HocketError(f"A law of {', '.join(varied) or 'nothing'} needs {len(varied) + 3} trainings, not {len(trainings)}.")
    whole = _fitted(trainings, varied)
    others = []
    for k in range(len(trainings)):
        left = [*trainings[:k], *trainings[k + 1 :]]
        if all(len({getattr(t, name) for t in left}) > 1 for name in varied):
            others.append(_fitted(left, varied))
    return Law(whole.floor, whole.scale, whole.exponents, whole.residual, tuple(trainings), tuple(others))


def _fitted(trainings: Sequence[Training], varied: Sequence[str]) -> Law:
    logs = torch.tensor([t.logs() for t in trainings], dtype=torch.float64)
    columns = [torch.ones(len(trainings), dtype=torch.float64), *(logs[:, NAMES.index(name)] for name in varied)]
    table, losses = torch.stack(columns, 1), torch.tensor([t.loss for t in trainings], dtype=torch.float64)
    least = float(losses.min())
    low, high = 0.0, 0.995 * least
    for _ in range(3):  # a grid, then two finer ones around the best
        floors = torch.linspace(low, high, _FLOORS, dtype=torch.float64).tolist()
        best = min(floors, key=lambda floor: _solved(table, losses, floor)[1])
        width = (high - low) / (_FLOORS - 1)
        low, high = max(0.0, best - width), min(0.999 * least, best + width)
    weights, error = _solved(table, losses, best)
    free = max(1, len(trainings) - len(weights) - 1)
    powers = dict(zip(varied, weights[1:].tolist(), strict=True))
    return Law(best, math.exp(float(weights[0])), powers, math.sqrt(error / free), tuple(trainings))


def _solved(table: Tensor, losses: Tensor, floor: float) -> tuple[Tensor, float]:
    """The weights of the linear fit above ``floor``, and the squared error of ``log L``."""
    above = losses - floor
    weights = above / losses  # an error of log(L − E) counts as the one of log L that it makes
    solved = torch.linalg.lstsq(table * weights.unsqueeze(1), (above.log() * weights).unsqueeze(1)).solution.flatten()
    found = floor + (table @ solved).exp()
    return solved, float(((losses.log() - found.log()) ** 2).sum())
