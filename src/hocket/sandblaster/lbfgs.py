"""L-BFGS as a conversation: it yields orders for the shards and requests for evaluations, and receives scalars.

With s_k = x_{k+1} − x_k, y_k = g_{k+1} − g_k, ρ_k = 1 / y_k·s_k the direction d = −H·g is the two-loop recursion

    d ← −g;  for k = newest … oldest: α_k = ρ_k s_k·d, d ← d − α_k y_k
    d ← (y·s / y·y) d;  for k = oldest … newest: d ← d + (α_k − ρ_k y_k·d) s_k

(Nocedal, *Updating quasi-Newton matrices with limited storage*, 1980), and a strong-Wolfe search finds the step along it. The first
step, the curvature test and the tolerances are those of ``torch.optim.LBFGS``: on one batch both make the same evaluations.

Vectors never pass through here. The shards know them by name: ``x``, the direction ``d``, the ``trial`` point, the gradients
``g0 … g3`` (start, both ends of an interval, a new trial), the history ``s0, y0, …``. All that is kept here is plain data, the
:class:`State`.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from hocket.errors import HocketError
from hocket.sandblaster.vectors import Order
from hocket.sandblaster.wolfe import Point, Search, search

GRADIENTS = ("g0", "g1", "g2", "g3")
CURVATURE = 1e-10


@dataclass(frozen=True)
class Settings:
    """The optimiser's own settings; names and defaults are those of ``torch.optim.LBFGS``, history and l2 aside."""

    history: int = 10
    max_iter: int = 20
    max_eval: int | None = None
    lr: float = 1.0
    tolerance_grad: float = 1e-7
    tolerance_change: float = 1e-9
    l2: float = 0.0

    def __post_init__(self) -> None:
        for name in ("history", "max_iter", "evaluations"):
            if getattr(self, name) < 1:
                shown = "max_eval" if name == "evaluations" else name
                raise HocketError(f"L-BFGS: {shown}={getattr(self, name)} must be at least 1.")
        if not 0 < self.lr < math.inf:
            raise HocketError(f"L-BFGS: lr={self.lr:g}: the first step tried must be above 0; 1 is right for most.")
        for name in ("tolerance_grad", "tolerance_change", "l2"):
            if not getattr(self, name) >= 0:
                raise HocketError(f"L-BFGS: {name}={getattr(self, name):g} must be at least 0.")

    @property
    def evaluations(self) -> int:
        """The most evaluations there may be (a line search ends at its next trial)."""
        return self.max_iter * 5 // 4 if self.max_eval is None else self.max_eval


@dataclass
class State:
    """All the coordinator knows after an iteration: enough to go on from it, given the shards' vectors."""

    iteration: int = 0
    evaluations: int = 0
    loss: float = math.nan
    step: float = 0.0
    gradient: str = GRADIENTS[0]
    previous: str = GRADIENTS[0]
    pairs: list[tuple[int, float]] = field(default_factory=list)
    """The history, oldest first: k of ``s_k`` and ``y_k``, and ρ_k."""
    scale: float = 1.0
    ended: str = ""


@dataclass(frozen=True)
class Ask:
    """Orders for all shards; answered by one scalar each (0 where nothing was asked)."""

    orders: tuple[Order, ...]


@dataclass(frozen=True)
class Evaluate:
    """Orders ``first``, then the loss and (``into``) the gradient of the whole batch at vector ``at``, then orders ``then``.

    Answered by the loss and the scalars of ``then``.
    """

    first: tuple[Order, ...]
    at: str
    into: str
    then: tuple[Order, ...]


@dataclass(frozen=True)
class Mark:
    """An iteration has ended (number 0: the first evaluation); answered by anything."""

    state: State


Conversation = Generator[Ask | Evaluate | Mark, Any, str]


def lbfgs(settings: Settings, state: State | None = None) -> Conversation:
    """Minimise from where ``state`` stands; returns why it ended."""
    state = State() if state is None else state
    if not state.evaluations:
        yield from _begin(settings, state)
        yield Mark(state)
    while not state.ended:
        slope, reach, size = yield from _direction(settings, state)
        if slope > -settings.tolerance_change:
            state.ended = "the direction no longer descends"
            break
        first = settings.lr * (min(1.0, 1.0 / size) if state.iteration == 0 else 1.0)
        start = Point(0.0, state.loss, slope, state.gradient)

        def trial(step: float, used: set[str]) -> Search:
            return _trial(settings, state, step, used)

        left = settings.evaluations - state.evaluations
        point = yield from search(trial, start, first, reach, settings.tolerance_change, left)
        _, peak = yield Ask((("axpy", "x", point.step, "d"), ("max", point.gradient)))
        change = abs(point.loss - state.loss)
        state.iteration += 1
        state.loss, state.step, state.gradient, state.previous = point.loss, point.step, point.gradient, start.gradient
        state.ended = _verdict(settings, state, peak, reach * abs(point.step), change)
        yield Mark(state)
    return state.ended


def _begin(settings: Settings, state: State) -> Generator[Any, Any, None]:
    state.loss, peak = yield from _evaluate(settings, (), "x", state.gradient, ("max", state.gradient))
    state.evaluations = 1
    if not math.isfinite(state.loss) or not math.isfinite(peak):
        raise HocketError(f"L-BFGS: the loss at the start is {state.loss:g}; begin where loss and gradient are finite.")
    if peak <= settings.tolerance_grad:
        state.ended = "the gradient is within its tolerance"


def _direction(settings: Settings, state: State) -> Generator[Any, Any, tuple[float, float, float]]:
    """Leaves the direction in ``d``; its slope g·d, max|d| and Σ|g|."""
    orders: list[Order] = [("scale", "d", -1.0, state.gradient)]
    if state.iteration:
        yield from _remember(settings, state)
        alphas: dict[int, float] = {}
        for k, rho in reversed(state.pairs):
            *_, product = yield Ask((*orders, ("dot", f"s{k}", "d")))
            alphas[k] = product * rho
            orders = [("axpy", "d", -alphas[k], f"y{k}")]
        orders.append(("scale", "d", state.scale, "d"))
        for k, rho in state.pairs:
            *_, product = yield Ask((*orders, ("dot", f"y{k}", "d")))
            orders = [("axpy", "d", alphas[k] - product * rho, f"s{k}")]
    *_, slope, reach, size = yield Ask((*orders, ("dot", state.gradient, "d"), ("max", "d"), ("sum", state.gradient)))
    return slope, reach, size


def _remember(settings: Settings, state: State) -> Generator[Any, Any, None]:
    """The last step into the history, where its curvature is safely positive."""
    k = next(k for k in range(settings.history + 1) if k not in {used for used, _ in state.pairs})
    s, y = f"s{k}", f"y{k}"
    *_, ys, yy = yield Ask(
        (("minus", y, state.gradient, state.previous), ("scale", s, state.step, "d"), ("dot", y, s), ("dot", y, y))
    )
    if ys > CURVATURE:
        state.pairs = [*state.pairs, (k, 1.0 / ys)][-settings.history :]
        state.scale = ys / yy


def _trial(settings: Settings, state: State, step: float, used: set[str]) -> Search:
    into = next(name for name in GRADIENTS if name not in used)
    move: tuple[Order, ...] = (("copy", "trial", "x"), ("axpy", "trial", step, "d"))
    loss, slope = yield from _evaluate(settings, move, "trial", into, ("dot", into, "d"))
    state.evaluations += 1
    return Point(step, loss if math.isfinite(loss) else math.inf, slope, into)


def _evaluate(
    settings: Settings, first: tuple[Order, ...], at: str, into: str, last: Order
) -> Generator[Any, Any, tuple[float, float]]:
    """The loss and one scalar; l2/2·|x|² is added to the loss, and on the shards l2·x to the gradient."""
    if not settings.l2:
        loss, scalar = yield Evaluate(first, at, into, (last,))
        return loss, scalar
    loss, _, square, scalar = yield Evaluate(first, at, into, (("axpy", into, settings.l2, at), ("dot", at, at), last))
    return loss + settings.l2 / 2 * square, scalar


def _verdict(settings: Settings, state: State, peak: float, moved: float, change: float) -> str:
    if state.iteration >= settings.max_iter:
        return "max_iter is reached"
    if state.evaluations >= settings.evaluations:
        return "max_eval is reached"
    if peak <= settings.tolerance_grad:
        return "the gradient is within its tolerance"
    if moved <= settings.tolerance_change or change < settings.tolerance_change:
        return "the change is within its tolerance"
    return ""
