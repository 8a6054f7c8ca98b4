"""The line search: a step t along d at which both strong Wolfe conditions hold.

    f(t) ≤ f(0) + c₁·t·f'(0)      |f'(t)| ≤ c₂·|f'(0)|

First steps grow until an interval is sure to hold such a point, then the interval shrinks (Nocedal and Wright, *Numerical
optimization*, 2006, algorithms 3.5 and 3.6; the safeguards are those of ``torch.optim.LBFGS``, so that both take the same steps).
The search sees numbers alone: f(t), the slope f'(t) = ∇f(x + t·d)·d, and the *name* under which the shards hold that gradient.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

C1, C2 = 1e-4, 0.9


@dataclass(frozen=True)
class Point:
    """A trial: the step, the loss and the slope there, and the name of its gradient."""

    step: float
    loss: float
    slope: float
    gradient: str


Search = Generator[Any, Any, Point]
Trial = Callable[[float, set[str]], Search]
"""Evaluates at a step; its gradient must not overwrite those named in the set."""


def search(trial: Trial, start: Point, step: float, reach: float, tolerance: float, more: int) -> Search:
    """The point to go to, ``start`` itself if none was better.

    ``reach`` is max|d|: an interval inside which no parameter moves by ``tolerance`` is not refined. There are at most ``more``
    trials after the first.
    """
    before, new = start, (yield from trial(step, {start.gradient}))
    for grown in range(more):
        high = _too_high(new, start) or (grown > 1 and new.loss >= before.loss)
        if not high and _flat(new, start):
            return new
        if high or new.slope >= 0:
            return (yield from _shrink(trial, start, [before, new], reach, tolerance, more - grown))
        bounds = new.step + 0.01 * (new.step - before.step), 10 * new.step
        step = cubic(before, new, bounds)
        before, new = new, (yield from trial(step, {start.gradient, new.gradient}))
    return start if start.loss <= new.loss else new


def _shrink(trial: Trial, start: Point, ends: list[Point], reach: float, tolerance: float, more: int) -> Search:
    """Narrow the interval between two ``ends``, keeping the best point found as one of them."""
    low, stalled = _lower(ends), False
    while more > 0 and abs(ends[1].step - ends[0].step) * reach >= tolerance:
        step, stalled = _inside(cubic(ends[0], ends[1]), ends, stalled)
        new = yield from trial(step, {start.gradient, *(end.gradient for end in ends)})
        more -= 1
        if _too_high(new, start) or new.loss >= ends[low].loss:
            ends[1 - low] = new
            low = _lower(ends)
            continue
        if _flat(new, start):
            return new
        if new.slope * (ends[1 - low].step - ends[low].step) >= 0:
            ends[1 - low] = ends[low]
        ends[low] = new
    return ends[low]


def _too_high(point: Point, start: Point) -> bool:
    return point.loss > start.loss + C1 * point.step * start.slope


def _flat(point: Point, start: Point) -> bool:
    return abs(point.slope) <= -C2 * start.slope


def _lower(ends: list[Point]) -> int:
    return 0 if ends[0].loss <= ends[1].loss else 1


def _inside(step: float, ends: list[Point], stalled: bool) -> tuple[float, bool]:
    """Keeps away from the ends a step that came too near to one of them for the second time in a row, or lies on it."""
    left, right = sorted(end.step for end in ends)
    margin = 0.1 * (right - left)
    if min(right - step, step - left) >= margin:
        return step, False
    if stalled or not left < step < right:
        return (right - margin if abs(step - right) < abs(step - left) else left + margin), False
    return step, True


def cubic(a: Point, b: Point, bounds: tuple[float, float] | None = None) -> float:
    """Where the cubic through both losses and slopes is least, between ``bounds`` (a and b, unless given); the middle if nowhere.

    >>> cubic(Point(0.0, 1.0, -2.0, ""), Point(3.0, 4.0, 4.0, ""))  # of (t − 1)²
    1.0
    """
    if a.step > b.step:
        a, b = b, a
    low, high = bounds or (a.step, b.step)
    width = b.step - a.step
    least = math.nan
    if width and math.isfinite(a.loss) and math.isfinite(b.loss):
        bend = a.slope + b.slope - 3 * (b.loss - a.loss) / width
        square = bend * bend - a.slope * b.slope
        if square >= 0:
            root = math.sqrt(square)
            up, down = b.slope + root - bend, b.slope - a.slope + 2 * root
            least = b.step - (width * (up / down) if down else math.inf * up)  # a straight line: as far as allowed
    return (low + high) / 2 if math.isnan(least) else min(max(least, low), high)
